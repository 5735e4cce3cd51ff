"""NVIDIA's multi-process service, used where a pipeline asks for it and it runs, and kept away from everything else.

Without it, processes that share a GPU take turns. With it their kernels run side by side, and the price is the fault
domain: a fatal fault in one process ends the GPU work of all of them. A CUDA program connects to it by itself when its
control daemon runs, so leaving it out must be said too: workers of a pipeline that did not ask for it are shown a pipe
directory where nothing is, and then go on as if it did not run.

Protocol: NVIDIA, "Multi-Process Service", sections on CUDA_MPS_PIPE_DIRECTORY and on the control daemon.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_DIRECTORY = "/tmp/nvidia-mps"
"""Where the control daemon has its pipes when that variable is not set."""

NOWHERE = "/nonexistent/mps"
"""A pipe directory that no machine has: a CUDA program shown it runs without the service."""

USED = (
    "gpu.mps: processes that share a GPU compute side by side through NVIDIA's multi-process service; a fatal fault in "
    "one of them ends the work of all of them on that GPU"
)
MISSING = (
    "gpu.mps: asked for, and NVIDIA's multi-process service does not run here; processes that share a GPU take turns. "
    "Start it with `nvidia-cuda-mps-control -d` before the pipeline opens"
)

_log = logging.getLogger("weftline.runtime")


def prepare(wanted: bool) -> dict[str, str]:
    """Return what workers on this machine's GPUs find in their environment, and say aloud what it means for them."""
    pipes = directory(os.environ)
    running = runs(pipes)
    if words := told(wanted, running):
        _log.warning(words)
    return for_workers(wanted, pipes, running)


def directory(environment: Mapping[str, str]) -> Path:
    """Return where the control daemon would have its pipes."""
    return Path(environment.get(PIPE_DIRECTORY) or DEFAULT_DIRECTORY)


def runs(pipes: Path, processes: Path = Path("/proc")) -> bool:
    """Whether a control daemon lives whose pipes are there: its pipe exists, and the process it wrote down."""
    try:
        pid = (pipes / "nvidia-cuda-mps-control.pid").read_text().strip()
    except (OSError, ValueError):
        return False
    return pid.isdigit() and (processes / pid).exists() and (pipes / "control").exists()


def for_workers(wanted: bool, pipes: Path, running: bool) -> dict[str, str]:
    """Return what the environment of workers on a GPU says of the service."""
    return {PIPE_DIRECTORY: str(pipes) if wanted and running else NOWHERE}


def told(wanted: bool, running: bool) -> str:
    """Return what is to be said aloud when a pipeline opens on a GPU; '' where there is nothing to say."""
    return "" if not wanted else USED if running else MISSING
