"""The requests that are inside: what each has, what each still waits for, and which leases it holds.

How a value lives. A producer's block is leased with one ticket, the *writer's*. When the value is there, one ticket is
added for each reader, and the writer's is released. A step's batch takes its inputs' tickets out of the request and
into the dispatch, so that a request can end at any moment while the bytes a worker is reading stay leased until it has
finished, or died. A pipeline output keeps its ticket until the caller says it was copied out (`Delivered`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from weftline.engine import events as ev
from weftline.engine.flow import Admission
from weftline.engine.messages import Value
from weftline.engine.request import OPEN, Request
from weftline.engine.routes import Routes
from weftline.pipelines.plan import Plan
from weftline.shm.block import Block
from weftline.shm.lease import Key, Ledger


@dataclass(slots=True)
class Counters:
    """Totals since the start. admitted == ok + failed + cancelled + expired + open, always."""

    admitted: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    deaths: int = 0
    copied_bytes: int = 0
    dispatches: int = 0
    items: int = 0


class Book:
    """Keeps the requests of one plan. Pure; owned by the scheduler.

    emit:    takes the commands that follow.
    enqueue: called with (request id, step) when a request has everything that a step reads.
    drop:    called with a request that ends unanswered, so that it leaves every queue and worker.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        emit: Callable[[ev.Command], None],
        enqueue: Callable[[int, int], None],
        drop: Callable[[Request], None],
    ) -> None:
        self.routes = Routes(plan)
        self.counters = Counters()
        self.admission = Admission(plan.limits)
        self.requests: dict[int, Request] = {}
        self.owed: dict[int, list[Value]] = {}
        self._ledger = ledger
        self._emit = emit
        self._enqueue = enqueue
        self._drop = drop
        self._step_names = [step.name for step in plan.steps]
        self._deadlines: list[tuple[float, int]] = []

    # the life of a request

    def admit(self, event: ev.Submitted, now_ms: float) -> None:
        """Take a request in and start it; LimitReached refuses it, and its inputs' leases are the caller's to end."""
        size = sum(value.size_bytes for value in event.inputs.values())
        route = self.routes.route(event.wanted)
        self.admission.admit(size)
        self.counters.admitted += 1
        request = Request(event.request, route, now_ms, event.deadline_ms, missing=dict(route.missing))
        self.requests[request.id] = request
        if request.deadline_ms is not None:
            heappush(self._deadlines, (request.deadline_ms, request.id))
        for step, missing in route.missing.items():
            if not missing:
                self._enqueue(request.id, step)
        for name, value in event.inputs.items():
            self.produce(request, self.routes.slot_of_input(name), value)

    def produce(self, request: Request, slot: int, value: Value) -> None:
        """A value is there: count its readers, move up the steps that waited for it, answer when it was the last."""
        route = request.route
        tickets = route.tickets(slot)
        if not tickets or request.state != OPEN:
            return
        if value.place is not None:
            self._ledger.hold(value.place.key, tickets)
        request.values[slot] = value
        request.tickets[slot] = tickets
        for name in route.outputs_at[slot]:
            request.outputs[name] = value
            self._emit(ev.OutputReady(request.id, name, value))
        for step in route.readers[slot]:
            request.missing[step] -= 1
            if not request.missing[step]:
                self._enqueue(request.id, step)
        if len(request.outputs) == len(route.outputs) and route.outputs_at[slot]:
            self._complete(request)

    def take_inputs(self, request: Request, slots: Iterable[int]) -> tuple[tuple[Value, ...], list[Key]]:
        """Move input tickets out of the request; return the values, and the leases to release when they were read."""
        values, keys = [], []
        for slot in slots:
            value = request.values[slot]
            values.append(value)
            if value.place is not None:
                keys.append(value.place.key)
            request.tickets[slot] -= 1
            if not request.tickets[slot]:
                del request.tickets[slot], request.values[slot]
        return tuple(values), keys

    def end(self, request: Request, event: str, error: str, message: str, step: str = "") -> None:
        """End a request that will not be answered: it leaves every queue and gives back every ticket it still has."""
        if request.state != OPEN:
            return
        request.move(event)
        setattr(self.counters, request.state, getattr(self.counters, request.state) + 1)
        self._drop(request)
        for slot, value in request.values.items():
            self._release_value(value, request.tickets[slot])
        self._leave(request)
        self._emit(ev.Fail(request.id, error, message, step))

    def withdraw(self, request_id: int) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self.end(request, "cancel", "RequestCancelled", "the caller withdrew the request")

    def delivered(self, request_id: int) -> None:
        for value in self.owed.pop(request_id, ()):
            self._release_value(value, 1)

    def expire(self, now_ms: float) -> None:
        """End every request whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, request_id = heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None:
                done = {timing.step for timing in request.timings}
                left = [name for name in (self._step_names[step] for step in request.route.steps) if name not in done]
                after_ms = now_ms - request.admitted_ms
                told = f"the deadline passed after {after_ms:.0f} ms; unfinished steps: {', '.join(left)}"
                self.end(request, "expire", "DeadlineExceeded", told)

    def wake_at_ms(self) -> float | None:
        """When the next deadline passes; None: no open request has one."""
        while self._deadlines and self._deadlines[0][1] not in self.requests:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # leases

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._ledger.release(key)

    def release_blocks(self, blocks: Iterable[Block]) -> None:
        self.release((block.arena, block.offset, block.generation) for block in blocks)

    def holds_all(self, values: Sequence[Value]) -> bool:
        """Whether every place named is leased, and inside its lease."""
        return all(value.place is None or self._ledger.holds(value.place) for value in values)

    def release_inputs(self, inputs: Mapping[str, Value]) -> None:
        """Release the writer's tickets of a request's inputs."""
        self.release(value.place.key for value in inputs.values() if value.place is not None)

    def _complete(self, request: Request) -> None:
        request.move("complete")
        self.counters.ok += 1
        owed = [value for value in request.outputs.values() if value.place is not None]
        if owed:
            self.owed[request.id] = owed
        for slot, value in request.values.items():
            self._release_value(value, request.tickets[slot] - len(request.route.outputs_at[slot]))
        self._leave(request)
        self._emit(ev.Finish(request.id, dict(request.outputs), tuple(request.timings)))

    def _release_value(self, value: Value, tickets: int) -> None:
        if value.place is not None and tickets > 0:
            self._ledger.release(value.place.key, tickets)

    def _leave(self, request: Request) -> None:
        request.values.clear()
        request.tickets.clear()
        self.admission.leave()
        del self.requests[request.id]
