"""Connect workers to NVIDIA's multi-process service (MPS) where the pipeline sets `gpu.mps`, and to none elsewhere.

Without MPS, processes that share a GPU are time-sliced. With it their kernels run concurrently, in one fault domain: a
fatal fault in one process ends the GPU work of all of them. CUDA programs connect by themselves when the control daemon
runs. Workers of a pipeline without `gpu.mps` therefore get a pipe directory that does not exist.

Protocol: NVIDIA, "Multi-Process Service", sections on CUDA_MPS_PIPE_DIRECTORY and on the control daemon.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_DIRECTORY = "/tmp/nvidia-mps"
"""The control daemon's pipe directory when that variable is not set."""

NOWHERE = "/nonexistent/mps"
"""A pipe directory that does not exist: CUDA programs then run without the service."""

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
    """Return the environment variables of workers on GPUs, and log a warning about their effect."""
    pipes = directory(os.environ)
    running = runs(pipes)
    if message := warning(wanted, running):
        _log.warning(message)
    return for_workers(wanted, pipes, running)


def directory(environment: Mapping[str, str]) -> Path:
    """Return the control daemon's pipe directory."""
    return Path(environment.get(PIPE_DIRECTORY) or DEFAULT_DIRECTORY)


def runs(pipes: Path, processes: Path = Path("/proc")) -> bool:
    """Return whether the control daemon runs: its pipe and the process of its pid file exist."""
    try:
        pid = (pipes / "nvidia-cuda-mps-control.pid").read_text().strip()
    except (OSError, ValueError):
        return False
    return pid.isdigit() and (processes / pid).exists() and (pipes / "control").exists()


def for_workers(wanted: bool, pipes: Path, running: bool) -> dict[str, str]:
    """Return the environment variables of workers on GPUs."""
    return {PIPE_DIRECTORY: str(pipes) if wanted and running else NOWHERE}


def warning(wanted: bool, running: bool) -> str:
    """Return the warning to log when a pipeline opens on a GPU; '' for none."""
    return "" if not wanted else USED if running else MISSING
