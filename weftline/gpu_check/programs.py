"""Parts run as programs: compute-sanitizer, the LLM's check, pipelines and hops.

Each is looked for first, and skipped with the name of what is missing: packages, tools, a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weftline.gpu_check.running import (
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
from weftline.gpu_check.trial import Trial, source_file

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
    "families": "fused models of the other families",
    "together 70b fp8": "a closed loop of 100 requests, 70 billion weights in fp8",
}
"""Parts of weftline.engine.llm.gpu.check, by its names, and what they are about."""

LARGE = {name for name in LLM_PARTS if name.endswith(("8b", "fp8"))} | {"sleep", "long prompt"}
"""Those that want the memory of a process that ran nothing before."""
LLM_COMMAND = [sys.executable, "-m", "weftline.engine.llm.gpu.check"]
TRANSFORMERS_SHARE = 3.0
"""Bar: how many times the tokens a second of transformers' continuous batching a closed loop has to reach."""

LLM_PACKAGES = ("torch", "triton", "transformers", "safetensors")
FAKE_LLM_PACKAGES = ("torch", "transformers", "safetensors")
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


def check_memory_accesses(trial: Trial) -> dict[str, Any]:
    """V12: sharing, leases and hops under compute-sanitizer's memcheck, in every process they start."""
    tool = shutil.which(SANITIZER)
    if tool is None:
        raise Skipped(f"{SANITIZER} is not installed")
    ours = [
        sys.executable, "-m", "weftline.gpu_check", "--device", trial.device, "--quick",
        "--only", "share", "leases", "hops",
    ]  # fmt: skip
    watched = ["--tool", "memcheck", "--target-processes", "all", "--error-exitcode", str(SANITIZER_CODE)]
    watched += ["--report-api-errors", "no"]  # a driver may refuse what is tried: a rung, or locking read-only memory
    try:
        code, said = run_limited([tool, *watched, *ours], max(trial.left_s, 1))
    except TimeoutError:
        raise Wrong(f"took more than the {trial.left_s:.0f} s that were left") from None
    found = [line.strip() for line in said.splitlines() if line.startswith("========= ")]
    if code == SANITIZER_CODE:
        raise Wrong(f"{SANITIZER} found: {' | '.join(found[:6])}")
    if code == NOT_SHOWN:
        raise Skipped(f"under {SANITIZER}: {' | '.join(said.strip().splitlines()[-3:])}")
    if code != 0:
        raise Wrong(f"under {SANITIZER} the check ended with {code}: {' | '.join(said.strip().splitlines()[-4:])}")
    return {"memcheck": found[-1].removeprefix("========= ") if found else "nothing found"}


def llm_part(name: str) -> Callable[[Trial], CheckOutcome]:
    """Return a part of the LLM's own check as a part of this one."""

    def check(trial: Trial) -> CheckOutcome:
        if not trial.fake:
            require_driver()
        require(LLM_PACKAGES if not trial.fake else FAKE_LLM_PACKAGES)
        if name in LARGE and not trial.fake:
            trial.llm.end()
        asked = {"name": name, "device": trial.device, "quick": trial.quick, "full": trial.full}
        outcome = trial.llm.run(trial.part, asked, max(trial.left_s, 1))
        if name == "transformers 8b" and outcome.state == RIGHT:
            outcome.bars += _beside_transformers(trial, outcome)
        return outcome

    return check


def _beside_transformers(trial: Trial, outcome: CheckOutcome) -> list[Bar]:
    """Return the bar of the closed loop against transformers' rate; Wrong without the loop's."""
    ours, theirs = trial.earlier.get("llm: together 8b"), outcome.figures["tokens_per_s"]
    if ours is None or ours.state != RIGHT:
        raise Skipped("`llm: together 8b` has no rate to compare with: ask for both")
    rate = ours.figures["tokens_per_s"]
    return [judged("closed loop against transformers", rate / theirs, TRANSFORMERS_SHARE, "times", at_least=True,
                   judge=trial.judges)]  # fmt: skip


def check_pipeline(trial: Trial) -> CheckOutcome:
    """The flagship on the device: its answer beside the CPU's, its plan, its times, and what its workers take."""
    require(FLAGSHIP_PACKAGES)
    file = source_file(FLAGSHIP)
    if trial.fake and not trial.full:
        raise Skipped("only with --full on a fake: its models take longer to load than all the rest")
    command = [sys.executable, "-m", "weftline.gpu_check.flagship", str(file), "--device", trial.device]
    return run_apart(trial.part, [*command, *["--quick"] * trial.quick], max(trial.left_s, 1))


def check_llm_step(trial: Trial) -> CheckOutcome:
    """An llm and an embed step on one device, as in service; their answers are the CPU's.

    Workers are hardened, memory has a budget, and the KV memory is what the budget leaves.
    """
    require(LLM_STEP_PACKAGES)
    if trial.fake and not trial.full:
        raise Skipped("only with --full on a fake: its workers take longer to start than all the rest")
    command = [sys.executable, "-m", "weftline.gpu_check.flagship", "--shared", "--device", trial.device]
    return run_apart(trial.part, [*command, *["--quick"] * trial.quick], max(trial.left_s, 1))


def check_engine_hops(trial: Trial) -> dict[str, Any]:
    """Time a hop through the engine, its scheduler included, by benchmarks/device_hop.py of a source tree."""
    require(PIPELINE_PACKAGES)
    script = source_file(ENGINE_HOPS)
    if trial.fake and not trial.full:
        raise Skipped("only with --full on a fake: its workers take longer to start than all the rest")
    command = [sys.executable, str(script), "--device", trial.device, "--quick"]
    try:
        code, said = run_limited(command, max(trial.left_s, 1), {"PYTHONPATH": _search_path()})
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
