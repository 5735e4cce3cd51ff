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
        if 2 * self.total >= self.calls_max:  # any caller may hold half of them
            self.check(caller)
        self.total += 1
        self._held[caller] = self._held.get(caller, 0) + 1

    def give_back(self, caller: str) -> None:
        """Release a slot."""
        self.total -= 1
        left = self._held[caller] - 1
        if left:
            self._held[caller] = left
        else:
            del self._held[caller]


OPENING_MAX = 1024
"""Most calls of a server whose first message has not arrived, beside `calls_max`; each may have sent 64 KiB of it."""

WITHOUT_RIGHTS_SHARE = 4
"""One for so many of them is left to calls without rights (health checks); beyond that, these end first."""

K = TypeVar("K", bound=Hashable)


class OpeningCalls(Generic[K]):
    """Calls whose first message has not arrived. Above `calls_max` of them one is ended, never a new one refused.

    It is one of the connection with the most of them: the one without progress for longest. So a connection with few
    calls keeps them, however many another one begins.
    """

    def __init__(self, calls_max: int = OPENING_MAX) -> None:
        self.calls_max = calls_max
        self._without, self._with = _Opening[K](), _Opening[K]()
        self._of: dict[K, tuple[_Opening[K], Hashable]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, call: K, connection: Hashable, with_rights: bool) -> K | None:
        """Add a call; return the one to end for it, which is removed."""
        group = self._with if with_rights else self._without
        group.add(call, connection)
        self._of[call] = group, connection
        if len(self._of) <= self.calls_max:
            return None
        many = self._without.total > self.calls_max // WITHOUT_RIGHTS_SHARE or not self._with.total
        ended = (self._without if many else self._with).longest(connection)
        self.discard(ended)
        return ended

    def progressed(self, call: K) -> None:
        """Note that a part of the call's message has arrived."""
        found = self._of.get(call)
        if found is not None:
            group, connection = found
            group.discard(call, connection)
            group.add(call, connection)

    def discard(self, call: K) -> None:
        """Remove a call that has its message, or has ended."""
        found = self._of.pop(call, None)
        if found is not None:
            group, connection = found
            group.discard(call, connection)


class _Opening(Generic[K]):
    """Such calls by connection, in the order of their last progress."""

    def __init__(self) -> None:
        self.total = 0
        self._calls: dict[Hashable, dict[K, None]] = {}

    def add(self, call: K, connection: Hashable) -> None:
        self._calls.setdefault(connection, {})[call] = None
        self.total += 1

    def discard(self, call: K, connection: Hashable) -> None:
        calls = self._calls[connection]
        del calls[call]
        self.total -= 1
        if not calls:
            del self._calls[connection]

    def longest(self, connection: Hashable) -> K:
        """Return the first call of `connection` if that has more than the average, else of the one with the most."""
        calls = self._calls.get(connection, {})
        if len(calls) * len(self._calls) <= self.total:
            calls = max(self._calls.values(), key=len)
        return next(iter(calls))
