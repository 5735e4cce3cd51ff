"""What happens next: every decision about requests, batches, leases and workers, in one place.

`scheduler.on(event, now_ms) -> commands`. Nothing here reads a clock, opens a socket or touches a tensor: the shell
(`runtime.py`) turns the outside world into events, carries out the commands, and decides nothing.

How a value lives. A producer's block is leased with one ticket, the *writer's*. When the value is there, one ticket is
added for each reader, and the writer's is released. A step's batch takes its inputs' tickets out of the request and into
the dispatch, so that a request can end at any moment while the bytes a worker is reading stay leased until it has
finished, or died. A pipeline output keeps its ticket until the caller says it was copied out (`Delivered`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.batcher import Batcher
from weftline.engine.crew import Crew, Dispatch, WorkerState
from weftline.engine.events import Command, Event
from weftline.engine.flow import Admission
from weftline.engine.messages import Value
from weftline.engine.request import OPEN, Request, StepTiming
from weftline.engine.routes import Routes
from weftline.engine.values import room_bytes
from weftline.errors import LimitReached
from weftline.pipelines.plan import Plan
from weftline.pipelines.policy import BatchPolicy
from weftline.shm.block import INLINE_BYTES_MAX, Block
from weftline.shm.lease import Ledger

INGRESS_ARENA = 0
"""The arena of the process that admits requests; workers' arenas are numbered from 1, never twice."""

QUICK_MESSAGE_MS = 0.5
"""A message may carry several batches of a step as long as they are expected to take no longer than this together."""

BATCHES_MAX = 32
"""Most batches in one message."""

STREAM_ITEMS_MAX = 64
"""Most items handed to a streaming step in one message; it takes them all and does its own batching."""


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


@dataclass(slots=True)
class _Step:
    """What the scheduler knows of one step while it runs. run_ms is a moving average for one batch; 0 is unknown."""

    name: str
    queue: Batcher
    rooms: dict[int, int]
    run_ms: float = 0.0
    workers: tuple[int, ...] = ()
    stream: bool = False
    input_slots: tuple[int, ...] = ()
    output_slots: tuple[int, ...] = ()


class Scheduler:
    """Runs one plan. Not thread-safe: the shell calls it under one lock."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self.ledger.add_arena(INGRESS_ARENA, -(-plan.limits.arena_bytes // 4096) * 4096)
        self.counters = Counters()
        self._admission = Admission(plan.limits)
        self._routes = Routes(plan)
        self._requests: dict[int, Request] = {}
        self._owed: dict[int, list[Value]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._crew = Crew(plan, seed)
        self._steps = [self._make_step(index) for index in range(len(plan.steps))]
        self._out: list[Command] = []
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Submitted: self._submitted,
            ev.Delivered: self._delivered,
            ev.Withdrawn: self._withdrawn,
            ev.WorkerDied: self._worker_died,
            ev.FromWorker: self._from_worker,
            ev.Tick: self._tick,
            msg.Ready: self._ready,
            msg.Need: self._need,
            msg.Done: self._done,
            msg.Pieces: self._pieces,
            msg.Hello: self._hello,
            msg.OpenFailed: self._open_failed,
            msg.Progress: lambda worker, message, now_ms: None,
        }

    def _make_step(self, index: int) -> _Step:
        planned = self.plan.steps[index]
        policy = BatchPolicy(STREAM_ITEMS_MAX, 0.0) if planned.streams else planned.batch
        rooms = {i: room_bytes(port.type) or 0 for i, port in enumerate(planned.outputs)}
        return _Step(
            planned.name,
            Batcher(policy),
            {i: size for i, size in rooms.items() if size},
            workers=planned.workers,
            stream=planned.streams,
            input_slots=self._routes.input_slots[index],
            output_slots=self._routes.output_slots[index],
        )

    # the one door

    def on(self, event: Event, now_ms: float) -> list[Command]:
        """Take in what happened and return what to do, in order."""
        self._handlers[type(event)](event, now_ms)
        self._pump(now_ms)
        out, self._out = self._out, []
        return out

    def wake_at_ms(self) -> float | None:
        """When to send a Tick if nothing else happens; None: never."""
        times = [t for t in (self._crew.wake_at_ms(), self._deadlines[0][0] if self._deadlines else None) if t is not None]
        for step in self._steps:
            wake = step.queue.wake_at_ms()
            if wake is not None and any(self._free(worker, step) for worker in step.workers):
                times.append(wake)
        return min(times, default=None)

    def try_reserve(self, sizes: Sequence[int]) -> list[Block]:
        """Lease blocks in the ingress arena for a request's inputs, before it is submitted; LimitReached when full."""
        blocks: list[Block] = []
        for size in sizes:
            block = self.ledger.try_lease(INGRESS_ARENA, size)
            if block is None:
                self.give_up(blocks)
                self.counters.refused += 1
                raise LimitReached(f"no room for {size} bytes of input; limits.arena_bytes is {self.plan.limits.arena_bytes}", 0.1)
            blocks.append(block)
        return blocks

    def give_up(self, blocks: Sequence[Block]) -> None:
        """Release blocks whose request was never submitted."""
        for block in blocks:
            self.ledger.release((block.arena, block.offset, block.generation))

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    @property
    def queued(self) -> dict[str, int]:
        """How many items wait for each step."""
        return {step.name: len(step.queue) for step in self._steps}

    @property
    def crew(self) -> Crew:
        return self._crew

    def idle(self) -> bool:
        """Whether nothing is open, running, or still to be copied out."""
        return not self._requests and not self._owed and not self._crew.busy()

    # requests

    def _submitted(self, event: ev.Submitted, now_ms: float) -> None:
        size = sum(value.size_bytes for value in event.inputs.values())
        writers = [value.place.key for value in event.inputs.values() if value.place is not None]
        route = self._routes.route(event.wanted)
        try:
            unavailable = self._crew.unavailable(route.steps)
            if unavailable:
                raise LimitReached(f"step {unavailable} is unavailable: its worker keeps failing to start")
            self._admission.admit(size)
        except LimitReached as refusal:
            self.counters.refused += 1
            self._release(writers)
            self._out.append(ev.Refuse(event.request, str(refusal), refusal.retry_after_s))
            return
        self.counters.admitted += 1
        request = Request(event.request, route, now_ms, event.deadline_ms, size, missing=dict(route.missing))
        self._requests[request.id] = request
        if request.deadline_ms is not None:
            heappush(self._deadlines, (request.deadline_ms, request.id))
        for name, value in event.inputs.items():
            self._produce(request, self._routes.slot_of_input(name), value, now_ms)
        self._release(writers)
        for step in route.steps:
            if not request.missing[step]:
                self._enqueue(request, step, now_ms)

    def _produce(self, request: Request, slot: int, value: Value, now_ms: float) -> None:
        """A value is there: count its readers, and let the steps that waited for it move up."""
        route = request.route
        tickets = route.tickets(slot)
        if not tickets:
            return
        if value.place is not None:
            self.ledger.hold(value.place.key, tickets)
        request.values[slot] = value
        request.tickets[slot] = tickets
        for name in route.outputs_at[slot]:
            request.outputs[name] = value
            self._out.append(ev.OutputReady(request.id, name, value))
        for step in route.readers[slot]:
            request.missing[step] -= 1
            if not request.missing[step]:
                self._enqueue(request, step, now_ms)
        if len(request.outputs) == len(route.outputs) and route.outputs_at[slot]:
            self._complete(request)

    def _enqueue(self, request: Request, step: int, now_ms: float) -> None:
        request.missing[step] = -1
        self._steps[step].queue.add(request.id, now_ms)

    def _complete(self, request: Request) -> None:
        request.move("complete")
        self.counters.ok += 1
        owed_values = [value for value in request.outputs.values() if value.place is not None]
        if owed_values:
            self._owed[request.id] = owed_values
        for slot, value in request.values.items():
            owed = len(request.route.outputs_at[slot])
            self._release_value(value, request.tickets[slot] - owed)
        self._leave(request)
        self._out.append(ev.Finish(request.id, dict(request.outputs), tuple(request.timings)))

    def _end(self, request: Request, event: str, error: str, message: str, step: str = "") -> None:
        """End a request that will not be answered: it leaves every queue and gives back every ticket it still has."""
        if request.state != OPEN:
            return
        request.move(event)
        setattr(self.counters, request.state, getattr(self.counters, request.state) + 1)
        for step in request.route.steps:
            self._steps[step].queue.discard(request.id)
        for slot, value in request.values.items():
            self._release_value(value, request.tickets[slot])
        for worker, step in self._crew.streaming(request.id):
            self._out.append(ev.Send(worker, msg.Cancel(step, (request.id,))))
        self._leave(request)
        self._out.append(ev.Fail(request.id, error, message, step))

    def _leave(self, request: Request) -> None:
        request.values.clear()
        request.tickets.clear()
        self._admission.leave(request.size_bytes)
        del self._requests[request.id]

    def _delivered(self, event: ev.Delivered, now_ms: float) -> None:
        for value in self._owed.pop(event.request, ()):
            self._release_value(value, 1)

    def _withdrawn(self, event: ev.Withdrawn, now_ms: float) -> None:
        request = self._requests.get(event.request)
        if request is not None:
            self._end(request, "cancel", "RequestCancelled", "the caller withdrew the request")

    # leases

    def _release(self, keys: Sequence[tuple[int, int, int]]) -> None:
        for key in keys:
            self.ledger.release(key)

    def _release_value(self, value: Value, tickets: int) -> None:
        if value.place is not None and tickets > 0:
            self.ledger.release(value.place.key, tickets)

    def _take_inputs(self, request: Request, step: _Step) -> tuple[tuple[Value, ...], list[tuple[int, int, int]]]:
        """Move a step's input tickets out of the request; return the values and the keys to release when it is done."""
        values, keys = [], []
        for slot in step.input_slots:
            value = request.values[slot]
            values.append(value)
            if value.place is not None:
                keys.append(value.place.key)
            request.tickets[slot] -= 1
            if not request.tickets[slot]:
                del request.tickets[slot], request.values[slot]
        return tuple(values), keys

    # dispatching

    def _free(self, worker: int, step: _Step) -> bool:
        member = self._crew.members[worker]
        return member.state == "ready" and (step.stream or member.dispatch is None)

    def _pump(self, now_ms: float) -> None:
        """Give every free worker the step whose oldest item has waited longest, as long as a batch is due."""
        waiting = [(step.queue.oldest_ms() or 0.0, index) for index, step in enumerate(self._steps) if len(step.queue)]
        for _, index in sorted(waiting):
            step = self._steps[index]
            for worker in step.workers:
                while len(step.queue) and self._free(worker, step):
                    batches = min(BATCHES_MAX, int(QUICK_MESSAGE_MS / step.run_ms)) if step.run_ms else 1
                    taken = step.queue.take(now_ms, max(batches, 1))
                    if not taken:
                        break
                    self._dispatch(worker, index, taken, now_ms)
        self._grant_rooms(now_ms)

    def _dispatch(self, worker: int, index: int, taken: list[tuple[int, float]], now_ms: float) -> None:
        step, member = self._steps[index], self._crew.members[worker]
        items, keys = [], []
        for request_id, _ in taken:
            values, held = self._take_inputs(self._requests[request_id], step)
            items.append(msg.Item(request_id, values))
            keys.append(held)
        self.counters.dispatches += 1
        self.counters.items += len(items)
        if step.stream:
            for item, held, (_, arrived_ms) in zip(items, keys, taken):
                member.streams[(index, item.id)] = Dispatch(0, index, (item.id,), [held], {}, now_ms, (arrived_ms,))
            self._out.append(ev.Send(worker, msg.Submit(index, tuple(items))))
            return
        room: dict[int, Block] = {}
        for port, size in step.rooms.items():
            if size * len(items) > INLINE_BYTES_MAX:
                block = self.ledger.try_lease(member.arena, size * len(items))
                if block is not None:
                    room[port] = block
        arrived = tuple(arrived_ms for _, arrived_ms in taken)
        ids = tuple(item.id for item in items)
        member.dispatch = Dispatch(self._crew.next_dispatch(), index, ids, keys, room, now_ms, arrived)
        self._out.append(ev.Send(worker, msg.Run(member.dispatch.id, index, tuple(items), room)))

    # messages from workers

    def _from_worker(self, event: ev.FromWorker, now_ms: float) -> None:
        member = self._crew.members[event.worker]
        if event.arena == member.arena and member.alive:  # else it comes late from one that is gone, and is ignored
            self._handlers[type(event.message)](event.worker, event.message, now_ms)

    def _hello(self, worker: int, message: msg.Hello, now_ms: float) -> None:
        self.ledger.add_arena(self._crew.members[worker].arena, message.arena_bytes)

    def _ready(self, worker: int, message: msg.Ready, now_ms: float) -> None:
        self._crew.ready(worker)

    def _open_failed(self, worker: int, message: msg.OpenFailed, now_ms: float) -> None:
        self._crew.members[worker].why = f"step {message.step}: {message.failure.message}"

    def _done(self, worker: int, message: msg.Done, now_ms: float) -> None:
        member = self._crew.members[worker]
        dispatch = member.dispatch
        if dispatch is None or dispatch.id != message.dispatch or len(message.results) != len(dispatch.items):
            self._broken(worker, "it answered a dispatch that is not running")
            return
        member.dispatch = None
        step = self._steps[dispatch.step]
        run_ms = message.run_ms / max(message.batches, 1)
        step.run_ms = run_ms if not step.run_ms else 0.8 * step.run_ms + 0.2 * run_ms
        self.counters.copied_bytes += message.copied_bytes
        batch = -(-len(dispatch.items) // max(message.batches, 1))
        for position, (item, result) in enumerate(zip(dispatch.items, message.results)):
            request = self._requests.get(item)
            if request is not None:
                timing = dispatch.timing(step.name, position, now_ms, batch)
                self._take_result(worker, request, dispatch.step, result, timing, now_ms)
            self._release(dispatch.keys[position])
        self._release([(b.arena, b.offset, b.generation) for b in (*dispatch.room.values(), *member.granted)])
        member.granted.clear()

    def _take_result(
        self, worker: int, request: Request, index: int, result: msg.Given | msg.Failure, timing: StepTiming, now_ms: float
    ) -> None:
        step = self._steps[index]
        request.timings.append(timing)
        if isinstance(result, msg.Failure):
            self._end(request, "fail", result.error, result.message, step.name)
            return
        if not all(value.place is None or self.ledger.holds(value.place) for value in result.outputs):
            self._end(request, "fail", "StepError", "its worker named memory it does not hold", step.name)
            self._broken(worker, "it named memory it does not hold")
            return
        for slot, value in zip(step.output_slots, result.outputs):
            if request.state == OPEN:
                self._produce(request, slot, value, now_ms)

    def _pieces(self, worker: int, message: msg.Pieces, now_ms: float) -> None:
        member = self._crew.members[worker]
        step = self._steps[message.step]
        self.counters.copied_bytes += message.copied_bytes
        for piece in message.pieces:
            dispatch = member.streams.get((message.step, piece.item))
            request = self._requests.get(piece.item)
            if dispatch is None:
                continue
            if piece.last:
                del member.streams[(message.step, piece.item)]
            if request is not None and not piece.last:
                self._pass_on(request, step, piece)
            elif request is not None:
                ports = range(len(step.output_slots))
                given: msg.Given | msg.Failure = piece.failure or msg.Given(tuple(piece.outputs[port] for port in ports))
                timing = dispatch.timing(step.name, 0, now_ms, len(member.streams) + 1)
                self._take_result(worker, request, message.step, given, timing, now_ms)
            if piece.last:
                self._release(dispatch.keys[0])
        self._release([(b.arena, b.offset, b.generation) for b in member.granted])
        member.granted.clear()

    def _pass_on(self, request: Request, step: _Step, piece: msg.PieceOf) -> None:
        for port, value in piece.outputs.items():
            for name in request.route.outputs_at[step.output_slots[port]]:
                self._out.append(ev.PieceReady(request.id, name, value))

    # room for outputs whose size only the worker knows

    def _need(self, worker: int, message: msg.Need, now_ms: float) -> None:
        self._crew.members[worker].needs = message.sizes

    def _grant_rooms(self, now_ms: float) -> None:
        waiting = [(w, member) for w, member in enumerate(self._crew.members) if member.needs]
        for worker, member in waiting:
            blocks = self._lease_all(member.arena, member.needs)
            if blocks is not None:
                member.granted += blocks
                member.needs = ()
                self._out.append(ev.Send(worker, msg.Room(tuple(blocks))))
            elif sum(member.needs) > self.ledger.arena_bytes(member.arena) or self._stalled():
                asked, member.needs = sum(member.needs), ()
                refused = f"its outputs take {asked} bytes and limits.arena_bytes leaves no room for them"
                self._out.append(ev.Send(worker, msg.Room((), refused)))

    def _lease_all(self, arena: int, sizes: Sequence[int]) -> list[Block] | None:
        blocks: list[Block] = []
        for size in sizes:
            block = self.ledger.try_lease(arena, size)
            if block is None:
                self.give_up(blocks)
                return None
            blocks.append(block)
        return blocks

    def _stalled(self) -> bool:
        """Whether nothing will free memory by itself: every busy worker waits for room and nobody is copying out."""
        return not self._owed and all(m.needs or not m.busy for m in self._crew.members)

    # workers

    def start(self, now_ms: float) -> list[Command]:
        """Return the commands that start every worker."""
        self._out += [ev.StartWorker(worker, arena) for worker, arena in self._crew.start_all(now_ms)]
        out, self._out = self._out, []
        return out

    def _broken(self, worker: int, why: str) -> None:
        self._crew.members[worker].why = why
        self._out.append(ev.KillWorker(worker, why))

    def _worker_died(self, event: ev.WorkerDied, now_ms: float) -> None:
        member = self._crew.members[event.worker]
        if event.arena != member.arena or not member.alive:
            return
        self.counters.deaths += 1
        lost = self._crew.died(event.worker, now_ms)
        why = member.why or event.how
        for dispatch in lost:
            step = self._steps[dispatch.step].name
            for item, keys in zip(dispatch.items, dispatch.keys):
                request = self._requests.get(item)
                if request is not None:
                    self._end(request, "fail", "WorkerDied", f"its worker died while running it ({why})", step)
                self._release(keys)
            self._release([(b.arena, b.offset, b.generation) for b in dispatch.room.values()])
        self._release([(b.arena, b.offset, b.generation) for b in member.granted])
        member.granted.clear()
        member.needs = ()
        self.ledger.retire_arena(event.arena)
        self._out.append(ev.ArenaRetired(event.arena))
        if member.state == "given_up":
            self._fail_unavailable(member, why)

    def _fail_unavailable(self, member: WorkerState, why: str) -> None:
        for request in list(self._requests.values()):
            step = self._crew.unavailable([s for s in request.route.steps if request.missing[s] <= 0])
            if step:
                self._end(request, "fail", "WorkerDied", f"its worker keeps failing to start ({why})", step)

    def _tick(self, event: ev.Tick, now_ms: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None:
                took = now_ms - request.admitted_ms
                self._end(request, "expire", "DeadlineExceeded", f"the deadline passed after {took:.0f} ms; {self._whereabouts(request)}")
        for worker, arena in self._crew.due(now_ms):
            self._out.append(ev.StartWorker(worker, arena))
        for worker in self._crew.overdue(now_ms):
            self._broken(worker, "one call took longer than run_max_ms")
        for arena in self.ledger.forget_empty():
            self._out.append(ev.ForgetArena(arena))

    def _whereabouts(self, request: Request) -> str:
        done = {timing.step for timing in request.timings}
        left = [self._steps[step].name for step in request.route.steps if self._steps[step].name not in done]
        return f"unfinished steps: {', '.join(left)}"
