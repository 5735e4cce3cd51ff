"""What a worker process gives up before it runs anybody's model.

prctl(2): it may not gain privileges, its memory may not be read by others of the same user through ptrace or procfs,
and it is killed when the thread that started it ends. The death signal is set after exec, so the parent could already
be gone by then; its pid is checked once more.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38


def harden(parent_pid: int) -> None:
    """Apply all of it to this process; exits at once when the parent is already gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getppid() != parent_pid:
        os._exit(1)
