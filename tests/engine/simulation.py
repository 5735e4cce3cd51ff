"""A made-up world around the real scheduler: random plans, workers that are slow, fail, ask for room and die.

Everything is drawn from one seed and happens in virtual time, so a failing seed can be replayed:

    python -m tests.engine.simulation SEED

After every event the invariants are checked: each admitted request is in exactly one state, the ledger tiles its
arenas, and when everything has ended nothing is leased, queued or held.
"""

from __future__ import annotations

import random
import sys
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.clock import ManualClock
from weftline.engine.scheduler import Scheduler
from weftline.nodes.ports import Port, PortType
from weftline.pipelines.graph import Input, Wire
from weftline.pipelines.plan import Plan, PlannedInput, PlannedOutput, PlannedStep, PlannedWorker
from weftline.pipelines.policy import BatchPolicy, Limits, Slo
from weftline.shm.block import INLINE_BYTES_MAX, Block, Place

TENSOR = PortType("tensor", "uint8", (INLINE_BYTES_MAX + 64,))
ANY = PortType("bytes")


def random_plan(rng: random.Random) -> Plan:
    """Draw a DAG of 1 to 6 steps over 1 to 3 inputs, some streaming, some sharing a worker."""
    inputs = tuple(Input(f"in{i}", "bytes") for i in range(rng.randint(1, 3)))
    wires = [Wire(None, given.name) for given in inputs]
    drafts = []
    for index in range(rng.randint(1, 6)):
        ports = tuple(Port(f"out{i}", rng.choice((TENSOR, ANY))) for i in range(rng.randint(1, 2)))
        reads = tuple(PlannedInput(f"p{i}", rng.choice(wires), ANY) for i in range(rng.randint(1, 3)))
        drafts.append((f"s{index}", reads, ports))
        wires += [Wire(f"s{index}", port.name) for port in ports]
    outputs = tuple(PlannedOutput(f"o{i}", rng.choice(wires), ANY) for i in range(rng.randint(1, 3)))
    workers: list[PlannedWorker] = []
    steps = []
    for name, reads, ports in drafts:
        if workers and rng.random() < 0.25:
            places = (rng.randrange(len(workers)),)
        else:
            places = tuple(range(len(workers), len(workers) + rng.choice((1, 1, 2))))
            workers += [PlannedWorker(f"w{i}", (), 1, 1 << 18) for i in places]
        steps.append(
            PlannedStep(
                name, "sim", {}, reads, ports, {}, BatchPolicy(rng.choice((1, 2, 4, 8)), rng.choice((0.0, 2.0, 10.0))),
                rng.random() < 0.2, False, False, "cpu", places, 1000.0,
            )
        )  # fmt: skip
    return Plan(
        "sim", inputs, {}, {}, tuple(steps), outputs, tuple(workers), Limits(requests_max=12, arena_bytes=1 << 19),
        Slo(), 2, Path(),
    )  # fmt: skip


class World:
    """Drives one scheduler through `requests` random requests and checks it all the way."""

    def __init__(self, seed: int, requests: int = 30) -> None:
        self.rng = random.Random(seed)
        self.plan = random_plan(self.rng)
        self.scheduler = Scheduler(self.plan, seed)
        self.clock = ManualClock()
        self.todo: list[tuple[float, int, object]] = []
        self.order = count()
        self.ended: dict[int, str] = {}
        self.refused: set[int] = set()
        self.owed: set[int] = set()
        self.arena_of: dict[int, int] = {}
        self.waiting_room: dict[int, tuple[msg.Run | msg.Submit, int]] = {}
        self.cancelled: dict[int, set[tuple[int, int]]] = {}
        self.streams: dict[int, list[tuple[int, msg.Item]]] = {}
        self.seen: set[str] = set()
        self.deadly = self.rng.random() < 0.5
        for request in range(1, requests + 1):
            self.at(self.rng.uniform(5, 200), ("submit", request))

    @property
    def now(self) -> float:
        return self.clock.now_ms()

    def at(self, when: float, what: object) -> None:
        heappush(self.todo, (when, next(self.order), what))

    def later(self, what: object, most: float = 20.0) -> None:
        self.at(self.now + self.rng.uniform(0.01, most), what)

    def run(self) -> None:
        """Run until nothing is left to happen, then look for anything still held."""
        self.obey(self.scheduler.start(self.now))
        for _ in range(20_000):
            wake = self.scheduler.wake_at_ms()
            if not self.todo and wake is None:
                break
            if wake is not None and (not self.todo or wake <= self.todo[0][0]):
                self.clock.advance(max(0.0, wake - self.now))
                self.tell(ev.Tick())
                continue
            when, _, what = heappop(self.todo)
            self.clock.advance(max(0.0, when - self.now))
            self.happen(*what)  # type: ignore[misc]
        else:
            raise AssertionError("the simulation does not come to rest")
        self.check_rest()

    def tell(self, event: ev.Event) -> None:
        self.seen.add(type(event).__name__)
        self.obey(self.scheduler.on(event, self.now))
        self.check()

    # what happens

    def happen(self, kind: str, *details: object) -> None:
        getattr(self, f"on_{kind}")(*details)

    def on_submit(self, request: int) -> None:
        inputs: dict[str, msg.Value] = {}
        for given in self.plan.inputs:
            if self.rng.random() < 0.5:
                inputs[given.name] = msg.Value("bytes", data=b"x")
                continue
            try:
                block = self.scheduler.try_reserve([INLINE_BYTES_MAX + 1])[0]
            except Exception:
                self.scheduler.give_up([b for v in inputs.values() if v.place for b in [as_block(v.place)]])
                self.refused.add(request)
                return
            inputs[given.name] = msg.Value("bytes", place=block.place(0, INLINE_BYTES_MAX + 1))
        names = [output.name for output in self.plan.outputs]
        wanted = None if self.rng.random() < 0.7 else tuple(self.rng.sample(names, self.rng.randint(1, len(names))))
        deadline = self.now + self.rng.uniform(5, 200) if self.rng.random() < 0.3 else None
        self.tell(ev.Submitted(request, inputs, wanted, deadline))
        if self.rng.random() < 0.2:
            self.later(("withdraw", request), 60)

    def on_withdraw(self, request: int) -> None:
        self.tell(ev.Withdrawn(request))

    def on_deliver(self, request: int) -> None:
        self.owed.discard(request)
        self.tell(ev.Delivered(request))

    def on_hello(self, worker: int, arena: int) -> None:
        self.say(worker, arena, msg.Hello(1, 1 << 18))
        if self.deadly and self.rng.random() < 0.1:
            self.later(("die", worker, arena))
        else:
            self.later(("ready", worker, arena))

    def on_ready(self, worker: int, arena: int) -> None:
        self.say(worker, arena, msg.Ready({}))
        if self.deadly and self.rng.random() < 0.3:
            self.later(("die", worker, arena), 300)

    def on_die(self, worker: int, arena: int) -> None:
        if self.arena_of.get(worker) != arena:
            return
        del self.arena_of[worker]
        self.waiting_room.pop(worker, None)
        self.streams.pop(worker, None)
        self.tell(ev.WorkerDied(worker, arena, "signal 9"))
        if self.rng.random() < 0.3:  # and once more, late
            self.tell(ev.WorkerDied(worker, arena, "signal 9"))
            self.tell(ev.FromWorker(worker, arena, msg.Done(1, (), 1.0, 1, 0)))

    def on_work(self, worker: int, arena: int, message: msg.Run) -> None:
        """A worker has run a dispatch: it answers, or asks for room first."""
        if self.arena_of.get(worker) != arena:
            return
        if self.deadly and self.rng.random() < 0.01:
            return  # a wedge: it never answers
        if self.rng.random() < 0.3 and worker not in self.waiting_room:
            self.waiting_room[worker] = (message, arena)
            huge = self.rng.random() < 0.05
            self.say(worker, arena, msg.Need(((1 << 20) if huge else 20_000,)))
            return
        self.finish(worker, arena, message, None)

    def finish(self, worker: int, arena: int, message: msg.Run, room: msg.Room | None) -> None:
        ports = self.plan.steps[message.step].outputs
        results: list[msg.Given | msg.Failure] = []
        for position, item in enumerate(message.items):
            if self.rng.random() < 0.1 or (room is not None and room.refused):
                results.append(msg.Failure("StepError", "drawn"))
                continue
            values = [self.value(port, item, position, message, room) for port in range(len(ports))]
            results.append(msg.Given(tuple(values)))
        self.say(worker, arena, msg.Done(message.dispatch, tuple(results), 1.0, 1, 0))

    def value(self, port: int, item: msg.Item, position: int, message: msg.Run, room: msg.Room | None) -> msg.Value:
        draw = self.rng.random()
        passed = [value for value in item.inputs if value.place is not None]
        if self.deadly and draw < 0.005:
            return msg.Value("bytes", place=Place(1, 0, 1 << 17, 0, 1))  # memory it does not hold
        if draw < 0.3 and passed:
            return self.rng.choice(passed)
        if port in message.room and draw < 0.7:
            block = message.room[port]
            size = block.size_bytes // len(message.items)
            return msg.Value("bytes", place=block.place(position * size, size))
        if room is not None and room.blocks and draw < 0.9:
            return msg.Value("bytes", place=room.blocks[0].place(0, 20_000))
        return msg.Value("bytes", data=b"y")

    def on_round(self, worker: int, arena: int) -> None:
        """A streaming worker does a round: pieces for some items, the end for others."""
        if self.arena_of.get(worker) != arena or not self.streams.get(worker):
            return
        step = self.streams[worker][0][0]
        pieces = []
        for entry in [e for e in self.streams[worker] if e[0] == step]:
            item = entry[1]
            if (step, item.id) in self.cancelled.get(worker, set()):
                self.streams[worker].remove(entry)
                pieces.append(msg.PieceOf(item.id, {}, True, msg.Failure("RequestCancelled", "dropped")))
            elif self.rng.random() < 0.4:
                self.streams[worker].remove(entry)
                outputs = {i: msg.Value("bytes", data=b"z") for i in range(len(self.plan.steps[step].outputs))}
                failed = msg.Failure("StepError", "drawn") if self.rng.random() < 0.1 else None
                pieces.append(msg.PieceOf(item.id, {} if failed else outputs, True, failed))
            else:
                pieces.append(msg.PieceOf(item.id, {0: msg.Value("text", data=b"z")}))
        self.say(worker, arena, msg.Pieces(step, tuple(pieces), 1.0))
        if self.streams[worker]:
            self.later(("round", worker, arena))

    def say(self, worker: int, arena: int, message: msg.FromWorker) -> None:
        if self.arena_of.get(worker) == arena:
            self.seen.add(type(message).__name__)
            self.tell(ev.FromWorker(worker, arena, message))

    # what the scheduler asks for

    def obey(self, commands: list[ev.Command]) -> None:
        for command in commands:
            self.seen.add(type(command).__name__)
            match command:
                case ev.StartWorker():
                    self.arena_of[command.worker] = command.arena
                    self.cancelled[command.worker] = set()
                    self.later(("hello", command.worker, command.arena))
                case ev.KillWorker():
                    self.later(("die", command.worker, self.arena_of.get(command.worker, -1)))
                case ev.Finish():
                    self.end(command.request, "ok")
                    self.owed.add(command.request)
                    self.later(("deliver", command.request), 10)
                case ev.Fail():
                    self.end(command.request, command.error)
                case ev.Refuse():
                    self.refused.add(command.request)
                case ev.Send():
                    self.send(command.worker, command.message)

    def send(self, worker: int, message: msg.ToWorker) -> None:
        arena = self.arena_of.get(worker, -1)
        match message:
            case msg.Run():
                for item in message.items:
                    for value in item.inputs:
                        if value.place is not None and not self.scheduler.ledger.holds(value.place):
                            raise AssertionError(f"item {item.id} was sent memory that is not leased")
                self.later(("work", worker, arena, message))
            case msg.Submit():
                fresh = not self.streams.get(worker)
                self.streams.setdefault(worker, []).extend((message.step, item) for item in message.items)
                if fresh:
                    self.later(("round", worker, arena))
            case msg.Cancel():
                self.cancelled[worker] |= {(message.step, item) for item in message.items}
            case msg.Room():
                waiting = self.waiting_room.pop(worker, None)
                if waiting is not None and waiting[1] == arena:
                    # later, as a worker's answer always is: never inside the scheduler's own turn
                    self.at(self.now, ("resume", worker, arena, waiting[0], message))

    def on_resume(self, worker: int, arena: int, message: msg.Run, room: msg.Room) -> None:
        if self.arena_of.get(worker) == arena:
            self.finish(worker, arena, message, room)

    def end(self, request: int, how: str) -> None:
        if request in self.ended or request in self.refused:
            raise AssertionError(f"request {request} ended twice: {self.ended.get(request)} and {how}")
        self.ended[request] = how

    # what must hold

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.ledger.check()
        c = scheduler.counters
        total = c.ok + c.failed + c.cancelled + c.expired + scheduler.open_requests
        if c.admitted != total:
            raise AssertionError(f"{c.admitted} admitted, {total} accounted for")

    def check_rest(self) -> None:
        scheduler = self.scheduler
        left = scheduler.ledger.stats()
        if scheduler.open_requests or left.blocks or any(scheduler.queued.values()) or not scheduler.idle():
            raise AssertionError(f"still held at the end: {scheduler.open_requests} open, {left}, {scheduler.queued}")
        if len(self.ended) + len(self.refused) != 30:
            raise AssertionError(f"{len(self.ended)} ended, {len(self.refused)} refused, of 30")


def as_block(place: Place) -> Block:
    return Block(place.arena, place.block, place.size_bytes, place.generation)


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        World(seed).run()
        print(f"seed {seed} holds")
