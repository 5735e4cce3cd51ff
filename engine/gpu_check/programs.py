"""Parts that are programs of their own: compute-sanitizer, the LLM's check, the flagship, the engine's hops.

Each is looked for first, and skipped with the name of what is missing: packages, tools, a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weftline.engine.gpu_check.running import Outcome, Skipped, Wrong, run_apart, run_limited
from weftline.engine.gpu_check.trial import Trial

LLM_PARTS = {
    "kernels": "each kernel beside a reference in float64",
    "fused": "small models, fused and as they are, beside a CPU",
    "graphs": "decoding by CUDA graphs and without them",
    "sleep": "what a step gives back asleep, and what it says awake again",
    "decode 8b": "rounds of one and of 64 sequences, 8 billion weights",
    "together 8b": "64 requests at once, 8 billion weights",
    "transformers 8b": "the same requests by transformers",
    "together 70b fp8": "100 requests at once, 70 billion weights in fp8",
}
"""Parts of weftline.engine.llm.gpu.check, by its names, and what they are about."""

LLM_PACKAGES = ("torch", "triton", "transformers", "safetensors")
PIPELINE_PACKAGES = ("msgspec", "pydantic", "networkx", "yaml", "jinja2", "PIL", "soundfile", "torch")
FLAGSHIP_PACKAGES = (*PIPELINE_PACKAGES, "whisper", "ultralytics", "transformers", "llguidance")
ROOT = Path(__file__).resolve().parents[2]
FLAGSHIP = ROOT / "examples" / "voice_photo_assistant.yaml"
SANITIZER = "compute-sanitizer"
SANITIZER_CODE = 9
"""What compute-sanitizer is told to end with when it found something."""


def check_memory_accesses(trial: Trial) -> dict[str, Any]:
    """V12: sharing, leases and hops under compute-sanitizer's memcheck, in every process they start."""
    tool = shutil.which(SANITIZER)
    if tool is None:
        raise Skipped(f"{SANITIZER} is not installed")
    ours = [
        sys.executable, "-m", "weftline.engine.gpu_check", "--device", trial.device, "--quick",
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
    if code != 0:
        raise Wrong(f"under {SANITIZER} the check ended with {code}: {' | '.join(said.strip().splitlines()[-4:])}")
    return {"memcheck": found[-1].removeprefix("========= ") if found else "nothing found"}


def llm_part(name: str) -> Callable[[Trial], Outcome]:
    """Return a part of the LLM's own check as a part of this one."""

    def check(trial: Trial) -> Outcome:
        if trial.fake:
            raise Skipped("the LLM's kernels are for GPUs, and the device is a fake")
        require_driver()
        require(LLM_PACKAGES)
        command = [sys.executable, "-m", "weftline.engine.llm.gpu.check", "--part", name, *["--quick"] * trial.quick]
        return run_apart(trial.part, command, max(trial.left_s, 1))

    return check


def check_pipeline(trial: Trial) -> Outcome:
    """The flagship on the device: its answer beside the CPU's, its plan, its times, and what its workers take."""
    require(FLAGSHIP_PACKAGES)
    if not FLAGSHIP.is_file():
        raise Skipped("examples/voice_photo_assistant.yaml is not here")
    if trial.quick and trial.fake:
        raise Skipped("not with --quick on a fake: its models take longer to load than all the rest")
    command = [sys.executable, "-m", "weftline.engine.gpu_check.flagship", str(FLAGSHIP), "--device", trial.device]
    return run_apart(trial.part, [*command, *["--quick"] * trial.quick], max(trial.left_s, 1))


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
