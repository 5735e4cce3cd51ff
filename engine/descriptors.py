"""A few file descriptors kept back, so that a worker can be started when this process has none left.

Whoever runs out of descriptors can neither start a worker nor map its arena. The Reserve holds as many as that takes:
lent while a worker starts, taken back when it stands. While they cannot all be taken back, this process is short of
descriptors, and new work is refused until it is not.
"""

from __future__ import annotations

import errno
import os
import resource

KEPT = 12
"""What one start needs at most: two sockets, log and error pipes, /dev/null, a pidfd, an arena twice, and some over."""

NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class Reserve:
    """Descriptors held for a moment without any. Not thread-safe."""

    def __init__(self, count: int = KEPT) -> None:
        self._count = count
        self._kept: list[int] = []
        self.lent = False
        self.fill()

    @property
    def whole(self) -> bool:
        return len(self._kept) == self._count

    def lend(self) -> None:
        """Let go of them: somebody is about to need descriptors."""
        self.lent = True
        while self._kept:
            os.close(self._kept.pop())

    def take_back(self) -> None:
        """The need is over; hold as many again as there are."""
        self.lent = False
        self.fill()

    def fill(self) -> bool:
        """Hold what is missing, unless they are lent; whether none is missing."""
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
    """Say that there are no descriptors left, how many there may be, and what to do."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process has no file descriptors left for workers; it may have {most}: "
        "close what is not needed, or raise the limit (ulimit -n)"
    )
