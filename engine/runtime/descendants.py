"""Find and kill processes that a worker's node started, even when they left its process group.

After a double fork with setsid(2) a process is neither in the group nor a descendant of the worker. It still has the
worker's mark: executed programs in their environment, forked children in their process name, which the worker sets.
Signals are sent through pidfds, so that a reused pid is never hit.

It is a file of its own because workers import it too, and nothing else of `processes.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
from pathlib import Path

VARIABLE = "WEFTLINE_WORKER"
"""Environment variable with a worker's mark. It has no other effect."""

PR_SET_NAME = 15
ROUNDS_MAX = 16
"""Most reads of /proc: a process that forks faster than it is found must not keep this loop running."""


def new_mark() -> str:
    """Return a mark that fits into a process name, 15 bytes."""
    return f"wl-{secrets.token_hex(6)}"


def name_children(mark: str) -> None:
    """Set the mark as the process name of every child that this process forks from now on."""
    libc, name = ctypes.CDLL(None), mark.encode()
    os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_NAME, name, 0, 0, 0))


def kill_marked(mark: str, leader: int) -> None:
    """Kill every process with the mark but `leader`, the worker; no-op when file descriptors are short."""
    for _ in range(ROUNDS_MAX):
        try:
            pids = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
        except OSError:
            return
        killed = [_kill(pid, mark) for pid in pids if pid != leader and _has(pid, mark)]
        if not any(killed):
            return


def _kill(pid: int, mark: str) -> bool:
    """Kill a process if it has the mark; False when it has exited."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _has(pid, mark):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def _has(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_bytes().partition(b"(")[2].rpartition(b")")
        if rest.split()[:1] == [b"Z"]:
            return False  # a zombie
        if name == mark.encode():
            return True
    with contextlib.suppress(OSError):
        return f"{VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
