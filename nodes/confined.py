"""Confine a child process that works on untrusted data: memory, privileges, environment, and end with its parent."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def child_environment() -> dict[str, str]:
    """Return the environment of such a process: without secrets, with this process's import path."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


def confine(parent: int, memory_bytes: int) -> None:
    """Set this process's resource limits and its parent-death signal. memory_bytes: of its address space."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if os.getppid() != parent:  # it ended before the first of these calls
        os._exit(1)
