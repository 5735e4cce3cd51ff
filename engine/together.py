"""Rows of a job brought into a session together, and what becomes of each.

    ends = session.run_together(rows, outputs=("text",), seeds=seeds)

The rows of one call form their batches by their order alone (engine/cohorts.py). Answers are copied out as they come,
so that a long call holds no more shared memory than the rows that are still open.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from weftline.engine import events as ev
from weftline.engine.asking import ENDS, Asked
from weftline.engine.lent import lent
from weftline.engine.messages import Value
from weftline.engine.result import Result
from weftline.engine.version import Version
from weftline.errors import LimitReached, WeftlineError

Enter = Callable[[], tuple[Version, int]]
"""Returns the version that a new request meets, and its id; see Session."""

LOOK_S = 0.2
"""How often a call looks whether it is wanted no more."""


class Room:
    """Where calls wait for shared memory for their inputs: one at a time, while others give theirs back."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._open = 0

    def __enter__(self) -> Room:
        self._turn.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._turn.release()

    def opened(self) -> None:
        with self._changed:
            self._open += 1

    def closed(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def wait(self) -> bool:
        """Wait until memory may have come free; False when nobody will free any."""
        with self._changed:
            if not self._open:
                return False
            self._changed.wait(LOOK_S)
            return True


def run_together(
    enter: Enter,
    rows: Sequence[Mapping[str, Any]],
    *,
    outputs: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    room: Room | None = None,
    gone: threading.Event | None = None,
) -> list[Result | WeftlineError]:
    """Answer rows of a job; see Session.run_together."""
    call = _Call(enter, gone or threading.Event())
    turn: AbstractContextManager = room if room is not None else threading.Lock()
    try:
        with turn:
            for at, row in enumerate(rows):
                call.bring(at, row, Asked(outputs, None, 0, None, job=True, seed=seeds[at] if seeds else None), room)
            if room is not None:
                room.opened()
        try:
            call.submit()
            return call.ends(len(rows))
        finally:
            if room is not None:
                room.closed()
    except BaseException:
        call.abandon()
        raise


class _Call:
    """One call: rows packed, placed, submitted, heard of."""

    def __init__(self, enter: Enter, gone: threading.Event) -> None:
        self._enter, self._gone = enter, gone
        self._events: list[tuple[Version, ev.Submitted]] = []
        self._open: dict[int, tuple[int, Version, float]] = {}  # request -> row, version, start
        self._ends: dict[int, Result | WeftlineError] = {}
        self._heard: queue.SimpleQueue[tuple[int, ev.ForCaller]] = queue.SimpleQueue()

    def bring(self, at: int, row: Mapping[str, Any], asked: Asked, room: Room | None) -> None:
        """Pack and place a row; one that cannot be is over."""
        version, request = self._enter()
        try:
            started_ms = version.runtime.clock.now_ms()
            wanted = version.intake.check_outputs(asked.outputs)
            packed = version.intake.pack(row)
            values = self._placed(version, packed, room)
            self._open[request] = at, version, started_ms
            self._events.append(
                (version, ev.Submitted(request, values, wanted, None, asked.priority, None, False, True, asked.seed))
            )
        except WeftlineError as error:
            version.leave(request)
            self._ends[at] = error
        except BaseException:
            version.leave(request)
            raise

    def _placed(self, version: Version, packed: Mapping[str, Any], room: Room | None) -> dict[str, Value]:
        while True:
            try:
                return version.intake.place(packed, version.runtime, job=True)
            except LimitReached:
                if room is None or self._gone.is_set() or not room.wait():
                    raise

    def submit(self) -> None:
        """Bring everything in: the rows of one version together."""
        by_version: dict[Version, list[ev.Submitted]] = {}
        for version, event in self._events:
            by_version.setdefault(version, []).append(event)
        for version, group in by_version.items():
            self._events = [one for one in self._events if one[0] is not version]
            version.runtime.submit_together(group, {one.request: partial(self._hear, one.request) for one in group})

    def _hear(self, request: int, command: ev.ForCaller) -> None:
        if type(command) in ENDS:  # what ends a whole session does not name the request
            self._heard.put((request, command))

    def ends(self, rows: int) -> list[Result | WeftlineError]:
        withdrawn = False
        while self._open:
            try:
                request, end = self._heard.get(timeout=LOOK_S)
            except queue.Empty:
                if self._gone.is_set() and not withdrawn:
                    withdrawn = True
                    for request, (_, version, _) in self._open.items():
                        version.runtime.tell(ev.Withdrawn(request))
                continue
            at, version, started_ms = self._open.pop(request)
            self._ends[at] = _result(version, request, end, started_ms)
        return [self._ends[at] for at in range(rows)]

    def abandon(self) -> None:
        """Nobody will look at the answers: give everything back."""
        for version, event in self._events:
            version.intake.give_up(event.inputs, version.runtime)
        self._events = []
        for request, (_, version, _) in self._open.items():
            version.runtime.tell(ev.Withdrawn(request), ev.Delivered(request))
            version.leave(request)
        self._open = {}


def _result(version: Version, request: int, end: ev.ForCaller, started_ms: float) -> Result | WeftlineError:
    try:
        with lent(version, request, end, started_ms) as answer:
            return answer.result()
    except WeftlineError as error:
        version.leave(request)
        return error
