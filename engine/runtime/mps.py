"""Connect workers to NVIDIA's multi-process service (MPS) where the pipeline sets `gpu.mps`, and to none elsewhere.

Without MPS, processes that share a GPU are time-sliced. With it their kernels run concurrently, in one fault domain: a
fatal fault in one process ends the GPU work of all of them. CUDA programs connect by themselves when the control daemon
runs. Workers of a pipeline without `gpu.mps` therefore get a pipe directory that does not exist.

Protocol: NVIDIA, "Multi-Process Service", sections on CUDA_MPS_PIPE_DIRECTORY and on the control daemon.
"""

from __future__ import annotations

import logging
import os
import stat
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
    return for_workers(wanted, pipes, running, bool(os.environ.get(PIPE_DIRECTORY)))


def directory(environment: Mapping[str, str]) -> Path:
    """Return the control daemon's pipe directory."""
    return Path(environment.get(PIPE_DIRECTORY) or DEFAULT_DIRECTORY)


def runs(pipes: Path, processes: Path = Path("/proc")) -> bool:
    """Return whether the control daemon runs: its pipe exists, and its pid file names no process that has ended.

    In another container the daemon's process is not to be seen; then a reader of its pipe answers for it.
    """
    control = pipes / "control"
    try:
        pid = (pipes / "nvidia-cuda-mps-control.pid").read_text().strip()
    except (OSError, ValueError):
        pid = ""
    if pid.isdigit() and (processes / pid).exists():
        return control.exists()
    return _is_read(control)


def _is_read(pipe: Path) -> bool:
    """Return whether a process has a named pipe open for reading; opening it for writing fails otherwise."""
    try:
        if not stat.S_ISFIFO(pipe.stat().st_mode):
            return False
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def for_workers(wanted: bool, pipes: Path, running: bool, named: bool = False) -> dict[str, str]:
    """Return the environment variables of workers on GPUs.

    named: the environment names the directory, as where a device plugin runs the daemon: processes beside it are
    refused by a card in mode EXCLUSIVE_PROCESS, so that workers get it whether or not the pipeline asks for it.
    """
    return {PIPE_DIRECTORY: str(pipes) if running and (wanted or named) else NOWHERE}


def warning(wanted: bool, running: bool) -> str:
    """Return the warning to log when a pipeline opens on a GPU; '' for none."""
    return "" if not wanted else USED if running else MISSING
