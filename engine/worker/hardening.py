"""Harden a process before it runs model code.

Uses prctl(2): the process may not gain privileges, other processes of the same user cannot read its memory through
ptrace or procfs, and the kernel kills it when the thread that started it ends. The parent can end before the death
signal is set, so its pid is checked afterwards. SIGHUP is ignored: service managers send it to all processes of a
service, and the parent decides when to drain. So is SIGTTOU: the process has a process group of its own, and would stop
when it writes to a terminal with `stty tostop`.
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
    """Harden this process; exits at once when the parent has already ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for one in (signal.SIGHUP, signal.SIGTTOU):
        signal.signal(one, signal.SIG_IGN)
    if os.getppid() != parent_pid:
        os._exit(1)
