"""Process metrics read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_USER, _SYSTEM, _RESIDENT = 11, 12, 21
"""Fields of /proc/PID/stat behind the command's name (proc(5): utime, stime, rss)."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """cpu_s: processor time so far. descriptors: open ones; None where they cannot be seen."""

    resident_bytes: int
    cpu_s: float
    descriptors: int | None


def usage_of(pid: int) -> ProcessUsage | None:
    """Return what a process uses; None when there is no such process, or nothing may be seen of it."""
    folder = Path("/proc", str(pid))
    try:
        fields = (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        cpu_s = (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_S
        resident_bytes = int(fields[_RESIDENT]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None
    try:
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        descriptors = None  # a worker is not dumpable: its descriptors are for root alone to see
    return ProcessUsage(resident_bytes, cpu_s, descriptors)
