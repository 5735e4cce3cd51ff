"""Whether the process that has to finish something still lives.

A fake device's events lie in memory that outlives who records them, so whoever waits for one must ask. A number alone
could belong to a later process: the moment of birth goes with it, as /proc tells it. A process that was killed and that
nobody has reaped yet is dead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process of this machine, or of a made-up one.

    number: its pid.
    born:   when it started, in clock ticks since the machine did (proc(5), stat, field 22); 0 on a made-up machine.
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
    """Return proc(5)'s stat from its third field on; the second is the program's name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
