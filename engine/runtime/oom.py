"""Counters of the kernel's out-of-memory killer: of this process's memory cgroup, or of the machine.

A process that is killed for want of memory dies by SIGKILL like any other. The kernel's counters tell them apart: the
count of a cgroup (v2: memory.events, v1: memory.oom_control), else that of the machine (/proc/vmstat), without
privileges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
KEY = "oom_kill"


class OomKills:
    """Reports new kills.

    files: (counter file, what it counts for), the most specific first; None: those of this process.
    """

    def __init__(self, files: Sequence[tuple[Path, str]] | None = None) -> None:
        self._file, self._of = next(
            ((path, of) for path, of in (files if files is not None else _files()) if _read(path) is not None),
            (Path(), ""),
        )
        self._seen = _read(self._file) or 0

    def new(self) -> str:
        """Return a phrase if the killer has ended processes since the last call; '' otherwise, or if it is unknown."""
        count = _read(self._file) or 0
        killed, self._seen = count - self._seen, count
        if killed <= 0:
            return ""
        what = "a process" if killed == 1 else f"{killed} processes"
        return f"out of memory: the kernel's out-of-memory killer has ended {what} of {self._of}"


def _files() -> list[tuple[Path, str]]:
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if not controllers:
            found.append((CGROUPS / below / "memory.events", "this memory cgroup"))
        elif "memory" in controllers.split(","):
            found.append((CGROUPS / "memory" / below / "memory.oom_control", "this memory cgroup"))
    return [*found, (Path("/proc/vmstat"), "this machine")]


def _read(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == KEY:
                return int(value)
    except (OSError, ValueError):
        pass
    return None
