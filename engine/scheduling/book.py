"""The requests that are inside: what each has, what each still waits for, and which leases it holds.

How a value lives. A producer's block is leased with one ticket, the *writer's*. When the value is there, one ticket is
added for each reader, and the writer's is released. A task takes its inputs' tickets out of the request, so that a
request can end at any moment while the bytes a worker is reading stay leased until it has finished, or died. A pipeline
output keeps its ticket until the caller says it was copied out (`Delivered`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from weftline.engine.messages import ABSENT, Value
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.cohorts import Cohort
from weftline.engine.scheduling.flow import Admission
from weftline.engine.scheduling.request import OPEN, Request
from weftline.engine.scheduling.routes import Route, Routes
from weftline.pipelines.plan import Plan
from weftline.shm.block import Block, Key
from weftline.shm.lease import Ledger

NESTED_MAX = 32
"""How deep units that settle others at once (skipped, decided) may stand inside each other; more wait their turn."""

STALE_DEADLINES_MAX = 1024
"""How many deadlines of ended requests may lie in the heap, beyond as many as there are open ones."""


@dataclass(slots=True)
class Counters:
    """Totals since the start. admitted == ok + failed + cancelled + expired + open, always.

    late:  items that were not begun because they could not make their deadline.
    stale: messages that came when what they are about had ended, and were dropped: of an incarnation that is gone, or
           of items that a worker holds no longer, each item counting once.
    """

    admitted: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    deaths: int = 0
    retried: int = 0
    quarantined: int = 0
    late: int = 0
    stale: int = 0
    out_of_memory: int = 0
    copied_bytes: int = 0
    near_bytes: int = 0
    dispatches: int = 0
    items: int = 0


def size_of(event: ev.Submitted) -> int:
    """Return the bytes of a request's inputs."""
    size = 0
    for value in event.inputs.values():
        size += value.size_bytes
    return size


class Book:
    """Keeps the requests of one plan. Pure; owned by the scheduler.

    emit:  takes the commands that follow.
    ready: called with a request and a unit's place when every value that the unit reads is settled.
    drop:  called with a request that ends, so that its tasks leave every queue and worker.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        emit: Callable[[ev.Command], None],
        ready: Callable[[Request, int], None],
        drop: Callable[[Request], None],
    ) -> None:
        self.routes = Routes(plan)
        self.counters = Counters()
        self.admission = Admission(plan.limits)
        self.requests: dict[int, Request] = {}
        self.owed: dict[int, list[Key]] = {}
        self.now_ms = 0.0
        self._ledger = ledger
        self._emit = emit
        self._ready = ready
        self._drop = drop
        self._step_names = [step.name for step in plan.steps]
        self._deadlines: list[tuple[float, int]] = []
        self._nested = 0
        self._put_off: deque[tuple[Request, int]] = deque()
        self._complete_feed: Callable[[Request, int, int, Value], bool] = lambda request, place, slot, value: False

    def attach(self, complete_feed: Callable[[Request, int, int, Value], bool]) -> None:
        """Say who takes a whole value in for a unit that was fed its pieces; it answers whether it did."""
        self._complete_feed = complete_feed

    # the life of a request

    def admit(self, event: ev.Submitted, route: Route, size: int, cohort: Cohort | None = None, row: int = 0) -> None:
        """Take a request in, whose inputs take `size` bytes, and start it; their leases are the caller's to end."""
        self.admission.enter(size, event.job)
        self.counters.admitted += 1
        request = Request(
            event.request, route, self.now_ms, event.deadline_ms, size, list(route.missing), event.priority,
            event.sequence, event.pieces, job=event.job, seed=event.seed, cohort=cohort, row=row,
        )  # fmt: skip
        self.requests[request.id] = request
        if request.deadline_ms is not None:
            heappush(self._deadlines, (request.deadline_ms, request.id))
            if len(self._deadlines) > 2 * len(self.requests) + STALE_DEADLINES_MAX:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self.requests]
                heapify(self._deadlines)
        for place in route.entries:
            if not request.missing[place]:
                self._ready(request, place)
        for name, value in event.inputs.items():
            self.produce(request, self.routes.slot_of_input(name), value)

    def produce(self, request: Request, slot: int, value: Value) -> None:
        """A value is settled: count its readers, move up the units that waited for it, answer when it was the last."""
        route = request.route
        tickets = route.tickets[slot]
        if not tickets or request.state != OPEN:
            return
        for key in value.keys if value.data is None else ():
            self._ledger.hold(key, tickets)
        request.values[slot] = value
        request.tickets[slot] = tickets
        names = route.outputs_at[slot]
        for name in names:
            request.outputs[name] = value
            if request.pieces:
                self._emit(ev.OutputReady(request.id, name, value))
        missing = request.missing
        ready = None
        for place in route.readers[slot]:
            left = missing[place] - 1
            if left < 0:  # settled without this value, or begun with its pieces
                if not (request.feeds and self._complete_feed(request, place, slot, value)):
                    self.release(self.take(request, slot))
                continue
            missing[place] = left
            if not left or route.units[place].control:
                ready = [place] if ready is None else [*ready, place]
        for place in ready or ():
            if missing[place] >= 0 and request.state == OPEN:
                if route.units[place].plain:
                    self._ready(request, place)
                else:
                    self._settle_next(request, place)
        if names and len(request.outputs) == len(route.outputs) and request.state == OPEN:
            self._complete(request)

    def take(self, request: Request, slot: int) -> tuple[Key, ...]:
        """Move one ticket of a settled value out of the request; return the leases that go with it."""
        value = request.values[slot]
        left = request.tickets[slot] - 1
        if left:
            request.tickets[slot] = left
        else:
            del request.tickets[slot], request.values[slot]
        return () if value.data is not None else value.keys

    def advance(self, request: Request, place: int) -> None:
        """Let a unit begin although a value it reads is not whole yet."""
        if request.route.units[place].plain:
            self._ready(request, place)
        else:
            self._settle_next(request, place)

    def _settle_next(self, request: Request, place: int) -> None:
        """Let a unit go on that may settle the next at once, and that one the next: any number of skipped steps."""
        if self._nested >= NESTED_MAX:
            self._put_off.append((request, place))
            return
        self._nested += 1
        try:
            self._ready(request, place)
            while self._put_off and self._nested == 1:
                later, place = self._put_off.popleft()
                if later.state == OPEN and later.missing[place] >= 0:
                    self._ready(later, place)
        finally:
            self._nested -= 1

    def settle(self, request: Request, place: int) -> None:
        """A unit will not run (any more): give back what it was to read, now or when it comes."""
        unit = request.route.units[place]
        if request.missing[place] < 0:
            return
        request.missing[place] = -1
        for slot in (*unit.slots, *unit.looks_at):
            if slot in request.values:
                self.release(self.take(request, slot))

    def skip(self, request: Request, place: int) -> None:
        """Settle a unit, and everything it would have given is absent."""
        self.settle(request, place)
        for slot in request.route.units[place].returns:
            self.produce(request, slot, ABSENT)

    def end(self, request: Request, event: str, error: str, message: str, step: str = "") -> None:
        """End a request that will not be answered: it leaves every queue and gives back every ticket it still has."""
        if request.state != OPEN:
            return
        request.move(event)
        counters = self.counters
        setattr(counters, request.state, getattr(counters, request.state) + 1)
        self._drop(request)
        for slot, value in request.values.items():
            self._release_value(value, request.tickets[slot])
        self._leave(request)
        self._emit(ev.Fail(request.id, error, message, step, tuple(request.timings)))

    def withdraw(self, request_id: int) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self.end(request, "cancel", "RequestCancelled", "the caller withdrew the request")

    def delivered(self, request_id: int) -> None:
        self.release(self.owed.pop(request_id, ()))

    def expire(self) -> None:
        """End every request whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= self.now_ms:
            _, request_id = heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None:
                after_ms = self.now_ms - request.admitted_ms
                left = ", ".join(self.unfinished(request)) or "none"
                told = f"the deadline passed after {after_ms:.0f} ms; unfinished steps: {left}"
                self.end(request, "expire", "DeadlineExceeded", told)

    def unfinished(self, request: Request) -> list[str]:
        """Return the names of the steps that a request still waits for; stand-ins that nobody has called are not."""
        called, waits_for = (-1, *request.called), request.route.waits_for
        return [
            self._step_names[step]
            for place, unit in enumerate(request.route.units)
            if (request.missing[place] >= 0 and waits_for.get(place, -1) in called) or self._at(request, place)
            for step in unit.steps
        ]

    def _at(self, request: Request, place: int) -> bool:
        return any(task.place == place for task in request.tasks.values())

    def wake_at_ms(self) -> float | None:
        """When the next deadline passes; None: no open request has one."""
        while self._deadlines and self._deadlines[0][1] not in self.requests:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # leases

    def hold(self, keys: Iterable[Key], readers: int = 1) -> None:
        for key in keys:
            self._ledger.hold(key, readers)

    def release(self, keys: Iterable[Key], readers: int = 1) -> None:
        for key in keys:
            self._ledger.release(key, readers)

    def release_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._ledger.release(block.key)

    def holds_all(self, values: Sequence[Value]) -> bool:
        """Whether every place named is leased, and inside its lease."""
        for value in values:
            if value.data is not None:
                continue
            if value.place is not None and not self._ledger.holds(value.place):
                return False
            if value.near is not None and not self._holds_near(value):
                return False
            if value.items and not self.holds_all(value.items):
                return False
        return True

    def _holds_near(self, value: Value) -> bool:
        """Whether a value's place on a device is leased, and the event that marks it is one, and leased."""
        near, ready = value.near, value.ready
        if near is None or not self._ledger.holds(near):
            return False
        return ready is None or (ready.arena < 0 and self._ledger.holds(ready))

    def keep_what_is_left(self, request: Request, left_of: Callable[[Value], Value]) -> None:
        """Replace the values that a request holds by what is left of them, and release what is not."""
        for slot, value in request.values.items():
            left = left_of(value)
            if left is not value:
                self._release_rest(value, left, request.tickets[slot])
                request.values[slot] = left
                for name in request.route.outputs_at[slot]:
                    request.outputs[name] = left
        for gather in request.gathers.values():
            for element, row in enumerate(gather.outputs):
                kept = tuple(map(left_of, row))
                for value, left in zip(row, kept):
                    self._release_rest(value, left, 1)
                gather.outputs[element] = kept

    def _release_rest(self, value: Value, left: Value, tickets: int) -> None:
        kept = set(left.keys)
        self.release((key for key in value.keys if key not in kept), tickets)

    def release_inputs(self, inputs: Mapping[str, Value]) -> None:
        """Release the writer's tickets of a request's inputs."""
        for value in inputs.values():
            if value.data is None:
                self.release(value.keys)

    def _complete(self, request: Request) -> None:
        request.move("complete")
        self.counters.ok += 1
        owed: list[Key] = []
        for value in request.outputs.values():
            if value.data is None:
                owed += value.keys
        if owed:
            self.owed[request.id] = owed
        if request.tasks or request.gathers or request.stalled or request.sequence is not None:
            self._drop(request)
        for slot, value in request.values.items():
            self._release_value(value, request.tickets[slot] - len(request.route.outputs_at[slot]))
        self._leave(request)
        outputs = {name: request.outputs[name] for name in request.route.outputs}  # in the pipeline's order
        self._emit(ev.Finish(request.id, outputs, tuple(request.timings)))

    def _release_value(self, value: Value, tickets: int) -> None:
        if tickets > 0 and value.data is None:
            self.release(value.keys, tickets)

    def _leave(self, request: Request) -> None:
        request.values.clear()
        request.tickets.clear()
        request.feeds.clear()
        self.admission.leave(request.size_bytes, self.now_ms, request.job)
        del self.requests[request.id]
