"""When the runtime's thread means to come next, and how late it was when it came: pure, told the time.

A thread that was kept from running, or a process that was stopped, finds that much is due at once, silence of workers
above all. Nobody is killed for a silence that was ours: whoever comes late takes in what was said meanwhile, and after
a long while those that stood still with it get a moment to speak. Once time has passed for everybody, the next pause
is a new one.
"""

from __future__ import annotations

NAP_S_MAX = 3600.0
"""Longest wait at a time; epoll counts milliseconds in 32 bits."""

LATE_MS = 50.0
"""The thread comes so much later than it meant to: what workers have said meanwhile is taken in before time passes."""

PAUSE_MS = 1000.0
"""So late that this process was stopped, or with it the whole machine."""

GRACE_MS = 500.0
"""How long workers then get to say what they could not say while they stood still too."""


class Alarm:
    """The moment one thread sleeps until.

    until_ms: None: nothing is due, ever.
    asleep:   it sleeps, or is about to without looking again at what is due.
    """

    def __init__(self) -> None:
        self.until_ms: float | None = None
        self.asleep = False
        self._quiet_until_ms: float | None = None

    def set(self, until_ms: float | None) -> None:
        self.until_ms = until_ms
        self.asleep = True

    def nap_s(self, now_ms: float) -> float:
        """How long to sleep from now; -1 for ever."""
        return -1.0 if self.until_ms is None else min(max(0.0, (self.until_ms - now_ms) / 1000), NAP_S_MAX)

    def sooner(self, wake_at_ms: float | None) -> bool:
        """Whether a sleeper must be woken for what is due then; said once for each sleep."""
        if not self.asleep or wake_at_ms is None or (self.until_ms is not None and wake_at_ms >= self.until_ms):
            return False
        self.asleep = False
        return True

    def missed(self, now_ms: float) -> bool:
        """Something is due: whether what was said meanwhile must be taken in before time passes."""
        late_ms = 0.0 if self.until_ms is None else now_ms - self.until_ms
        if self._quiet_until_ms is None and late_ms > PAUSE_MS:
            self._quiet_until_ms = now_ms + GRACE_MS
        return late_ms > LATE_MS or self._quiet_until_ms is not None

    def quiet_until(self, now_ms: float) -> float | None:
        """Return until when time must not pass, because others are yet to speak; None: it may."""
        return self._quiet_until_ms if self._quiet_until_ms is not None and now_ms < self._quiet_until_ms else None

    def passed(self) -> None:
        """Time has passed for everybody."""
        self._quiet_until_ms = None
