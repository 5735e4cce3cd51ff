"""Call slots: limits.calls_max shared among callers, and the calls that have not got one yet.

A slot is for a call with rights whose message has arrived. A named caller may hold as many slots as are free, so one
caller holds half of them at most, two a third each, and a further caller always finds some (the dynamic threshold of
Choudhury and Hahne, 1998). Without tokens there is one caller, which may hold all.

Pure.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from weftline.errors import LimitReached

RETRY_S = 0.1
"""Retry delay of a refused call."""


class CallSlots:
    """The open calls of one server. calls_max: most of them."""

    def __init__(self, calls_max: int) -> None:
        self.calls_max = calls_max
        self.total = 0
        self._held: dict[str, int] = {}

    def check(self, caller: str) -> None:
        """Raise LimitReached if `take` would."""
        if self.total >= self.calls_max:
            raise LimitReached(f"{self.total} calls are open; limits.calls_max is {self.calls_max}", RETRY_S)
        if caller and (held := self._held.get(caller, 0)) >= (free := self.calls_max - self.total):
            raise LimitReached(
                f"the token has {held} calls open, and {free} of limits.calls_max are left for all", RETRY_S
            )

    def take(self, caller: str) -> None:
        """Take a slot until `give_back`; LimitReached without one for this caller. caller: '' without tokens."""
        self.check(caller)
        self.total += 1
        self._held[caller] = self._held.get(caller, 0) + 1

    def give_back(self, caller: str) -> None:
        """Release a slot."""
        self.total -= 1
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]


OPENING_MAX = 1024
"""Most calls of a server whose first message has not arrived, beside `calls_max`; each may have sent 64 KiB of it."""

K = TypeVar("K", bound=Hashable)


class OpeningCalls(Generic[K]):
    """Calls whose first message has not arrived. Above `calls_max` of them one is ended, never a new one refused.

    That one is the call without progress for longest, of calls without rights (health checks) before others. An honest
    call stays for milliseconds, so none is ended unless others begin thousands within that time.
    """

    def __init__(self, calls_max: int = OPENING_MAX) -> None:
        self.calls_max = calls_max
        self._calls: tuple[dict[K, None], dict[K, None]] = ({}, {})  # without rights, with; oldest progress first

    def __len__(self) -> int:
        return sum(map(len, self._calls))

    def add(self, call: K, with_rights: bool) -> K | None:
        """Add a call; return the one to end for it, which is removed."""
        self._calls[with_rights][call] = None
        if len(self) <= self.calls_max:
            return None
        calls = next(filter(None, self._calls))
        ended = next(iter(calls))
        del calls[ended]
        return ended

    def progressed(self, call: K) -> None:
        """Note that a part of the call's message has arrived."""
        for calls in self._calls:
            if call in calls:
                del calls[call]
                calls[call] = None

    def discard(self, call: K) -> None:
        """Remove a call that has its message, or has ended."""
        for calls in self._calls:
            calls.pop(call, None)
