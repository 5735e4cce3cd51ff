"""Run the rows of a job as ordered groups, and collect the result of each.

    ends = session.run_together(rows, outputs=("text",), seeds=seeds)

The rows of one call form their batches by their order and the sizes of their inputs alone
(engine/scheduler/groups.py). Results are copied out as they finish, so a long call holds no more shared memory than the
rows that are still open.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from weftline.engine.protocol.messages import Value
from weftline.engine.protocol.packed import Packed
from weftline.engine.request import RequestOptions
from weftline.engine.result import ENDS, Result, take_result
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.admission import job_bytes_max
from weftline.engine.submission import Enter, submission
from weftline.engine.versions import Version
from weftline.errors import LimitReached, WeftlineError

POLL_S = 0.2
"""How often a call checks whether it was cancelled."""

GROUP_SHARE = 0.5
"""Largest share of a job's arena space for inputs that one group takes, so that two fit at a time."""


class InputSpace:
    """Waiting for shared memory for the inputs of rows: one call at a time waits until open rows release theirs.

    turn: lock of the call that places and submits rows.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._changed = threading.Condition()
        self._open: set[int] = set()

    def add(self, requests: Iterable[int]) -> None:
        """Add submitted rows."""
        with self._changed:
            self._open.update(requests)

    def remove(self, request: int) -> None:
        """Remove a row whose memory is released, and wake the call that waits."""
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()

    def notify(self) -> None:
        """Wake the call that waits: a result has arrived."""
        with self._changed:
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """True if no open row will release memory."""
        return not self._open

    def wait(self) -> None:
        """Wait until memory may be free, at most POLL_S."""
        with self._changed:
            self._changed.wait(POLL_S)


def run_together(
    enter: Enter,
    rows: Sequence[Mapping[str, Any]],
    *,
    outputs: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    space: InputSpace | None = None,
    cancelled: threading.Event | None = None,
) -> list[Result | WeftlineError]:
    """Run the rows of a job; see Session.run_together."""
    space = space or InputSpace()
    call = _Call(enter, space, cancelled or threading.Event())
    try:
        with space.turn:
            for index, row in enumerate(rows):
                seed = seeds[index] if seeds else None
                call.add(index, row, RequestOptions(outputs=outputs, job=True, seed=seed))
            call.submit()
        return call.wait(len(rows))
    except BaseException:
        call.abort()
        raise


class _Call:
    """The rows of one call of `run_together`: placed, submitted in groups, collected.

    The sizes of the inputs alone decide where a group ends. The free memory decides when it starts, not which rows are
    in it.
    """

    def __init__(self, enter: Enter, space: InputSpace, cancelled: threading.Event) -> None:
        self._enter, self._space, self._cancelled = enter, space, cancelled
        self._events: list[tuple[Version, ev.Submitted]] = []  # the next group
        self._group_bytes = 0
        self._open: dict[int, tuple[int, Version, float]] = {}  # request -> row, version, start
        self._ends: dict[int, Result | WeftlineError] = {}
        self._arrived: queue.SimpleQueue[tuple[int, ev.ForCaller]] = queue.SimpleQueue()

    def add(self, index: int, row: Mapping[str, Any], options: RequestOptions) -> None:
        """Place a row and add it to the next group; an invalid row ends with its error."""
        version, request = self._enter()
        try:
            started_ms = version.runtime.clock.now_ms()
            version.inputs.check_outputs(options.output_names)
            packed = version.inputs.pack(row)
            size_bytes = sum(one.size_bytes for one in packed.values() if not one.travels_inline)
            if self._group_bytes + size_bytes > GROUP_SHARE * job_bytes_max(
                version.plan.limits, version.plan.ingress_arena_bytes
            ):
                self.submit()
            self._group_bytes += size_bytes
            values = self._place(version, packed)
            event = submission(version, request, values, options, started_ms)
            self._open[request] = index, version, started_ms
            self._events.append((version, event))
        except WeftlineError as error:
            version.leave(request)
            self._ends[index] = error
        except BaseException:
            version.leave(request)
            raise

    def _place(self, version: Version, packed: Mapping[str, Packed]) -> dict[str, Value]:
        while True:
            alone = self._space.idle  # read first: a row that ends meanwhile has released memory
            try:
                return version.inputs.place(packed, version.runtime, job=True)
            except LimitReached as error:
                if alone or not error.retry_after_s or self._cancelled.is_set():
                    raise
            self._space.wait()
            while self._collect():  # results that are not collected hold memory too
                pass

    def submit(self) -> None:
        """Submit the group, with the rows of each version together."""
        self._group_bytes = 0
        by_version: dict[Version, list[ev.Submitted]] = {}
        for version, event in self._events:
            by_version.setdefault(version, []).append(event)
        for version, group in by_version.items():
            self._space.add(event.request for event in group)
            self._events = [one for one in self._events if one[0] is not version]
            version.runtime.submit_together(group, {one.request: partial(self._listen, one.request) for one in group})

    def _listen(self, request: int, command: ev.ForCaller) -> None:
        if type(command) in ENDS:  # the end of a whole session does not name the request
            self._arrived.put((request, command))
            self._space.notify()

    def wait(self, rows: int) -> list[Result | WeftlineError]:
        """Wait for the results of all rows, in their order."""
        withdrawn = False
        while self._open:
            if not self._collect(POLL_S) and self._cancelled.is_set() and not withdrawn:
                withdrawn = True
                for request, (_, version, _) in self._open.items():
                    version.runtime.post(ev.Withdrawn(request))
        return [self._ends[index] for index in range(rows)]

    def _collect(self, wait_s: float = 0.0) -> bool:
        """Copy out one result; False if none arrived."""
        try:
            request, end = self._arrived.get(wait_s > 0, wait_s)
        except queue.Empty:
            return False
        index, version, started_ms = self._open.pop(request)
        try:
            self._ends[index] = take_result(version, request, end, started_ms)
        except WeftlineError as error:
            self._ends[index] = error
        self._space.remove(request)  # its memory is free only now
        return True

    def abort(self) -> None:
        """Cancel all open rows and release their memory."""
        for version, event in self._events:
            version.inputs.release(event.inputs, version.runtime)
        self._events = []
        for request, (_, version, _) in self._open.items():
            version.runtime.post(ev.Withdrawn(request), ev.Delivered(request))
            version.leave(request)
            self._space.remove(request)
        self._open = {}
