"""A made-up world around the real scheduler: random plans, workers that are slow, fail, ask for room, wedge and die.

Everything is drawn from one seed and happens in virtual time, so a failing seed can be replayed:

    python -m tests.engine.simulation SEED...          replay these
    python -m tests.engine.simulation --seeds 100000   a night's worth, in all processes of the machine

After every event the invariants are checked: each admitted request is in exactly one state and the ledger tiles its
arenas; whatever is sent is checked as a worker would wish it; and when everything has ended nothing is leased, queued,
timed or held.
"""

from __future__ import annotations

import argparse
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from heapq import heappop, heappush
from itertools import count

import msgspec

from tests.engine.device_world import UNSEEN, UNSEEN_AND_BEGUN, DeviceWorld, with_devices
from tests.engine.idle_world import IdleWorld, with_idleness
from tests.engine.kv_world import KvWorld, with_memory
from tests.engine.option_world import with_options
from tests.engine.program_world import KILLS_STREAMING_MAX as KILLS_SHARED_MAX
from tests.engine.program_world import ProgramWorld
from tests.engine.scheduler_harness import any_type
from tests.engine.timed_world import TimedWorld, with_timeouts
from tests.engine.worlds import WORKER_ARENA_BYTES, random_plan
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import request as requests_module
from weftline.engine.scheduler import request_table
from weftline.engine.scheduler import sleep_state as rest
from weftline.engine.scheduler import workers as supervisor
from weftline.engine.scheduler.request import Request
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.engine.scheduler.workers import WorkerState
from weftline.errors import LimitReached, SessionClosed
from weftline.nodes.urgency import SequencePart
from weftline.shm.block import INLINE_BYTES_MAX, Block, Place
from weftline.testing.clock import ManualClock

REQUESTS = 30
EVENTS_MAX = 40_000
LISTED = 16
"""In one of so many worlds most steps return lists or map over them."""

KILLS_MAX = 4
"""Most workers a killer may take along: log2 of the largest batch, 8, and one."""

KILLS_STREAMING_MAX = 5
"""The same where a worker takes in all that there is, which is 12 requests."""

ITS_OWN = frozenset(
    {"open", "attach", "beat", "resize", "rest", "woken", "work", "finish", "release", "settle", "fetch", "fetched"}
    | {"round", "buffer", "took"}
)
"""What a worker does itself, and does not when it hangs; all else befalls it."""

WHILE_ENDLESS = frozenset({"beat", "release"})
"""What threads of their own do for a worker that runs a batch for ever."""

TABLES = {"request": requests_module.TRANSITIONS, "worker": supervisor.TRANSITIONS, "rest": rest.TRANSITIONS}


class World:
    """Drives one scheduler through random requests and checks it all the way."""

    def __init__(self, seed: int, requests: int = REQUESTS) -> None:
        self.rng = random.Random(seed)
        plan = with_timeouts(random_plan(self.rng, listed=seed % LISTED == LISTED - 1), seed)
        self.plan = with_options(with_devices(with_idleness(with_memory(plan, seed), seed), seed), seed)
        self.idle = IdleWorld(seed)
        self.kv = KvWorld(self.plan, seed)
        self.gpus = DeviceWorld(self.plan, seed)
        self.scheduler = Scheduler(self.plan, seed)
        any_type(self.scheduler)
        self.programs = ProgramWorld(self.plan, seed, self.scheduler)
        self.timed = TimedWorld(self.plan, seed, self.programs)
        self.clock = ManualClock()
        self.requests = requests
        self.todo: list[tuple[float, int, tuple[object, ...]]] = []
        self.order = count()
        self.ended: dict[int, str] = {}
        self.refused: set[int] = set()
        self.seen: set[str] = set()
        self.moves: set[tuple[str, str, str]] = set()
        self.arena_of: dict[int, int] = {}
        self.ready: set[int] = set()
        self.condemned: set[tuple[int, int]] = set()  # incarnations that are to be killed
        self.wedged: set[int] = set()  # silent: no beats either
        self.endless: set[int] = set()  # at a batch for ever, and their hearts beat
        self.loads_until: dict[int, float] = {}  # silent, until they have woken a step
        self.inbox: dict[int, list[msg.RunBatch]] = {}
        self.waiting_for_buffer: dict[int, msg.RunBatch] = {}
        self.waiting_device: set[int] = set()
        self.fetching: dict[int, msg.Fetch] = {}  # which waits for room
        self.cancelled: dict[int, set[int]] = {}
        self.paused: dict[int, set[int]] = {}
        self.streams: dict[int, list[tuple[int, msg.Item]]] = {}
        self.chains: dict[int, dict[int, msg.Chain]] = {}
        self.taken_back: set[int] = set()
        self.given: dict[int, int] = {}  # pieces that a streaming item has given
        self.fed: dict[int, int] = {}  # pieces that an item was fed; -1 when it has the whole
        self.late = random.Random(seed)
        self.stale = 0  # messages of incarnations that were gone
        self.last_said: dict[int, msg.FromWorker] = {}
        self.hears_together = self.rng.random() < 0.3
        self.unsaid: list[ev.Event] = []  # messages of workers, delivered with the next ones
        self.sequence_of: dict[tuple[int, str], int] = {}  # (step, sequence) -> worker
        self.deadly = self.rng.random() < 0.4
        self.doomed = -1  # a worker that never comes up
        if self.deadly and self.rng.random() < 0.4:
            self.doomed = self.rng.randrange(max(1, len(self.plan.workers)))
        self.killers: dict[int, int] = {}  # request -> step that it kills
        self.kills: dict[int, int] = {}
        if not self.deadly and self.rng.random() < 0.4:
            for request in self.rng.sample(range(1, requests + 1), 2):
                self.killers[request] = self.rng.randrange(len(self.plan.steps))
        self.sequenced = any(step.sequence for step in self.plan.steps)
        if self.plan.budgets:
            self.at(seed % 2000, ("left",))
        latest = 20_000 if self.doomed >= 0 else 200  # some come when a worker has been given up
        latest = max(latest, 4000) if self.timed.on else latest  # and some when nothing else is to do
        alone = list(range(1, requests + 1))
        while self.rng.random() < 0.3 and len(alone) > 8:  # rows of a job that come together
            rows = self.rng.randint(1, 8)
            self.at(self.rng.uniform(5, 200), ("together", tuple(alone[:rows])))
            alone = alone[8:] + alone[rows:8]
        for request in alone:
            self.at(self.rng.uniform(5, latest if request % 2 else 200), ("submit", request))
        for when, how in self.programs.times():
            self.at(when, ("programs", how))

    @property
    def now(self) -> float:
        return self.clock.now_ms()

    def at(self, when: float, what: tuple[object, ...]) -> None:
        heappush(self.todo, (when, next(self.order), what))

    def later(self, what: tuple[object, ...], most: float = 20.0) -> None:
        self.at(self.now + self.rng.uniform(0.01, most), what)

    def run(self) -> None:
        """Run until nothing is left to happen, then look for anything still held."""
        self.watch()
        try:
            self.obey(self.scheduler.start(self.now))
            for _ in range(EVENTS_MAX):
                if self.at_rest():
                    break
                wake = self.scheduler.wake_at_ms()
                if wake is not None and (not self.todo or wake <= self.todo[0][0]):
                    self.clock.advance(max(0.0, wake - self.now))
                    self.tell(ev.Tick())
                    continue
                if not self.todo:
                    raise AssertionError("requests are open and nothing will ever happen")
                when, _, what = heappop(self.todo)
                self.clock.advance(max(0.0, when - self.now))
                if what[0] in ITS_OWN and self.hangs(what):
                    continue
                getattr(self, f"on_{what[0]}")(*what[1:])
            else:
                raise AssertionError("the simulation does not come to rest")
            self.check_rest()
        finally:
            self.unwatch()

    def hangs(self, what: tuple[object, ...]) -> bool:
        """Whether a worker does not do what it would do now: never, or not before it has woken a step."""
        worker = what[1]
        if worker in self.wedged or (worker in self.endless and what[0] not in WHILE_ENDLESS):
            return True
        if worker in self.loads_until and what[0] != "woken":
            self.at(self.loads_until[worker], what)  # type: ignore[index]
            return True
        return False

    def at_rest(self) -> bool:
        settled = len(self.ended) + len(self.refused) == self.requests
        return (
            settled
            and self.scheduler.idle()
            and not self.unsaid
            and self.gpus.quiet()
            and self.programs.quiet()
            and not any(what[0] == "programs" for _, _, what in self.todo)
            and not any(what[0] == "deliver" for _, _, what in self.todo)
        )

    def watch(self) -> None:
        """Note which entries of the state tables are used."""
        self.own_moves = Request.move, WorkerState.move
        for table, cls, move in (("request", Request, Request.move), ("worker", WorkerState, WorkerState.move)):

            def noted(one: Request | WorkerState, event: str, table: str = table, move: object = move) -> None:
                self.moves.add((table, one.state, event))
                move(one, event)  # type: ignore[operator]

            cls.move = noted  # type: ignore[assignment]
        self.own_rest = rest.SleepState.move

        def rested(one: rest.SleepState, step: int, event: str) -> None:
            self.moves.add(("rest", one.state(step), event))
            self.own_rest(one, step, event)

        rest.SleepState.move = rested  # type: ignore[method-assign]

    def unwatch(self) -> None:
        Request.move, WorkerState.move = self.own_moves  # type: ignore[method-assign]
        rest.SleepState.move = self.own_rest  # type: ignore[method-assign]

    def tell(self, event: ev.Event) -> None:
        self.seen.add(type(event).__name__)
        events, self.unsaid = [*self.unsaid, event], []
        for one in events:
            if isinstance(one, ev.FromWorker) and isinstance(one.message, msg.AttachFailed):
                self.gpus.on_message(one.worker, one.message)
        commands = self.scheduler.on_all(events, self.now)
        for one in events:
            if isinstance(one, ev.OpenProgram):
                self.programs.opened(one)
                any_type(self.scheduler)
            if isinstance(one, ev.Submitted | ev.GroupSubmitted):
                rows = (one,) if isinstance(one, ev.Submitted) else one.rows
                refused = {command.request for command in commands if isinstance(command, ev.Refuse)}
                for row in rows:
                    self.programs.submitted(row.request, row.request in refused)
        self.obey(commands)
        self.check()

    def on_programs(self, how: str) -> None:
        """Open, reload or retire a program."""
        for event in self.programs.events(how):
            self.tell(event)

    # what callers do

    def on_submit(self, request: int) -> None:
        event = self.made_up(request, self.programs.pick(), job=self.rng.random() < 0.1)
        if event is not None:
            self.timed.submitted(event)
            self.tell(event)
            self.think_again(request)

    def on_together(self, requests: tuple[int, ...]) -> None:
        program = self.programs.pick()
        rows = [row for request in requests if (row := self.made_up(request, program, job=True)) is not None]
        for row in rows:
            self.timed.submitted(row)
        self.tell(ev.GroupSubmitted(tuple(rows)))
        for row in rows:
            self.think_again(row.request)

    def made_up(self, request: int, program: int, job: bool) -> ev.Submitted | None:
        """Return a request; None when there is no room for its inputs."""
        rng, inputs = self.rng, {}
        plan = self.programs.submits(request, program)
        for given in self.plan.inputs:
            if given.optional and rng.random() < 0.4:
                inputs[given.name] = msg.ABSENT
            elif given.type == "json":
                inputs[given.name] = self.json()
            elif rng.random() < 0.5:
                inputs[given.name] = msg.Value("bytes", data=b"x")
            else:
                try:
                    block = self.scheduler.try_reserve([INLINE_BYTES_MAX + 1], program=program)[0]
                except (LimitReached, SessionClosed):
                    self.scheduler.give_up([as_block(value.place) for value in inputs.values() if value.place])
                    self.refused.add(request)
                    return None
                inputs[given.name] = msg.Value("bytes", place=block.place(0, INLINE_BYTES_MAX + 1))
        names = [output.name for output in plan.outputs]
        wanted = None if rng.random() < 0.7 else tuple(rng.sample(names, rng.randint(1, len(names))))
        deadline = self.now + rng.uniform(5, 300) if rng.random() < 0.3 else None
        priority = rng.choice((-100, 0, 0, 0, 100))
        sequence = None
        if self.sequenced and rng.random() < 0.9:
            sequence = SequencePart(f"q{rng.randrange(4)}", rng.random() < 0.5, rng.random() < 0.2)
        pieces = rng.random() < 0.5
        seed = request if job else None
        return ev.Submitted(
            request=request, inputs=inputs, wanted=wanted, deadline_ms=deadline, priority=priority, sequence=sequence,
            pieces=pieces, job=job, seed=seed, program=program,
        )  # fmt: skip

    def think_again(self, request: int) -> None:
        """A caller may withdraw what it has brought, or read slowly."""
        if self.rng.random() < 0.2:
            self.later(("withdraw", request), 60)
        if self.rng.random() < 0.1:
            self.later(("stall", request), 60)

    def on_withdraw(self, request: int) -> None:
        self.tell(ev.Withdrawn(request))

    def on_stall(self, request: int) -> None:
        self.tell(ev.Stalled(request))
        if self.rng.random() < 0.7:
            self.later(("resume", request), 200)

    def on_resume(self, request: int) -> None:
        self.tell(ev.Resumed(request))

    def on_deliver(self, request: int) -> None:
        self.tell(ev.Delivered(request))

    def on_left(self) -> None:
        self.tell(self.kv.left())

    # what workers do

    def on_hello(self, worker: int, arena: int) -> None:
        if self.arena_of.get(worker) != arena:
            return
        if worker == self.doomed:
            self.on_die(worker, arena)
            return
        self.say(worker, arena, msg.Hello(1, WORKER_ARENA_BYTES))
        up = self.gpus.up(worker)
        if up is not None:
            self.say(worker, arena, up)
        self.later(("die" if self.deadly and self.rng.random() < 0.1 else "open", worker, arena))

    def on_open(self, worker: int, arena: int) -> None:
        if self.arena_of.get(worker) != arena:
            return
        own = [step.name for step in self.plan.steps if worker in step.workers]
        self.say(worker, arena, msg.OpenProgress(own[0], "opening", 0.5))
        if self.deadly and self.rng.random() < 0.05:
            self.say(worker, arena, msg.OpenFailed(own[0], msg.Failure("ModelError", "drawn")))
            self.later(("die", worker, arena))
            return
        self.ready.add(worker)
        warm_ms = {name: 2.0 for name in own if self.rng.random() < 0.3}
        self.say(worker, arena, msg.Ready({}, {} if self.timed.on else warm_ms))
        self.at(self.now + 1000 * msg.BEAT_S, ("beat", worker, arena))
        self.at(self.now + self.gpus.attach_ms(), ("attach", worker, arena))
        if self.deadly and self.rng.random() < 0.3:
            self.later(("die", worker, arena), 300)

    def on_attach(self, worker: int, arena: int) -> None:
        """Attach the arenas announced to a worker."""
        if self.arena_of.get(worker) == arena and worker in self.ready:
            for message in self.gpus.tell(worker):
                self.say(worker, arena, message)

    def on_beat(self, worker: int, arena: int) -> None:
        if self.arena_of.get(worker) == arena:
            self.say(worker, arena, self.kv.beat(worker))
            self.at(self.now + 1000 * msg.BEAT_S, ("beat", worker, arena))

    def on_resize(self, worker: int, arena: int, message: msg.KvResize) -> None:
        if self.arena_of.get(worker) == arena:
            self.say(worker, arena, self.kv.resize(worker, message))
            self.kv.check()

    def on_rest(self, worker: int, arena: int, message: msg.Sleep | msg.Wake | msg.Close) -> None:
        """Execute a sleep, wake or leave command in a worker."""
        if self.arena_of.get(worker) != arena:
            return
        match message:
            case msg.Sleep():
                self.kv.sleep(worker, message.step)
                self.say(worker, arena, self.idle.slept(message))
            case msg.Wake() if self.deadly and self.idle.hangs():
                self.wedged.add(worker)
            case msg.Wake():
                self.say(worker, arena, msg.OpenProgress(self.plan.steps[message.step].name, "waking", 0.0))
                self.loads_until[worker] = self.now + self.idle.load_ms()
                self.at(self.loads_until[worker], ("woken", worker, arena, message))
            case msg.Close():
                self.on_die(worker, arena)

    def on_woken(self, worker: int, arena: int, message: msg.Wake) -> None:
        if self.arena_of.get(worker) == arena:
            del self.loads_until[worker]
            self.kv.wake(worker, message.step)
            self.say(worker, arena, self.idle.awake(worker, message))

    def on_die(self, worker: int, arena: int) -> None:
        if self.arena_of.get(worker) != arena:
            return
        running = self.items_of(worker)
        for held in (
            self.arena_of,
            self.inbox,
            self.waiting_for_buffer,
            self.fetching,
            self.streams,
            self.chains,
            self.cancelled,
            self.paused,
        ):
            held.pop(worker, None)  # type: ignore[attr-defined]
        blurred = self.hears_together or (worker, arena) in self.condemned
        self.programs.died(None if blurred else running, self.now)
        self.programs.options.start(worker)
        self.kv.die(worker)
        self.gpus.die(worker)
        self.waiting_device.discard(worker)
        self.ready.discard(worker)
        self.wedged.discard(worker)
        self.endless.discard(worker)
        self.loads_until.pop(worker, None)
        self.sequence_of = {key: who for key, who in self.sequence_of.items() if who != worker}
        self.tell(ev.WorkerDied(worker, arena, "signal 9"))
        if self.rng.random() < 0.3:  # and once more, and something it said, late
            self.tell(ev.WorkerDied(worker, arena, "signal 9"))
            self.tell(ev.FromWorker(worker, arena, msg.BatchDone(1, (), ())))
            self.stale += 2
            said = self.last_said.get(worker)
            if said is not None:  # and what it had said last, when another one may stand in its place
                self.at(self.now + self.late.uniform(0.01, 1000), ("late", worker, arena, said))

    def on_late(self, worker: int, arena: int, said: msg.FromWorker) -> None:
        self.stale += 1
        self.tell(ev.FromWorker(worker, arena, said))

    def start_work(self, worker: int, arena: int) -> None:
        """Let a worker begin the first dispatch that it has."""
        message = self.inbox[worker][0]
        if self.timed.on:
            chain = self.chains[worker].get(message.chain) if message.chain else None
            self.at(self.now + self.timed.takes_ms(message, chain), ("work", worker, arena))
        else:
            self.later(("work", worker, arena))

    def on_work(self, worker: int, arena: int) -> None:
        """A worker runs the first dispatch it has: it answers, asks for room first, wedges, or dies of it."""
        if self.arena_of.get(worker) != arena or not self.inbox.get(worker):
            return
        if worker in self.waiting_for_buffer or worker in self.waiting_device:
            return
        if worker in self.fetching:
            self.later(("work", worker, arena))
            return
        self.on_attach(worker, arena)
        if self.arena_of.get(worker) != arena:
            return
        message = self.inbox[worker][0]
        if message.suspect:
            digests = tuple(bytes([self.request_of(item.id) % 256]) for item in message.items)
            self.say(worker, arena, msg.Suspected(message.dispatch, digests))
        if self.dies_of(worker, arena, message.step, [item.id for item in message.items]):
            return
        if self.gpus.strikes(message):
            self.on_die(worker, arena)
            return
        if self.deadly and self.rng.random() < 0.01:
            hung = self.wedged if self.rng.random() < 0.5 else self.endless
            hung.add(worker)
            return
        if self.rng.random() < 0.3:
            self.waiting_for_buffer[worker] = message
            huge = self.rng.random() < 0.05
            self.say(worker, arena, msg.BufferRequest(((1 << 20) if huge else 20_000,), self.gpus.need(worker)))
            return
        self.finish(worker, arena, message, None)

    def request_of(self, task: int) -> int:
        held = self.scheduler.state.live.get(task)
        return held.request.id if held is not None else 0

    def dies_of(self, worker: int, arena: int, step: int, tasks: list[int]) -> bool:
        for task in tasks:
            request = self.request_of(task)
            if self.killers.get(request) == step:
                self.kills[request] = self.kills.get(request, 0) + 1
                self.on_die(worker, arena)
                return True
        return False

    def on_finish(self, worker: int, arena: int, message: msg.RunBatch, buffer: msg.OutputBuffer | None) -> None:
        if self.arena_of.get(worker) == arena:
            self.waiting_device.discard(worker)
            self.finish(worker, arena, message, buffer)

    def finish(self, worker: int, arena: int, message: msg.RunBatch, buffer: msg.OutputBuffer | None) -> None:
        unfinished = self.gpus.leaves_unfinished(message)
        if not unfinished and self.gpus.waits(worker, "run", message.dispatch):  # for its device, and that for another
            self.waiting_device.add(worker)
            self.later(("finish", worker, arena, message, buffer))
            return
        self.inbox[worker].pop(0)
        if self.rng.random() < 0.01:  # an answer to something else first: the scheduler kills it for that
            self.say(worker, arena, msg.BatchDone(message.dispatch + 1000, (), ()))
            return
        chain = self.chains[worker][message.chain] if message.chain else None
        stages = chain.stages if chain else (msg.Stage(message.step, ()),)
        results: list[msg.ItemResult | msg.Failure] = []
        for position, item in enumerate(message.items):
            if not self.gpus.sees(worker, item):
                results.append(self.unseen(message.step, item, [stage.step for stage in stages] if chain else []))
                continue
            if self.rng.random() < 0.1 or (buffer is not None and buffer.refused):
                results.append(msg.Failure("StepError", "drawn", self.rng.randrange(len(stages))))
                continue
            ports = chain.returns if chain else [(0, at) for at in range(len(self.plan.steps[message.step].outputs))]
            results.append(
                msg.ItemResult(
                    tuple(
                        self.value(stages[s].step, at, item, position, message, buffer, unfinished) for s, at in ports
                    )
                )
            )
        ran = tuple(msg.StepRun(self.rng.uniform(0.1, 3.0), 1, len(message.items)) for _ in stages)
        short = self.rng.random() < 0.02
        if self.timed.on:
            ran = self.timed.ran(message, chain)
            if not short:
                self.timed.learned(message, self.now)
        if unfinished:
            self.gpus.left_unfinished(worker, message)
            self.later(("release", worker, arena, message.dispatch), self.gpus.release_ms)
            if self.gpus.falls():
                self.later(("die", worker, arena), 40)
        else:
            self.gpus.ended(worker, "run", message.dispatch)
        out_of_memory = len(message.items) if short else 0
        self.say(worker, arena, msg.BatchDone(message.dispatch, tuple(results), ran, 0, out_of_memory, unfinished))
        if self.rng.random() < 0.02:  # the same once more
            self.say(worker, arena, msg.BatchDone(message.dispatch, tuple(results), ran))
        if self.inbox.get(worker):
            self.start_work(worker, arena)

    def on_release(self, worker: int, arena: int, dispatch: int) -> None:
        """A device has done what its worker left unfinished, unless that waits for others."""
        if self.arena_of.get(worker) != arena:
            return
        if not self.gpus.fire(worker, dispatch):
            self.later(("release", worker, arena, dispatch))
            return
        wrong = 1000 if self.gpus.rng.random() < 0.01 else 0
        self.say(worker, arena, msg.Released((dispatch + wrong,)))

    def on_settle(self, worker: int, arena: int, token: int) -> None:
        if self.arena_of.get(worker) == arena:
            self.gpus.settle(token)
            self.say(worker, arena, msg.Settled(token))

    def unseen(self, step: int, item: msg.Item, chain: list[int]) -> msg.Failure:
        """Return the reply for an unreadable item; it is retried elsewhere if no output of it exists."""
        task = self.scheduler.state.live.get(item.id)
        begun = (task is not None and task.streamed) or not all(self.plan.steps[one].idempotent for one in chain)
        return msg.Failure("StepError", UNSEEN_AND_BEGUN if begun else UNSEEN)

    def on_fetch(self, worker: int, arena: int, message: msg.Fetch) -> None:
        """A worker copies what others cannot see: it asks for room, and answers when the device is done with it."""
        if self.arena_of.get(worker) != arena:
            return
        busy = worker in self.waiting_for_buffer or worker in self.waiting_device or worker in self.fetching
        if busy or self.gpus.waits(worker, "fetch", message.token):
            self.later(("fetch", worker, arena, message))
            return
        self.fetching[worker] = message
        self.say(worker, arena, msg.BufferRequest(tuple(value.size_bytes for value in message.values)))

    def on_fetched(self, worker: int, arena: int, buffer: msg.OutputBuffer) -> None:
        if self.arena_of.get(worker) != arena or worker not in self.fetching:
            return
        message = self.fetching.pop(worker)
        self.gpus.ended(worker, "fetch", message.token)
        wrong = 1000 if self.gpus.rng.random() < 0.01 else 0
        values = tuple(
            msg.Value(value.kind, value.dtype, value.shape, place=block.place(0, value.size_bytes))
            for value, block in zip(message.values, buffer.blocks)
        )
        self.say(worker, arena, msg.Fetched(message.token + wrong, values, buffer.refused))

    def json(self) -> msg.Value:
        return msg.Value("json", data=msgspec.msgpack.encode(self.rng.random() < 0.5))

    def value(
        self,
        step: int,
        port: int,
        item: msg.Item,
        position: int,
        message: msg.RunBatch,
        buffer: msg.OutputBuffer | None,
        unfinished: bool = False,
    ) -> msg.Value:
        type = self.plan.steps[step].outputs[port].type
        if type.kind == "list":
            each = [
                self.gpus.value(step, port, message, position, buffer, unfinished)
                or self.leaf(step, port, item, position, message, buffer)
                for _ in range(self.rng.choice((0, 1, 2, 6)))
            ]
            return msg.Value("list", items=tuple(each))
        if type.kind == "json":
            return self.json()
        on_device = self.gpus.value(step, port, message, position, buffer, unfinished)
        return on_device or self.leaf(step, port, item, position, message, buffer)

    def leaf(
        self,
        step: int,
        port: int,
        item: msg.Item,
        position: int,
        message: msg.RunBatch,
        buffer: msg.OutputBuffer | None,
    ) -> msg.Value:
        draw = self.rng.random()
        passed = [value for value in item.inputs if value.place is not None or value.device_place is not None]
        if self.deadly and draw < 0.005:
            return msg.Value("bytes", place=Place(1, 0, 1 << 17, 0, 1))  # memory it does not hold
        if draw < 0.3 and passed:
            return self.rng.choice(passed)
        if port in message.output_blocks and draw < 0.7:
            block = message.output_blocks[port]
            size = block.size_bytes // len(message.items)
            return msg.Value("bytes", place=block.place(position * size, size))
        if buffer is not None and buffer.blocks and draw < 0.9:
            return msg.Value("bytes", place=buffer.blocks[0].place(0, 20_000))
        return msg.Value("bytes", data=self.programs.tag(item.id))

    def on_round(self, worker: int, arena: int) -> None:
        """A streaming worker does a round: pieces for some items, the end for others."""
        held = self.streams.get(worker)
        if self.arena_of.get(worker) != arena or not held:
            return
        if worker in self.waiting_device or worker in self.fetching:  # it does one thing at a time
            self.later(("round", worker, arena))
            return
        self.on_attach(worker, arena)
        if self.arena_of.get(worker) != arena:
            return
        step = next((step for step, item in held if item.id not in self.paused[worker]), held[0][0])
        if self.dies_of(worker, arena, step, [item.id for s, item in held if s == step]):
            return
        pieces = []
        for entry in [entry for entry in held if entry[0] == step]:
            item, ports = entry[1], self.plan.steps[step].outputs
            if item.id in self.cancelled[worker]:
                held.remove(entry)
                pieces.append(msg.OutputChunk(item.id, {}, True, msg.Failure("RequestCancelled", "dropped")))
            elif not self.gpus.sees(worker, item):
                held.remove(entry)
                pieces.append(msg.OutputChunk(item.id, {}, True, self.unseen(step, item, [])))
            elif item.id in self.paused[worker] or self.gpus.waits(worker, "item", item.id):
                continue
            elif self.rng.random() < (0.4 if self.fed.get(item.id, -1) < 0 else 0.1):  # a few end before their input
                held.remove(entry)
                run = msg.RunBatch(0, step, (item,))
                outputs = {at: self.value(step, at, item, 0, run, None) for at in range(len(ports))}
                failed = msg.Failure("StepError", "drawn") if self.rng.random() < 0.1 else None
                pieces.append(msg.OutputChunk(item.id, {} if failed else outputs, True, failed))
            else:
                count = self.given[item.id]
                self.given[item.id] = count + 1
                pieces.append(msg.OutputChunk(item.id, {0: msg.Value("text", data=str(count).encode())}))
        for piece in pieces:
            if piece.last:
                self.gpus.ended(worker, "item", piece.item)
        self.say(worker, arena, msg.OutputChunks(step, tuple(pieces), 1.0))
        if self.streams.get(worker):
            self.later(("round", worker, arena))

    def say(self, worker: int, arena: int, message: msg.FromWorker) -> None:
        if self.arena_of.get(worker) == arena:
            self.seen.add(type(message).__name__)
            self.last_said[worker] = message
            event = ev.FromWorker(worker, arena, message)
            if self.hears_together and self.rng.random() < 0.4:
                self.unsaid.append(event)
                self.at(self.now + 0.5, ("hear",))
            else:
                self.tell(event)

    def on_hear(self) -> None:
        """Deliver delayed messages that were not yet delivered with another event."""
        if self.unsaid:
            self.tell(self.unsaid.pop())

    # what the scheduler asks for

    def obey(self, commands: list[ev.Command]) -> None:
        sent = [command.message for command in commands if isinstance(command, ev.Send)]
        self.taken_back = {item for message in sent if isinstance(message, msg.CancelItems) for item in message.items}
        for command in commands:
            self.seen.add(type(command).__name__)
            match command:
                case ev.StartWorker():
                    worker = command.worker
                    self.arena_of[worker] = command.arena
                    self.inbox[worker], self.streams[worker], self.chains[worker] = [], [], {}
                    self.cancelled[worker], self.paused[worker] = set(), set()
                    self.kv.start(worker)
                    self.idle.start(worker)
                    self.gpus.start(worker)
                    self.programs.options.start(worker)
                    self.later(("hello", worker, command.arena))
                case ev.ShareArena():
                    self.gpus.share(command.worker, command.arena)
                    for other, incarnation in self.arena_of.items():
                        self.at(self.now + self.gpus.attach_ms(), ("attach", other, incarnation))
                case ev.KillWorker():
                    if command.worker in self.loads_until and "no heartbeat" in command.why:
                        raise AssertionError(f"worker {command.worker} is taken for lost and wakes a step")
                    self.gpus.condemn(command.worker)
                    self.condemned.add((command.worker, self.arena_of.get(command.worker, -1)))
                    self.later(("die", command.worker, self.arena_of.get(command.worker, -1)))
                case ev.Finish():
                    self.programs.check_end(command, self.now)
                    self.end(command.request, "ok")
                    self.later(("deliver", command.request), 10)
                case ev.Fail():
                    self.programs.check_end(command, self.now)
                    self.end(command.request, command.error)
                    if command.message == UNSEEN:
                        raise AssertionError(f"request {command.request} failed of memory that its worker cannot see")
                case ev.OpenIngress():
                    self.programs.ingress(command.arena)
                case ev.ProgramEnded():
                    self.programs.ended(command.program, {item for one in self.arena_of for item in self.items_of(one)})
                case ev.ReturnMemory():
                    self.programs.returned(command, self.arena_of)
                case ev.Refuse():
                    self.programs.check_end(command, self.now)
                    queued = any(self.scheduler.queued.values())
                    self.timed.check_refused(command, not queued and not any(self.inbox.values()))
                    self.refused.add(command.request)
                case ev.Send():
                    self.send(command.worker, command.message)

    def send(self, worker: int, message: msg.ToWorker) -> None:
        arena = self.arena_of.get(worker, -1)
        self.seen.add(type(message).__name__)
        if isinstance(message, msg.RunBatch | msg.Submit):
            self.check_items(worker, message)
        match message:
            case msg.RunBatch():
                self.programs.dispatched(message.dispatch)
                self.gpus.sent(worker, message)
                self.inbox[worker].append(message)
                if len(self.inbox[worker]) > 2:
                    raise AssertionError("more than two dispatches with one worker")
                if len(self.inbox[worker]) == 1:
                    self.start_work(worker, arena)
            case msg.DropChains():
                if any(run.chain in message.chains for run in self.inbox.get(worker, ())):
                    raise AssertionError(f"worker {worker} is to drop a chain that it runs")
                for chain in message.chains if worker in self.chains else ():
                    del self.chains[worker][chain]
            case msg.SetOptions() | msg.DropOptions():
                if arena >= 0:  # else it has died, and the news be under way
                    streams = [msg.Submit(step, (item,)) for step, item in self.streams.get(worker, ())]
                    self.programs.options.receive(worker, message, [*self.inbox.get(worker, ()), *streams])
            case msg.Chain():
                self.programs.chained(message)
                self.programs.options.receive(worker, message, ())
                self.chains[worker][message.id] = message
            case msg.Submit():
                self.streams[worker].extend((message.step, item) for item in message.items)
                for item in message.items:
                    self.gpus.submitted(worker, item)
                    self.given[item.id] = 0
                    if msg.PIECES in item.inputs and item.id in self.fed:
                        raise AssertionError(f"item {item.id} is retried although its input comes in chunks")
                    self.fed[item.id] = 0 if msg.PIECES in item.inputs else -1
                self.later(("round", worker, arena))
            case msg.InputChunks():
                self.check_feed(worker, message)
                self.later(("took", worker, arena, tuple(piece.item for piece in message.pieces), message.step), 100)
            case msg.Settle():
                self.gpus.asked(worker, message.token)
                if self.gpus.rng.random() < 0.95:
                    self.later(("settle", worker, arena, message.token), 200)
            case msg.UseHostOutputs():
                self.gpus.give_on_host(worker)
            case msg.Fetch():
                self.gpus.fetches(worker, message)
                self.later(("fetch", worker, arena, message))
            case msg.KvResize():
                self.later(("resize", worker, arena, message), 3000)
            case msg.Sleep() | msg.Wake() | msg.Close():
                if arena >= 0:  # else it has died, and the news be under way
                    self.idle.on_message(worker, message)
                    self.later(("rest", worker, arena, message))
            case msg.CancelItems():
                self.cancelled.get(worker, set()).update(message.items)  # it may have died, and the news be under way
            case msg.PauseItems():
                self.paused[worker].update(message.items)
            case msg.ResumeItems():
                self.paused[worker].difference_update(message.items)
            case msg.OutputBuffer():
                if worker in self.fetching:
                    self.at(self.now, ("fetched", worker, arena, message))
                    return
                running = self.waiting_for_buffer.get(worker)
                self.gpus.granted(worker, message, running.dispatch if running is not None else None)
                if running is not None:  # later, as an answer always is: never inside the scheduler's own turn
                    self.at(self.now, ("buffer", worker, arena, message))
            case msg.EndSequences():
                for id in message.sequences:
                    self.sequence_of.pop((message.step, id), None)

    def items_of(self, worker: int) -> set[int]:
        """Return the items that a worker has."""
        streams = {item.id for _, item in self.streams.get(worker, ())}
        return streams | {item.id for run in self.inbox.get(worker, ()) for item in run.items}

    def on_took(self, worker: int, arena: int, items: tuple[int, ...], step: int) -> None:
        self.say(worker, arena, msg.ChunkRead(step, items))

    def on_buffer(self, worker: int, arena: int, buffer: msg.OutputBuffer) -> None:
        if self.arena_of.get(worker) == arena and worker in self.waiting_for_buffer:
            self.finish(worker, arena, self.waiting_for_buffer.pop(worker), buffer)

    def end(self, request: int, how: str) -> None:
        if request in self.ended or request in self.refused:
            raise AssertionError(f"request {request} ended twice: {self.ended.get(request)} and {how}")
        self.ended[request] = how

    # what must hold

    def check_items(self, worker: int, message: msg.RunBatch | msg.Submit) -> None:
        if worker not in self.ready:
            raise AssertionError(f"worker {worker} was sent work and is not ready")
        if worker not in (places := self.plan.steps[message.step].workers):
            raise AssertionError(f"worker {worker} was sent step {message.step}, which is at {places}")
        chain = self.chains[worker].get(message.chain) if isinstance(message, msg.RunBatch) and message.chain else None
        self.idle.check_work(worker, tuple(stage.step for stage in chain.stages) if chain else (message.step,))
        if isinstance(message, msg.RunBatch) and message.chain and message.chain not in self.chains[worker]:
            raise AssertionError("a worker did not receive the chain it is to run")
        for item in message.items:
            self.gpus.check_sent(worker, item.inputs)
            task = self.scheduler.state.live.get(item.id)
            if task is None or task.request.state != "open":
                if item.id in self.taken_back:  # its request ended in the same turn
                    continue
                raise AssertionError(f"item {item.id} was sent although its request has ended")
            if task.deaths and not message.suspect:
                raise AssertionError(f"a worker died of item {item.id}, and it is put at risk among others")
            if task.request.deadline_ms is not None and task.request.deadline_ms <= self.now:
                raise AssertionError(f"item {item.id} was sent after its deadline")
            if task.request.route.waits_for.get(task.place, -1) not in (-1, *task.request.active_fallbacks):
                raise AssertionError(f"item {item.id} is of a fallback that is not active")
            chain_id = message.chain if isinstance(message, msg.RunBatch) else 0
            self.programs.check_item(message.step, item, task, chain_id)
            self.programs.options.check_item(worker, message, item, task)
            self.timed.check_sent(self.scheduler, message.step, item, self.now)
            for value in item.inputs:
                if not request_table.holds_all(self.scheduler.state, [value]):
                    raise AssertionError(f"item {item.id} was sent memory that is not leased")
            if item.metadata is not None and item.metadata.sequence and self.plan.steps[message.step].sequence:
                stuck = self.sequence_of.setdefault((message.step, item.metadata.sequence), worker)
                if stuck != worker and not item.metadata.start:
                    raise AssertionError(f"sequence {item.metadata.sequence} moved from worker {stuck} to {worker}")
                self.sequence_of[(message.step, item.metadata.sequence)] = worker
        self.programs.options.check_batch(worker, message)

    def check_feed(self, worker: int, message: msg.InputChunks) -> None:
        """Check that chunks arrive at the item's worker in order, none lost, and end with the whole value."""
        held = {item.id for step, item in self.streams.get(worker, ()) if step == message.step}  # none, if it has died
        for piece in message.pieces:
            if piece.item not in held:  # it has just ended, or is the business of another worker
                if piece.item in self.scheduler.state.live:
                    raise AssertionError(f"a piece for item {piece.item} came to a worker that does not have it")
                continue
            if self.fed[piece.item] < 0:
                raise AssertionError(f"item {piece.item} was fed after it had the whole")
            if piece.last:
                self.fed[piece.item] = -1
                if not request_table.holds_all(self.scheduler.state, [piece.value]):
                    raise AssertionError(f"item {piece.item} was fed memory that is not leased")
                continue
            if piece.value.data != str(self.fed[piece.item]).encode() and not self.is_condemned(piece.item):
                raise AssertionError(
                    f"item {piece.item} was fed piece {piece.value.data!r}, not {self.fed[piece.item]}"
                )
            self.fed[piece.item] = int(piece.value.data) + 1

    def is_condemned(self, item: int) -> bool:
        """Return True if the source of an item's chunks will be killed: one of its messages was dropped for that."""
        task = self.scheduler.state.live.get(item)
        source = task.stream_input.source if task is not None and task.stream_input is not None else None
        return source is not None and source.worker >= 0 and bool(self.scheduler.workers[source.worker].why)

    def check_sources(self) -> None:
        """No step works for readers that have all ended."""
        live = self.scheduler.state.live
        for task in live.values():
            request, route = task.request, task.request.route
            if task.place in request.active_fallbacks or any(route.outputs_at[slot] for slot in task.unit.returns):
                continue
            readers = [reader for slot in task.unit.returns for reader in route.readers[slot]]
            fed = [request.stream_inputs[reader].task for reader in readers if reader in request.stream_inputs]
            if readers and len(fed) == len(readers) and all(one is not None and one.id not in live for one in fed):
                raise AssertionError(f"item {task.id} is worked on for steps that have ended")

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.ledger.check()
        c = scheduler.counters
        total = c.ok + c.failed + c.cancelled + c.expired + scheduler.open_requests
        if c.admitted != total:
            raise AssertionError(f"{c.admitted} admitted, {total} accounted for")
        admissions = [one.admission for one in scheduler.state.programs.values()]
        if sum(one.requests for one in admissions) != scheduler.open_requests:
            raise AssertionError("admission has lost count")
        if c.stale < self.stale:
            raise AssertionError(f"{self.stale} messages came too late, {c.stale} are counted")
        self.check_sources()
        self.programs.check()
        self.gpus.check()
        for request, kills in self.kills.items():
            streams = self.plan.steps[self.killers[request]].streams
            most = KILLS_SHARED_MAX if self.programs.on else KILLS_STREAMING_MAX
            if kills > (most if streams else KILLS_MAX):
                raise AssertionError(f"request {request} has killed {kills} workers")

    def check_rest(self) -> None:
        scheduler = self.scheduler
        left = scheduler.ledger.stats()
        if left.blocks or left.quarantined_bytes:
            raise AssertionError(f"memory is still held at the end: {left}")
        if scheduler.open_requests or any(scheduler.queued.values()) or scheduler.state.live:
            raise AssertionError(f"still held at the end: {scheduler.open_requests} open, {left}, {scheduler.queued}")
        for queue in scheduler.state.queues:
            if queue.sequences is not None and any(one.owed for one in queue.sequences._live.values()):
                raise AssertionError(f"{queue.name}: a sequence still waits for items that will never come")
        if scheduler.state.timers.any:
            raise AssertionError(f"timers are still set: {scheduler.state.timers.at}")
        self.programs.check_returned(self.arena_of)
        self.programs.check_rest({chain for held in self.chains.values() for chain in held})
        if any(one.admission.size_bytes for one in scheduler.state.programs.values()):
            raise AssertionError("admission still counts bytes")
        if len(self.ended) + len(self.refused) != self.requests:
            raise AssertionError(f"{len(self.ended)} ended, {len(self.refused)} refused, of {self.requests}")


def as_block(place: Place) -> Block:
    return Block(place.arena, place.block, place.size_bytes, place.generation)


def replay(seed: int) -> str:
    """Run one world; return '' or what went wrong."""
    try:
        World(seed).run()
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}; replay: python -m tests.engine.simulation {seed}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="*", type=int)
    parser.add_argument("--seeds", type=int, default=0, help="run this many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    for seed in options.seed:
        World(seed).run()
        print(f"seed {seed} holds")
    failed = 0
    if options.seeds:
        with ProcessPoolExecutor() as pool:
            for done, wrong in enumerate(
                pool.map(replay, range(options.first, options.first + options.seeds), chunksize=50), 1
            ):
                if wrong:
                    failed += 1
                    print(wrong, flush=True)
                if done % 1000 == 0:
                    print(f"{done} worlds, {failed} failed", file=sys.stderr, flush=True)
        print(f"{options.seeds} worlds from seed {options.first}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
