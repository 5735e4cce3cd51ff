"""`current()`: the request attributes of the items that a step's code is working on, without extra parameters.

    def think(text: str) -> str:
        for part in parts(text):
            if weftline.current().cancelled:
                return ""                     # the request is gone: any value will do
            ...

It is available in every call of a batch node and in `submit` of a stream node. For a call with several items,
`sequence` and `seed` raise StepError; read them from each of `items`. `current()` raises StepError in a stream node's
other calls and in threads that a step has started: read the attributes before and pass them on. Outside a step, as in
a unit test of a function, it returns the default attributes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar

from weftline.errors import StepError
from weftline.nodes.contract import Batch
from weftline.nodes.urgency import USUAL, SequencePart, Urgency


class Scope:
    """A batch during a node's call; `place` is the index of the current item, or None for the whole batch."""

    __slots__ = ("batch", "began_s", "place")

    def __init__(self, batch: Batch, place: int | None = None) -> None:
        self.batch, self.place = batch, place
        self.began_s = time.monotonic()


class Current:
    """Request attributes of the current item, or of the whole batch.

    cancelled: the item's request (the requests of all items) has been cancelled; each read polls for cancellations.
    priority:  -100 to 100; the highest of a batch.
    left_ms:   milliseconds until the request's deadline or the end of the step's `timeout_ms`, from now; the least of a
               batch; None without either.
    sequence:  SequencePart, or None outside a sequence. StepError: the batch has several items.
    seed:      seed for random numbers, the same in every run of a job; None: use a fresh one. StepError: the batch has
               several items.
    items:     one Current per item.
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
        return self._of_one("sequence").sequence

    @property
    def seed(self) -> int | None:
        return self._of_one("seed").seed

    def _of_one(self, what: str) -> Urgency:
        """Return the attributes of the only item. StepError: the batch has several items."""
        if self._scope is None:
            return USUAL
        if len(self._places) != 1:
            raise StepError(
                f"weftline.current().{what}: this call works on {len(self._places)} items, and each has its own"
                f"\n    fix: read .{what} of each of current().items, or batch.urgency(position).{what} in a node class"
            )
        return self._scope.batch.urgency(self._places[0])

    @property
    def items(self) -> tuple[Current, ...]:
        return tuple(Current(self._scope, (place,)) for place in self._places)


SCOPE: ContextVar[Scope | str | None] = ContextVar("weftline_scope", default=None)
"""Scope of the running call, or the error text of `current()`; set and reset around every call of a node."""

BETWEEN_ITEMS = (
    "weftline.current(): a stream node holds many items at once, and this call is not for one of them\n"
    "    fix: keep what `submit` is given for the item, its third parameter `urgency`, or read current() in `submit`"
)
"""Scope of a stream node's calls that do not belong to one item."""

_THREAD = (
    "weftline.current(): this thread was started by a step, and does not belong to one item\n"
    "    fix: read what the thread needs in the step's own call, and pass it to the thread"
)
_step_threads: set[int] = set()  # those that call this process's nodes


class within:
    """Set the scope that `current()` reads inside; a class, because a generator would take three times as long."""

    __slots__ = ("_scope", "_token")

    def __init__(self, scope: Scope | str) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        _step_threads.add(threading.get_ident())
        self._token = SCOPE.set(self._scope)

    def __exit__(self, *raised: object) -> None:
        SCOPE.reset(self._token)


def submitting(item: int, urgency: Urgency) -> Scope:
    """Return the scope of a stream node's `submit`."""
    return Scope(Batch({}, (item,), urgency=(urgency,)), 0)


def current() -> Current:
    """Return the request attributes of the item, or the batch, that the calling step is working on.

    The result has the properties `cancelled`, `priority` (-100 to 100), `left_ms` (milliseconds), `sequence`, `seed`
    and `items`. Outside a step it has the defaults of USUAL.

    StepError: called in a thread that a step has started, or in `round` of a stream node.
    """
    scope = SCOPE.get()
    if isinstance(scope, str):
        raise StepError(scope)
    if scope is None:
        if _step_threads and threading.get_ident() not in _step_threads:
            raise StepError(_THREAD)
        return Current(None, (0,))
    return Current(scope, range(len(scope.batch)) if scope.place is None else (scope.place,))
