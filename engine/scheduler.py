"""What happens next: batches, dispatches, and what workers say, decided in one place.

`scheduler.on(event, now_ms) -> commands`. Nothing here reads a clock, opens a socket or touches a tensor: the shell
(`runtime.py`) turns the outside world into events, carries out the commands, and decides nothing. The scheduler owns
the parts that remember: the Book (requests and their leases), the Crew (workers), the Rooms, and a queue for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.batcher import Batcher
from weftline.engine.book import Book, Counters
from weftline.engine.crew import Crew, Dispatch
from weftline.engine.events import Command, Event
from weftline.engine.flow import RETRY_AFTER_S
from weftline.engine.request import OPEN, Request, StepTiming
from weftline.engine.rooms import Rooms, lease_all
from weftline.engine.sizing import OutputSizes
from weftline.engine.supervisor import GIVEN_UP, READY, STARTING
from weftline.errors import LimitReached
from weftline.pipelines.plan import Plan
from weftline.pipelines.policy import BatchPolicy
from weftline.shm.block import PAGE_BYTES, Block, align_up
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
class _Step:
    """One step while it runs.

    run_ms:   moving average of one batch; 0 is unknown.
    in_place: its outputs have needed room in shared memory; then each message carries one batch, because the room of a
              message's batches is freed only when all of them are done.
    """

    name: str
    queue: Batcher
    sizes: OutputSizes
    workers: tuple[int, ...]
    streams: bool
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    run_max_ms: float
    run_ms: float = 0.0
    in_place: bool = False

    def batches_a_message(self) -> int:
        if self.in_place or not self.run_ms:
            return 1
        return max(1, min(BATCHES_MAX, int(QUICK_MESSAGE_MS / self.run_ms)))


class Scheduler:
    """Runs one plan. Not thread-safe: the shell calls it under one lock."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self.ledger.add_arena(INGRESS_ARENA, align_up(plan.limits.arena_bytes, PAGE_BYTES))
        self.crew = Crew(plan, seed)
        self._now_ms = 0.0
        self._out: list[Command] = []
        self._book = Book(plan, self.ledger, self._emit, self._enqueue, self._drop)
        self._rooms = Rooms(self.ledger, self.crew, self._emit)
        self._steps = [self._make_step(index) for index in range(len(plan.steps))]
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Submitted: self._submitted,
            ev.Delivered: lambda event: self._book.delivered(event.request),
            ev.Withdrawn: lambda event: self._book.withdraw(event.request),
            ev.WorkerDied: self._worker_died,
            ev.FromWorker: self._from_worker,
            ev.Tick: self._tick,
            msg.Hello: self._hello,
            msg.Ready: lambda worker, message: self.crew.ready(worker),
            msg.OpenFailed: self._open_failed,
            msg.Progress: lambda worker, message: None,
            msg.Need: self._need,
            msg.Done: self._done,
            msg.Pieces: self._pieces,
        }

    def _make_step(self, index: int) -> _Step:
        planned = self.plan.steps[index]
        policy = BatchPolicy(STREAM_ITEMS_MAX, 0.0) if planned.streams else planned.batch
        return _Step(
            planned.name,
            Batcher(policy),
            OutputSizes(planned),
            planned.workers,
            planned.streams,
            self._book.routes.input_slots[index],
            self._book.routes.output_slots[index],
            planned.run_max_ms,
        )

    # the door

    def start(self, now_ms: float) -> list[Command]:
        """Return the commands that start every worker."""
        return [ev.StartWorker(worker, arena) for worker, arena in self.crew.start_all(now_ms)]

    def on(self, event: Event, now_ms: float) -> list[Command]:
        """Take in what happened and return what to do, in order."""
        self._now_ms = now_ms
        self._handlers[type(event)](event)
        self._pump()
        for arena in self.ledger.forget_empty():
            self._emit(ev.ForgetArena(arena))
        out, self._out = self._out, []
        return out

    def wake_at_ms(self) -> float | None:
        """When to send a Tick if nothing else happens; None: never."""
        soonest = _sooner(self.crew.wake_at_ms(), self._book.wake_at_ms())
        for step in self._steps:
            wake = step.queue.wake_at_ms()
            if wake is not None and any(self._free(worker, step) for worker in step.workers):
                soonest = _sooner(soonest, wake)
        return soonest

    def try_reserve(self, sizes: Sequence[int]) -> list[Block]:
        """Lease blocks in the ingress arena for a request's inputs, before it is submitted; LimitReached when full."""
        blocks = lease_all(self.ledger, INGRESS_ARENA, sizes)
        if blocks is None:
            self.counters.refused += 1
            limit = self.plan.limits.arena_bytes
            raise LimitReached(
                f"no room for inputs of {sum(sizes)} bytes; limits.arena_bytes is {limit}", RETRY_AFTER_S
            )
        return blocks

    def give_up(self, blocks: Sequence[Block]) -> None:
        """Release blocks whose request was never submitted."""
        self._book.release_blocks(blocks)

    @property
    def counters(self) -> Counters:
        return self._book.counters

    @property
    def open_requests(self) -> int:
        return len(self._book.requests)

    @property
    def queued(self) -> dict[str, int]:
        """How many items wait for each step."""
        return {step.name: len(step.queue) for step in self._steps}

    def idle(self) -> bool:
        """Whether nothing is open, running, or still to be copied out."""
        return not self._book.requests and not self._book.owed and not self.crew.busy()

    # requests

    def _emit(self, command: Command) -> None:
        self._out.append(command)

    def _enqueue(self, request_id: int, step: int) -> None:
        self._steps[step].queue.add(request_id, self._now_ms)

    def _drop(self, request: Request) -> None:
        for step in request.route.steps:
            self._steps[step].queue.discard(request.id)
        for worker, step in self.crew.streaming(request.id):
            self._emit(ev.Send(worker, msg.Cancel(step, (request.id,))))

    def _submitted(self, event: ev.Submitted) -> None:
        try:
            lost = self.crew.unavailable(self._book.routes.route(event.wanted).steps)
            if lost:
                raise LimitReached(f"step {lost} is unavailable: its worker keeps failing to start")
            self._book.admit(event, self._now_ms)
        except LimitReached as refusal:
            self.counters.refused += 1
            self._emit(ev.Refuse(event.request, str(refusal), refusal.retry_after_s))
        self._book.release_inputs(event.inputs)

    def _tick(self, event: ev.Tick) -> None:
        self._book.expire(self._now_ms)
        for worker, arena in self.crew.due(self._now_ms):
            self._emit(ev.StartWorker(worker, arena))
        for worker in self.crew.overdue(self._now_ms):
            self._kill(worker, "it was busy for longer than run_max_ms")

    # dispatching

    def _free(self, worker: int, step: _Step) -> bool:
        member = self.crew.members[worker]
        return member.state == READY and (step.streams or member.dispatch is None)

    def _pump(self) -> None:
        """Give free workers their steps' due batches, the step whose oldest item has waited longest first."""
        waiting = [(at, index) for index, s in enumerate(self._steps) if (at := s.queue.oldest_ms()) is not None]
        waiting.sort()
        for _, index in waiting:
            step = self._steps[index]
            batches = step.batches_a_message()
            for worker in step.workers:
                while len(step.queue) and self._free(worker, step):
                    taken = step.queue.take(self._now_ms, batches)
                    if not taken:
                        break
                    self._dispatch(worker, index, taken)
        self._rooms.grant(self._stuck)

    def _stuck(self) -> bool:
        """Whether no memory will come free by itself, now or when a batch's wait is over or a worker has restarted."""
        if self._book.owed:
            return False
        for member in self.crew.members:
            if (member.busy and not member.needs) or member.state == STARTING or member.start_ms is not None:
                return False
        waiting = [step for step in self._steps if len(step.queue)]
        return not any(self._free(worker, step) for step in waiting for worker in step.workers)

    def _dispatch(self, worker: int, index: int, taken: list[tuple[int, float]]) -> None:
        step, member = self._steps[index], self.crew.members[worker]
        inputs = [self._book.take_inputs(self._book.requests[request], step.input_slots) for request, _ in taken]
        items = tuple(msg.Item(request, values) for (request, _), (values, _) in zip(taken, inputs))
        keys = [held for _, held in inputs]
        self.counters.dispatches += 1
        self.counters.items += len(items)
        if step.streams:
            if not member.streams:
                member.heard_ms = self._now_ms
            for item, held, (_, arrived_ms) in zip(items, keys, taken):
                member.streams[(index, item.id)] = Dispatch(
                    0, index, (item.id,), [held], {}, self._now_ms, (arrived_ms,), step.run_max_ms
                )
            self._emit(ev.Send(worker, msg.Submit(index, items)))
            return
        room = self._rooms.beforehand(member.arena, step.sizes.item_bytes(items), len(items))
        step.in_place = step.in_place or bool(room)
        arrived = tuple(arrived_ms for _, arrived_ms in taken)
        ids = tuple(item.id for item in items)
        member.dispatch = Dispatch(
            self.crew.next_dispatch(), index, ids, keys, room, self._now_ms, arrived, step.run_max_ms
        )
        self._emit(ev.Send(worker, msg.Run(member.dispatch.id, index, items, room)))

    # what workers say

    def _from_worker(self, event: ev.FromWorker) -> None:
        member = self.crew.members[event.worker]
        if event.arena == member.arena and member.alive:  # else it comes late from one that is gone, and is ignored
            member.heard_ms = self._now_ms
            self._handlers[type(event.message)](event.worker, event.message)

    def _hello(self, worker: int, message: msg.Hello) -> None:
        self.ledger.add_arena(self.crew.members[worker].arena, message.arena_bytes)

    def _open_failed(self, worker: int, message: msg.OpenFailed) -> None:
        self.crew.members[worker].why = f"step {message.step}: {message.failure.message}"

    def _need(self, worker: int, message: msg.Need) -> None:
        member = self.crew.members[worker]
        member.needs = message.sizes
        if member.dispatch is not None:
            self._steps[member.dispatch.step].in_place = True

    def _done(self, worker: int, message: msg.Done) -> None:
        member = self.crew.members[worker]
        dispatch = member.dispatch
        if dispatch is None or dispatch.id != message.dispatch or len(message.results) != len(dispatch.items):
            self._kill(worker, "it answered a dispatch that is not running")
            return
        member.dispatch = None
        step = self._steps[dispatch.step]
        run_ms = message.run_ms / max(message.batches, 1)
        step.run_ms = 0.8 * step.run_ms + 0.2 * run_ms if step.run_ms else run_ms
        self.counters.copied_bytes += message.copied_bytes
        batch = -(-len(dispatch.items) // max(message.batches, 1))
        for position, (item, result) in enumerate(zip(dispatch.items, message.results)):
            request = self._book.requests.get(item)
            if request is not None:
                self._take_result(
                    worker, request, step, result, dispatch.timing(step.name, position, self._now_ms, batch)
                )
            self._book.release(dispatch.keys[position])
        self._book.release_blocks((*dispatch.room.values(), *member.granted))
        member.granted.clear()

    def _pieces(self, worker: int, message: msg.Pieces) -> None:
        member, step = self.crew.members[worker], self._steps[message.step]
        self.counters.copied_bytes += message.copied_bytes
        for piece in message.pieces:
            dispatch = member.streams.get((message.step, piece.item))
            request = self._book.requests.get(piece.item)
            if dispatch is None:
                continue
            if not piece.last:
                if request is not None:
                    self._pass_on(request, step, piece)
                continue
            del member.streams[(message.step, piece.item)]
            if request is not None:
                result = piece.failure or msg.Given(
                    tuple(piece.outputs[port] for port in range(len(step.output_slots)))
                )
                timing = dispatch.timing(step.name, 0, self._now_ms, len(member.streams) + 1)
                self._take_result(worker, request, step, result, timing)
            self._book.release(dispatch.keys[0])
        self._book.release_blocks(member.granted)
        member.granted.clear()

    def _pass_on(self, request: Request, step: _Step, piece: msg.PieceOf) -> None:
        for port, value in piece.outputs.items():
            for name in request.route.outputs_at[step.output_slots[port]]:
                self._emit(ev.PieceReady(request.id, name, value))

    def _take_result(
        self, worker: int, request: Request, step: _Step, result: msg.Given | msg.Failure, timing: StepTiming
    ) -> None:
        request.timings.append(timing)
        if isinstance(result, msg.Failure):
            self._book.end(request, "fail", result.error, result.message, step.name)
        elif not self._book.holds_all(result.outputs):
            self._book.end(request, "fail", "StepError", "its worker named memory it does not hold", step.name)
            self._kill(worker, "it named memory it does not hold")
        else:
            for slot, value in zip(step.output_slots, result.outputs):
                self._book.produce(request, slot, value)

    # deaths

    def _kill(self, worker: int, why: str) -> None:
        self.crew.members[worker].why = why
        self._emit(ev.KillWorker(worker, why))

    def _worker_died(self, event: ev.WorkerDied) -> None:
        member = self.crew.members[event.worker]
        if event.arena != member.arena or not member.alive:
            return
        self.counters.deaths += 1
        why = member.why or event.how
        for dispatch in self.crew.died(event.worker, self._now_ms):
            for item, keys in zip(dispatch.items, dispatch.keys):
                request = self._book.requests.get(item)
                if request is not None:
                    step = self._steps[dispatch.step].name
                    self._book.end(request, "fail", "WorkerDied", f"its worker died while running it ({why})", step)
                self._book.release(keys)
            self._book.release_blocks(dispatch.room.values())
        self._book.release_blocks(member.granted)
        member.granted.clear()
        member.needs = ()
        self.ledger.retire_arena(event.arena)
        if member.state == GIVEN_UP:
            self._fail_hopeless(why)

    def _fail_hopeless(self, why: str) -> None:
        """End every request that still needs a step nobody will run any more."""
        for request in list(self._book.requests.values()):
            done = {timing.step for timing in request.timings}
            step = self.crew.unavailable([s for s in request.route.steps if self._steps[s].name not in done])
            if step and request.state == OPEN:
                self._book.end(request, "fail", "WorkerDied", f"its worker keeps failing to start ({why})", step)


def _sooner(one: float | None, other: float | None) -> float | None:
    return one if other is None or (one is not None and one <= other) else other
