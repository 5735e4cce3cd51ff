"""Reserve file descriptors for worker starts.

A process without free descriptors can neither start a worker nor map its arena. The Reserve keeps as many open as that
takes. They are closed while a worker starts and opened again afterwards. While they cannot all be opened again, new
requests are refused.
"""

from __future__ import annotations

import errno
import os
import resource

KEPT = 12
"""Descriptors of one start: two sockets, log and error pipes, /dev/null, a pidfd, an arena twice, and some more."""

NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class Reserve:
    """Open descriptors that are closed when a worker start needs them. Not thread-safe."""

    def __init__(self, count: int = KEPT) -> None:
        self._count = count
        self._kept: list[int] = []
        self.lent = False
        self.fill()

    @property
    def whole(self) -> bool:
        return len(self._kept) == self._count

    def lend(self) -> None:
        """Close them: a worker start needs descriptors."""
        self.lent = True
        while self._kept:
            os.close(self._kept.pop())

    def take_back(self) -> None:
        """Open as many again as the system allows."""
        self.lent = False
        self.fill()

    def fill(self) -> bool:
        """Open the missing ones unless they are lent; return whether none is missing."""
        try:
            while not self.lent and not self.whole:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in NONE_LEFT:
                raise
        return self.lent or self.whole

    def close(self) -> None:
        self.lend()


def shortage() -> str:
    """Return the message for missing descriptors: the limit, and what to do."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process has no file descriptors left for workers; it may have {most}: "
        "close what is not needed, or raise the limit (ulimit -n)"
    )
