"""Compute when the event loop wakes next, and how late it woke: pure, with time as an argument.

A thread that did not run for a while, or a process that was stopped, finds timeouts due at once, silence of workers
above all. No worker is killed for a pause of this process: after a late wake-up the loop reads all waiting messages
before time advances, and after a long pause workers get a grace period, because they may have been stopped too.

It is a file of its own because it is pure: the event loop around it imports threading and asyncio.
"""

from __future__ import annotations

SLEEP_MAX_S = 3600.0
"""Longest sleep at a time; epoll counts milliseconds in 32 bits."""

LATE_MS = 50.0
"""From this lateness on, waiting messages are read before time advances."""

PAUSE_MS = 1000.0
"""From this lateness on, this process was stopped, and perhaps the whole machine."""

GRACE_MS = 500.0
"""Time that workers get after such a pause to send what they could not send meanwhile."""


class WakeTimer:
    """The moment one thread sleeps until.

    until_ms: None: nothing is due.
    asleep:   the thread sleeps, or is about to without another look at what is due.
    """

    def __init__(self) -> None:
        self.until_ms: float | None = None
        self.asleep = False
        self._grace_until_ms: float | None = None

    def sleep_s(self, until_ms: float | None, now_ms: float) -> float:
        """Record that the thread sleeps until `until_ms`; return for how many seconds, -1: no limit."""
        self.until_ms = until_ms
        self.asleep = True
        return -1.0 if until_ms is None else min(max(0.0, (until_ms - now_ms) / 1000), SLEEP_MAX_S)

    def wakes_for(self, due_ms: float | None) -> bool:
        """Return whether a sleeping thread must be woken for something due then; True once per sleep."""
        if not self.asleep or due_ms is None or (self.until_ms is not None and due_ms >= self.until_ms):
            return False
        self.asleep = False
        return True

    def late(self, now_ms: float) -> bool:
        """Return whether waiting messages must be read before time advances; starts a grace period after a pause."""
        late_ms = 0.0 if self.until_ms is None else now_ms - self.until_ms
        if self._grace_until_ms is None and late_ms > PAUSE_MS:
            self._grace_until_ms = now_ms + GRACE_MS
        return late_ms > LATE_MS or self._grace_until_ms is not None

    def grace_until_ms(self, now_ms: float) -> float | None:
        """Return the end of the grace period, before which time must not advance; None: it may."""
        return self._grace_until_ms if self._grace_until_ms is not None and now_ms < self._grace_until_ms else None

    def advanced(self) -> None:
        """End the grace period: time has advanced."""
        self._grace_until_ms = None
