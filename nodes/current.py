"""What a function step may ask about the items it works on, without taking them as parameters.

    def think(text: str) -> str:
        for part in parts(text):
            if weftline.current().cancelled:
                return ""                     # nobody waits for it any more: any answer will do
            ...

Outside of a step, as in a test of such a function, `current()` answers as for an item that brings nothing along. It
belongs to the thread that runs the step: a thread started by the function asks in vain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar

from weftline.nodes.contract import Batch
from weftline.nodes.urgency import SequencePart


class Scope:
    """A batch while a function works on it; `place` is the item it works on, or None for all of them together."""

    __slots__ = ("batch", "began_s", "place")

    def __init__(self, batch: Batch, place: int | None = None) -> None:
        self.batch, self.place = batch, place
        self.began_s = time.monotonic()


class Current:
    """The item a function works on, or the whole batch when the function takes batches.

    cancelled: nobody waits for it any more (for any of them); looks for news when it is read, so ask now and then.
    priority:  from -100 to 100 (the highest of them).
    left_ms:   milliseconds that are left now until the request's deadline (the nearest of them); None without one.
    sequence:  where the item stands in a sequence of requests; None outside of one, and for a batch of several.
    seed:      what chance in the answer is to be drawn from, the same in every run of a job; None: draw anew, and for
               a batch of several.
    items:     one Current for each item.
    """

    __slots__ = ("_places", "_scope")

    def __init__(self, scope: Scope | None, places: Sequence[int]) -> None:
        self._scope = scope
        self._places = places

    @property
    def cancelled(self) -> bool:
        return self._scope is not None and all(map(self._scope.batch.cancelled, self._places))

    @property
    def priority(self) -> int:
        scope = self._scope
        return 0 if scope is None else max((scope.batch.urgency(place).priority for place in self._places), default=0)

    @property
    def left_ms(self) -> float | None:
        scope = self._scope
        if scope is None:
            return None
        left = [ms for place in self._places if (ms := scope.batch.urgency(place).left_ms) is not None]
        return min(left) - (time.monotonic() - scope.began_s) * 1e3 if left else None

    @property
    def sequence(self) -> SequencePart | None:
        if self._scope is None or len(self._places) != 1:
            return None
        return self._scope.batch.urgency(self._places[0]).sequence

    @property
    def seed(self) -> int | None:
        if self._scope is None or len(self._places) != 1:
            return None
        return self._scope.batch.urgency(self._places[0]).seed

    @property
    def items(self) -> tuple[Current, ...]:
        return tuple(Current(self._scope, (place,)) for place in self._places)


SCOPE: ContextVar[Scope | None] = ContextVar("weftline_scope", default=None)
"""What `current()` speaks of; set and reset by whoever calls functions, once for each batch."""


def current() -> Current:
    """Return what is known about the item, or the batch, that the calling function works on."""
    scope = SCOPE.get()
    if scope is None:
        return Current(None, (0,))
    return Current(scope, range(len(scope.batch)) if scope.place is None else (scope.place,))
