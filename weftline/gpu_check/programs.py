"""Parts run as programs: compute-sanitizer, the LLM's check, pipelines and hops.

Each is looked for first, and skipped with the name of what is missing: packages, tools, a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weftline.gpu_check.context import CheckContext, source_file
from weftline.gpu_check.failures import lose
from weftline.gpu_check.hops import check_hops
from weftline.gpu_check.leases import check_leases
from weftline.gpu_check.memory import check_share
from weftline.gpu_check.outcomes import (
    NOT_SHOWN,
    RIGHT,
    Bar,
    CheckOutcome,
    Skipped,
    Wrong,
    judged,
    run_apart,
    run_limited,
)

LLM_PARTS = {
    "kernels": "each kernel beside a reference in float64",
    "graphs": "decoding by CUDA graphs and without them",
    "fused": "small models, fused and as they are, beside a CPU",
    "decode 8b": "rounds of one and of 64 sequences, 8 billion weights",
    "together 8b": "a closed loop of 64 requests, 8 billion weights",
    "transformers 8b": "such requests by transformers' continuous batching",
    "profile 8b": "the kernels of one round, and the time without any",
    "sleep": "memory a step frees asleep, and its answers awake again",
    "refused prompt": "one too long for the pages, beside others",
    "KV resize": "pages grow and shrink under requests, graphs are captured again",
    "mixed rounds": "greedy, warm, narrowed and penalised requests beside newcomers",
    "long prompt": "a prompt of 7000 tokens beside 63 that decode",
    "open as served": "a step's memory and graphs, 8 billion weights, and what a shrink returns",
    "features": "fp8 keys and weights, an adapter, drafts",
    "families": "fused models of the other families",
    "together 70b fp8": "a closed loop of 100 requests, 70 billion weights in fp8",
}
"""Parts of weftline.gpu_check.llm, by its names, and what they are about."""

LARGE = {name for name in LLM_PARTS if name.endswith(("8b", "fp8"))} | {"sleep", "long prompt", "open as served"}
"""Parts that need the memory of a fresh process."""
LLM_COMMAND = [sys.executable, "-m", "weftline.gpu_check.llm"]
TRANSFORMERS_SHARE = 3.0
"""Bar: how many times the tokens a second of transformers' continuous batching a closed loop has to reach."""

LLM_PACKAGES = ("msgspec", "torch", "triton", "transformers", "safetensors")
FAKE_LLM_PACKAGES = ("msgspec", "torch", "transformers", "safetensors")
PIPELINE_PACKAGES = ("msgspec", "pydantic", "networkx", "yaml", "jinja2", "torch")
LLM_STEP_PACKAGES = (*PIPELINE_PACKAGES, "transformers", "tokenizers", "llguidance")
FLAGSHIP_PACKAGES = (*LLM_STEP_PACKAGES, "PIL", "soundfile", "whisper", "ultralytics")
FLAGSHIP = "examples/voice_photo_assistant.yaml"
PLACE_WIDTH = 26
"""Columns of a place in what benchmarks/device_hop.py prints."""
ENGINE_HOPS = "benchmarks/device_hop.py"
SANITIZER = "compute-sanitizer"
SANITIZER_CODE = 9
"""Exit code of compute-sanitizer when it found an error."""


def check_memory_accesses(context: CheckContext) -> dict[str, Any]:
    """V12: sharing, leases and hops under compute-sanitizer's memcheck, in every process they start."""
    tool = shutil.which(SANITIZER)
    if tool is None:
        raise Skipped(f"{SANITIZER} is not installed")
    ours = [
        sys.executable, "-m", "weftline.gpu_check", "--device", context.device, "--quick",
        "--only", "share", "leases", "hops",
    ]  # fmt: skip
    watched = ["--tool", "memcheck", "--target-processes", "all", "--error-exitcode", str(SANITIZER_CODE)]
    watched += [
        "--report-api-errors",
        "no",
    ]  # a driver may refuse a share mode, or locking read-only memory
    try:
        code, said = run_limited([tool, *watched, *ours], max(context.left_s, 1))
    except TimeoutError:
        raise Wrong(f"took more than the {context.left_s:.0f} s that were left") from None
    found = [line.strip() for line in said.splitlines() if line.startswith("========= ")]
    if code == SANITIZER_CODE:
        raise Wrong(f"{SANITIZER} found: {' | '.join(found[:6])}")
    if code == NOT_SHOWN:
        raise Skipped(f"under {SANITIZER}: {' | '.join(said.strip().splitlines()[-3:])}")
    if code != 0:
        raise Wrong(f"under {SANITIZER} the check ended with {code}: {' | '.join(said.strip().splitlines()[-4:])}")
    return {"memcheck": found[-1].removeprefix("========= ") if found else "nothing found"}


def llm_part(name: str) -> Callable[[CheckContext], CheckOutcome]:
    """Return a part of the LLM's own check as a part of this one."""

    def check(context: CheckContext) -> CheckOutcome:
        if not context.fake:
            require_driver()
        require(LLM_PACKAGES if not context.fake else FAKE_LLM_PACKAGES)
        if name in LARGE and not context.fake:
            context.llm.end()
        asked = {"name": name, "device": context.device, "quick": context.quick, "full": context.full}
        outcome = context.llm.run(context.part, asked, max(context.left_s, 1))
        if name == "transformers 8b" and outcome.state == RIGHT:
            outcome.bars += _beside_transformers(context, outcome)
        return outcome

    return check


def _beside_transformers(context: CheckContext, outcome: CheckOutcome) -> list[Bar]:
    """Return the bar of the closed loop against transformers' rate; Wrong without the loop's."""
    ours, theirs = context.earlier.get("llm: together 8b"), outcome.figures["tokens_per_s"]
    if ours is None or ours.state != RIGHT:
        raise Skipped("`llm: together 8b` has no rate to compare with: ask for both")
    rate = ours.figures["tokens_per_s"]
    return [judged("closed loop against transformers", rate / theirs, TRANSFORMERS_SHARE, "times", at_least=True,
                   judge=context.judges)]  # fmt: skip


def check_pipeline(context: CheckContext) -> CheckOutcome:
    """The flagship on the device: its answer beside the CPU's, its plan, its times, and what its workers take."""
    require(FLAGSHIP_PACKAGES)
    file = source_file(FLAGSHIP)
    if context.fake and not context.full:
        raise Skipped("only with --full on a fake: its models take longer to load than all the rest")
    command = [sys.executable, "-m", "weftline.gpu_check.flagship", str(file), "--device", context.device]
    return run_apart(context.part, [*command, *["--quick"] * context.quick], max(context.left_s, 1))


def check_llm_step(context: CheckContext) -> CheckOutcome:
    """An llm and an embed step on one device, as in service; their answers are the CPU's.

    Workers are hardened, memory has a budget, and the KV memory is what the budget leaves.
    """
    require(LLM_STEP_PACKAGES)
    if context.fake and not context.full:
        raise Skipped("only with --full on a fake: its workers take longer to start than all the rest")
    command = [sys.executable, "-m", "weftline.gpu_check.flagship", "--shared", "--device", context.device]
    return run_apart(context.part, [*command, *["--quick"] * context.quick], max(context.left_s, 1))


def check_engine_hops(context: CheckContext) -> dict[str, Any]:
    """Time a hop through the engine, its scheduler included, by benchmarks/device_hop.py of a source tree."""
    require(PIPELINE_PACKAGES)
    script = source_file(ENGINE_HOPS)
    if context.fake and not context.full:
        raise Skipped("only with --full on a fake: its workers take longer to start than all the rest")
    command = [sys.executable, str(script), "--device", context.device, "--quick"]
    try:
        code, said = run_limited(command, max(context.left_s, 1), {"PYTHONPATH": _search_path()})
    except TimeoutError:
        raise Wrong("took more than the time that it has") from None
    if code != 0:
        raise Wrong(f"benchmarks/device_hop.py ended with {code}: {' | '.join(said.strip().splitlines()[-3:])}")
    figures = {}
    for what, _, rest in (line.partition(" B  ") for line in said.splitlines() if " B  " in line):
        place, found = rest[:PLACE_WIDTH].strip(), rest[PLACE_WIDTH:].strip()
        figures[f"{' '.join(what.split())} bytes, {place}: one more hop, ms"] = found
    if not figures:
        raise Wrong(f"benchmarks/device_hop.py gave no figure: {' | '.join(said.strip().splitlines()[-3:])}")
    return figures


def _search_path() -> str:
    """Return this process's search path: a script elsewhere finds the same modules."""
    return os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)


def require(packages: Sequence[str]) -> None:
    """Raise Skipped unless all of these can be imported; nothing is."""
    for name in packages:
        try:
            missing = importlib.util.find_spec(name) is None
        except (ImportError, ValueError):
            missing = True
        if missing:
            raise Skipped(f"package {name} is not installed")


def require_driver() -> None:
    """Raise Skipped unless this machine has NVIDIA's driver; it is looked for, and not started."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Skipped("NVIDIA's driver is not installed here") from None


DAEMON = "nvidia-cuda-mps-control"
START_MAX_S = 20.0
OTHERS = 2
"""Clients beside the one that faults."""


def check_mps(context: CheckContext) -> dict[str, Any]:
    """V10: sharing, leases and hops as clients of the service; then a fault in one client, and what the others see."""
    with _service() as environment:
        under = replace(context, environment=environment, quick=True)
        figures = {f"under the service: {key}": value for key, value in check_share(under).items()}
        for part in (check_leases, check_hops):
            figures |= {f"under the service: {key}": value for key, value in part(under).figures.items()}
        with under.group() as group:
            doomed = group.start("the doomed")
            others = [group.start(f"client {number}") for number in range(OTHERS)]
            for one in others:
                one.ask("open")
            figures["a client that faults"] = lose(doomed)
            served = sum(_serves(one) for one in others)
            figures["other clients that serve on"] = f"{served} of {OTHERS}"
            for one in (doomed, *others):
                group.dismiss(one)
            figures["a new client afterwards"] = "serves" if _serves(group.start("a new client")) else "does not serve"
    return figures


def _serves(process: Any) -> bool:
    """Return True if a process can still use its device."""
    try:
        process.ask("make", arena="b", size_bytes=1 << 20)
        process.ask("fill", arena="b", offset=0, size_bytes=1 << 16, seed=1)
    except Wrong:
        return False
    return True


@contextlib.contextmanager
def _service() -> Iterator[dict[str, str]]:
    """Run the service for a while; yields the variables by which its clients find it. Skipped where it cannot run."""
    daemon = shutil.which(DAEMON)
    if daemon is None:
        raise Skipped(f"{DAEMON} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pipe", "log"):
            (Path(folder) / name).mkdir()
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(Path(folder) / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(Path(folder) / "log"),
        }
        try:
            code, said = run_limited([daemon, "-d"], START_MAX_S, environment, keep=True)
        except TimeoutError:
            raise Skipped(f"{DAEMON} did not start within {START_MAX_S:.0f} s") from None
        if code != 0:
            raise Skipped(f"{DAEMON} ended with {code}: {' | '.join(said.strip().splitlines()[-2:])}")
        try:
            yield environment
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [daemon], input="quit\n", text=True, timeout=START_MAX_S, check=False, capture_output=True,
                    env={**os.environ, **environment},
                )  # fmt: skip
