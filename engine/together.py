"""Rows of a job brought into a session together, and what becomes of each.

    ends = session.run_together(rows, outputs=("text",), seeds=seeds)

The rows of one call form their batches by their order and the sizes of their inputs alone
(engine/scheduling/cohorts.py). Answers are copied out as they come, so that a long call holds no more shared memory
than the rows that are still open.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from weftline.engine.asking import ENDS, Asked
from weftline.engine.lent import lent
from weftline.engine.messages import Value
from weftline.engine.packed import Packed
from weftline.engine.result import Result
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.flow import job_bytes_max
from weftline.engine.version import Version
from weftline.errors import LimitReached, WeftlineError

Enter = Callable[[], tuple[Version, int]]
"""Returns the version that a new request meets, and its id; see Session."""

LOOK_S = 0.2
"""How often a call looks whether it is wanted no more."""

PORTION = 0.5
"""Share of a job's room for inputs that one portion takes at most, so that two fit side by side."""


class Room:
    """Where calls wait for shared memory for their inputs: one at a time, while rows under way give theirs back.

    turn: held by the call that brings rows in.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._changed = threading.Condition()
        self._under_way: set[int] = set()

    def begun(self, requests: Iterable[int]) -> None:
        with self._changed:
            self._under_way.update(requests)

    def ended(self, request: int) -> None:
        with self._changed:
            self._under_way.discard(request)
            self._changed.notify_all()

    def stir(self) -> None:
        """Wake the one that waits: an answer has come."""
        with self._changed:
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that will give memory back."""
        return not self._under_way

    def wait(self) -> None:
        """Wait until memory may have come free."""
        with self._changed:
            self._changed.wait(LOOK_S)


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
    room = room or Room()
    call = _Call(enter, room, gone or threading.Event())
    try:
        with room.turn:
            for at, row in enumerate(rows):
                call.bring(at, row, Asked(outputs, None, 0, None, job=True, seed=seeds[at] if seeds else None))
            call.submit()
        return call.ends(len(rows))
    except BaseException:
        call.abandon()
        raise


class _Call:
    """One call: rows packed, placed, submitted, heard of.

    Rows are submitted in portions, cut by the sizes of their inputs alone: how much memory happens to be free decides
    when a portion begins, not who is in it.
    """

    def __init__(self, enter: Enter, room: Room, gone: threading.Event) -> None:
        self._enter, self._room, self._gone = enter, room, gone
        self._events: list[tuple[Version, ev.Submitted]] = []
        self._portion_bytes = 0
        self._open: dict[int, tuple[int, Version, float]] = {}  # request -> row, version, start
        self._ends: dict[int, Result | WeftlineError] = {}
        self._heard: queue.SimpleQueue[tuple[int, ev.ForCaller]] = queue.SimpleQueue()

    def bring(self, at: int, row: Mapping[str, Any], asked: Asked) -> None:
        """Pack and place a row; one that cannot be is over."""
        version, request = self._enter()
        try:
            started_ms = version.runtime.clock.now_ms()
            wanted = version.intake.check_outputs(asked.outputs)
            packed = version.intake.pack(row)
            size_bytes = sum(one.size_bytes for one in packed.values() if not one.travels_inline)
            if self._portion_bytes + size_bytes > PORTION * job_bytes_max(version.plan.limits):
                self.submit()
            self._portion_bytes += size_bytes
            values = self._placed(version, packed)
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

    def _placed(self, version: Version, packed: Mapping[str, Packed]) -> dict[str, Value]:
        while True:
            alone = self._room.idle  # looked at before: what ends meanwhile has made room
            try:
                return version.intake.place(packed, version.runtime, job=True)
            except LimitReached as error:
                if alone or not error.retry_after_s or self._gone.is_set():
                    raise
            self._room.wait()
            while self._take():  # answers that nobody takes keep memory too
                pass

    def submit(self) -> None:
        """Bring the portion in: the rows of one version together."""
        self._portion_bytes = 0
        by_version: dict[Version, list[ev.Submitted]] = {}
        for version, event in self._events:
            by_version.setdefault(version, []).append(event)
        for version, group in by_version.items():
            self._room.begun(event.request for event in group)
            self._events = [one for one in self._events if one[0] is not version]
            version.runtime.submit_together(group, {one.request: partial(self._hear, one.request) for one in group})

    def _hear(self, request: int, command: ev.ForCaller) -> None:
        if type(command) in ENDS:  # what ends a whole session does not name the request
            self._heard.put((request, command))
            self._room.stir()

    def ends(self, rows: int) -> list[Result | WeftlineError]:
        withdrawn = False
        while self._open:
            if not self._take(LOOK_S) and self._gone.is_set() and not withdrawn:
                withdrawn = True
                for request, (_, version, _) in self._open.items():
                    version.runtime.tell(ev.Withdrawn(request))
        return [self._ends[at] for at in range(rows)]

    def _take(self, wait_s: float = 0.0) -> bool:
        """Copy out an answer; False when none came."""
        try:
            request, end = self._heard.get(wait_s > 0, wait_s)
        except queue.Empty:
            return False
        at, version, started_ms = self._open.pop(request)
        self._ends[at] = _result(version, request, end, started_ms)
        self._room.ended(request)  # what it held is free only now
        return True

    def abandon(self) -> None:
        """Nobody will look at the answers: give everything back."""
        for version, event in self._events:
            version.intake.give_up(event.inputs, version.runtime)
        self._events = []
        for request, (_, version, _) in self._open.items():
            version.runtime.tell(ev.Withdrawn(request), ev.Delivered(request))
            version.leave(request)
            self._room.ended(request)
        self._open = {}


def _result(version: Version, request: int, end: ev.ForCaller, started_ms: float) -> Result | WeftlineError:
    try:
        with lent(version, request, end, started_ms) as answer:
            return answer.result()
    except WeftlineError as error:
        version.leave(request)
        return error
