"""Connect workers to NVIDIA's multi-process service (MPS) where the pipeline sets `gpu.mps`, and to none elsewhere.

Without MPS, processes that share a GPU are time-sliced. With it their kernels run concurrently, in one fault domain: a
fatal fault in one process ends the GPU work of all of them. CUDA programs connect by themselves when the control daemon
runs. Workers of a pipeline without `gpu.mps` therefore get a pipe directory that does not exist.

Protocol: NVIDIA, "Multi-Process Service", sections on CUDA_MPS_PIPE_DIRECTORY and on the control daemon.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from weftline.errors import ModelError

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
CONTROL = "nvidia-cuda-mps-control"
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
    f"Start it with `{CONTROL} -d` before the pipeline opens"
)

DEFAULT, PROHIBITED, EXCLUSIVE_PROCESS = 0, 2, 3
"""Compute modes of a GPU (NVML, nvmlComputeMode_t): of any number of processes, none, or one at a time."""
_SET_DEFAULT = "nvidia-smi -i N -c DEFAULT, where N is its number in nvidia-smi"

_log = logging.getLogger("weftline.runtime")


def prepare(wanted: bool, devices: Iterable[str] = (), modes: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return the environment variables of workers on GPUs, and log a warning about their effect.

    devices: the GPU of each worker.   modes: compute modes of GPUs by name.

    ModelError: the mode of a GPU refuses workers.
    """
    pipes = directory(os.environ)
    running, named = runs(pipes), bool(os.environ.get(PIPE_DIRECTORY))
    connects = named or (wanted and running)
    if problems := refusals(Counter(devices), modes or {}, connects, running):
        raise ModelError("\n".join(problems))
    if message := warning(wanted, running or named):
        _log.warning(message)
    return for_workers(wanted, pipes, running, named)


def refusals(processes: Mapping[str, int], modes: Mapping[str, int], connects: bool, running: bool) -> list[str]:
    """Return why GPUs refuse these numbers of processes, with remedies; empty where they do not.

    connects: the processes are clients of the service, which is one process on the GPU.   running: it runs.
    """
    found = []
    for device, count in sorted(processes.items()):
        mode = modes.get(device, DEFAULT)
        if mode == PROHIBITED:
            found.append(
                f"{device}: its compute mode is PROHIBITED, and no process can use it\n    fix: {_SET_DEFAULT}"
            )
        elif mode == EXCLUSIVE_PROCESS and count > 1 and not connects:
            start = "" if running else f"start {CONTROL} -d and "
            found.append(
                f"{device}: {count} processes share it, but its compute mode is EXCLUSIVE_PROCESS: the second fails\n"
                f"    fix: {start}write gpu: {{mps: true}}; or {_SET_DEFAULT}; or place all its steps in one worker"
            )
    return found


def directory(environment: Mapping[str, str]) -> Path:
    """Return the control daemon's pipe directory."""
    return Path(environment.get(PIPE_DIRECTORY) or DEFAULT_DIRECTORY)


def runs(pipes: Path, processes: Path = Path("/proc")) -> bool:
    """Return whether the control daemon runs: its pipe exists, and its pid file names no process that has ended.

    In another container the daemon's process is not to be seen; then a reader of its pipe answers for it. A pipe that
    this user may not open counts as read.
    """
    control = pipes / "control"
    try:
        pid = (pipes / f"{CONTROL}.pid").read_text().strip()
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
    except OSError:
        return False
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EPERM)
    return True


def for_workers(wanted: bool, pipes: Path, running: bool, named: bool = False) -> dict[str, str]:
    """Return the environment variables of workers on GPUs.

    named: the environment names the directory, as where a device plugin runs the daemon: processes beside it are
    refused by a card in mode EXCLUSIVE_PROCESS, so that workers get it whether or not the pipeline asks for it, and
    whether or not the daemon is found from here.
    """
    return {PIPE_DIRECTORY: str(pipes) if named or (running and wanted) else NOWHERE}


def warning(wanted: bool, running: bool) -> str:
    """Return the warning to log when a pipeline opens on a GPU; '' for none."""
    return "" if not wanted else USED if running else MISSING
