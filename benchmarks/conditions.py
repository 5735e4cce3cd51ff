"""What stands beside every figure: the machine, the versions, the spread over rounds, and the memory it took."""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import weftline

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def conditions() -> str:
    """Return the machine and the versions in one line."""
    return (
        f"weftline {weftline.__version__}, Python {platform.python_version()}, numpy {np.__version__}, "
        f"{_processor()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start"
    )


def peak_memory() -> str:
    """Return the most memory this process (the runtime, and the load beside it) has had resident so far."""
    return f"peak RSS of the runtime process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB"


def memory_bytes(pids: Iterable[int]) -> int:
    """Return how much memory these processes have resident (RSS), added up; what they share counts in each of them.

    A process that is gone counts nothing. Cheap: the finer figures stop a process for milliseconds.
    """
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except OSError:
            continue
    return total


def private_bytes(pids: Iterable[int]) -> int:
    """Return how much memory that no file and no other process shares these processes have resident, added up.

    RssAnon of /proc/PID/status. A process that is gone counts nothing.
    """
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))
    return total


def descriptors() -> int:
    """Return how many file descriptors this process has open, after what is garbage has been collected."""
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def shared_bytes() -> int:
    """Return how much shared memory (memfd) this process has mapped."""
    gc.collect()
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


def quantile(values: Sequence[float], share: float) -> float:
    """Return a value that was seen, by nearest rank; nan of none."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, round(share * len(ordered)) - 1))] if ordered else float("nan")


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return 'median [least-most]'."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
