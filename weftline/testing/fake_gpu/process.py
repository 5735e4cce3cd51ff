"""Liveness of the processes that record events of a fake device.

Events outlive the process that records them, so a waiter checks that the process is alive. A process is identified by
its pid and its start time (/proc), since pids are reused. A zombie is dead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process of this machine or of a simulated one.

    number: pid.
    born:   start time in clock ticks since boot (proc(5), stat, field 22); 0 on a simulated machine.
    """

    number: int
    born: int


def this_process() -> Process:
    return Process(os.getpid(), int(_stat(os.getpid())[19]))


def lives(process: Process) -> bool:
    try:
        fields = _stat(process.number)
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and int(fields[19]) == process.born


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5) stat from the third on; the second, the program name, may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
