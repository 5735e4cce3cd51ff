"""The workers as the scheduler sees them: which incarnation lives, what it is running, and when it starts again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftline.engine.crew.rest import Rest
from weftline.engine.crew.supervisor import (
    ASLEEP,
    DEAD,
    GIVEN_UP,
    LEAVING,
    READY,
    STARTING,
    TRANSITIONS,
    RestartPolicy,
    Restarts,
)
from weftline.engine.crew.unfinished import UNFINISHED_MAX, Unfinished
from weftline.engine.scheduling.request import Task
from weftline.engine.scheduling.routes import Unit
from weftline.pipelines.plan import Plan
from weftline.shm.block import Block

OPEN_MAX_MS = 1_800_000.0
"""Longest a worker may take to open its models, half an hour: a large one on a slow disk takes minutes."""

LEAVE_MAX_MS = 2_000.0
"""Longest a worker that is sent to sleep may take to close its nodes; then it is killed, which does no harm."""

LOOK_MS = 250.0
"""How often workers are looked at for silence and for calls that take too long."""


@dataclass(slots=True, eq=False)
class Dispatch:
    """Work that is with a worker: one message to it, answered by one Done.

    blocks:     every block leased beforehand: for outputs in host memory and on the worker's device, and `ready`.
    ready:      the event leased for what is given on the device.
    started_ms: when the worker could begin with it: when it was sent, or when the one before it was done.
    limit_ms:   how long it may take.
    suspect:    a worker died of these tasks before, or may have.
    """

    id: int
    unit: Unit
    tasks: list[Task]
    blocks: Sequence[Block]
    started_ms: float
    limit_ms: float
    suspect: bool = False
    ready: Block | None = None


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker. `arena` is the id of this incarnation's arena; a message that names another one is late.

    alive:    whether it has a process, by `state`, which only `move` changes.
    near_arena: id of its arena on its device, 0 for none; its events are leased as those of arena `-near_arena`.
    near_events: how many events it has.
    rung:     how that arena can be shared; '' until it has said so. See DeviceUp.
    on_host:  why nothing (more) is given there: the device shares nothing, or somebody cannot attach it; else ''.
    blind:    arenas of others on its device that it cannot attach, or of whose events it cannot open any (below 0).
    running:  what it has to do; the first is being run, a second waits so that it need not.
    unfinished: what it has answered and its device still works on, oldest first, by dispatch.
    settles:  what it was asked to settle, by token, and when.
    fetches:  what it was asked to copy to host memory, by token, and when.
    streams:  tasks of streaming steps that it holds, by id.
    needs:    sizes it waits to be given room for; `near_needs` on its device.
    granted:  blocks given for the work in hand.
    chains:   chains it has been told of.
    heard_ms: when it last said anything; `spoke_ms`: when a streaming step last said something, or was given work.
    free_ms:  when it last became free.
    figures:  what its nodes last said of themselves, by step.
    start_ms: when to start it again while it is dead.
    why:      why it is about to die, if somebody decided so.
    spared:   it is killed for another's sake: nothing is held against what it has in hand.
    rest:     its steps that are not awake.
    called:   it was asleep, and was started because somebody asked for one of its steps.
    """

    restarts: Restarts
    name: str = ""
    state: str = DEAD
    alive: bool = False
    arena: int = -1
    near_arena: int = 0
    near_events: int = 0
    rung: str = ""
    on_host: str = ""
    blind: set[int] = field(default_factory=set)
    running: list[Dispatch] = field(default_factory=list)
    unfinished: dict[int, Unfinished] = field(default_factory=dict)
    settles: dict[int, float] = field(default_factory=dict)
    fetches: dict[int, float] = field(default_factory=dict)
    streams: dict[int, Task] = field(default_factory=dict)
    needs: tuple[int, ...] = ()
    near_needs: tuple[int, ...] = ()
    granted: list[Block] = field(default_factory=list)
    chains: set[int] = field(default_factory=set)
    heard_ms: float = 0.0
    spoke_ms: float = 0.0
    free_ms: float = 0.0
    start_ms: float | None = None
    why: str = ""
    spared: bool = False
    figures: dict[int, Mapping[str, float]] = field(default_factory=dict)
    rest: Rest = field(default_factory=Rest)
    called: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.running or self.streams or self.unfinished or self.fetches)

    @property
    def gives_near(self) -> bool:
        """Whether others read what it gives on its device."""
        return bool(self.near_arena) and not self.on_host

    @property
    def full(self) -> bool:
        """Its device is so far behind that it is given nothing more."""
        return len(self.unfinished) >= UNFINISHED_MAX

    @property
    def waits_for_room(self) -> bool:
        return bool(self.needs or self.near_needs)

    @property
    def suspect(self) -> bool:
        """It is running what may kill it: nothing else is put at risk beside it."""
        if self.running and self.running[0].suspect:
            return True
        return bool(self.streams) and any(task.deaths for task in self.streams.values())

    def move(self, event: str) -> None:
        """Go to the next state; RuntimeError for a move the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"a worker that is {self.state} cannot {event}; allowed: {allowed or 'nothing'}")
        self.state, self.alive = to, to in (STARTING, READY, LEAVING)


class Crew:
    """All workers of a plan. Pure: it is told what happened and says what is due."""

    def __init__(self, plan: Plan, seed: int = 0, policy: RestartPolicy | None = None) -> None:
        self._plan = plan
        self.members = [
            WorkerState(Restarts(policy or RestartPolicy(), seed + place), worker.name)
            for place, worker in enumerate(plan.workers)
        ]
        self._silence_max_ms = plan.limits.silence_max_ms
        self._arenas = 0
        self._starts = 0
        self._calls = 0
        self._dispatches = 0
        self._look_ms = 0.0
        self._steps_of = [
            tuple(index for index, step in enumerate(plan.steps) if worker in step.workers)
            for worker in range(len(plan.workers))
        ]

    def next_dispatch(self) -> int:
        self._dispatches += 1
        return self._dispatches

    def next_arena(self) -> int:
        """Return an id that no arena had before, whether in host memory or on a device."""
        self._arenas += 1
        return self._arenas

    def start_all(self, now_ms: float) -> list[tuple[int, int]]:
        """Return (worker, arena) for every worker, to be started now."""
        for member in self.members:
            member.start_ms = now_ms
        return self.due(now_ms)

    def due(self, now_ms: float) -> list[tuple[int, int]]:
        """Return (worker, arena) for the workers whose time to start has come."""
        started = []
        for worker, member in enumerate(self.members):
            if member.start_ms is not None and member.start_ms <= now_ms:
                member.move("start")
                self._starts += 1
                member.arena, member.start_ms, member.why, member.heard_ms = self.next_arena(), None, "", now_ms
                member.near_arena, member.near_events, member.rung, member.spared = 0, 0, "", False
                member.on_host = ""
                started.append((worker, member.arena))
        return started

    def ready(self, worker: int, now_ms: float) -> None:
        member = self.members[worker]
        member.move("ready")
        member.free_ms = now_ms
        member.called = False
        member.restarts.ready()

    def leave(self, worker: int, now_ms: float) -> None:
        """A worker is told to close its nodes and end; it comes back when it is called."""
        member = self.members[worker]
        member.move("leave")
        member.heard_ms = now_ms

    def call(self, worker: int, now_ms: float) -> None:
        """Somebody asks for a step of a worker that is asleep: it is due now.

        It is started by the Tick that follows, never at once: processes die with the thread that started them, and
        whoever asks may be a thread that ends.
        """
        member = self.members[worker]
        if member.state == ASLEEP and member.start_ms is None:
            member.start_ms, member.called = now_ms, True
            self._calls += 1

    def died(self, worker: int, now_ms: float, refused: bool = False) -> tuple[list[Dispatch], list[Task]]:
        """Bury a worker, decide when it comes back, and return what it had to do: dispatches, and streaming tasks.

        refused: the system did not let it start. It is tried again for as long as that lasts, and never given up.
        """
        member = self.members[worker]
        was_ready, was_leaving = member.state == READY, member.state == LEAVING
        slept = member.rest.asleep(self._steps_of[worker])
        member.move("died")
        if not was_leaving:
            delay = member.restarts.died(now_ms, was_ready=was_ready or refused)
            if delay is None:
                member.move("give_up")
            elif slept:  # nobody needs it now; it would only take back the memory that its steps gave up
                member.move("rest")
            else:
                member.start_ms = now_ms + delay
        member.rest.clear()
        member.called = False
        lost = member.running, list(member.streams.values())
        member.running, member.streams, member.needs, member.near_needs = [], {}, (), ()
        member.unfinished, member.settles, member.fetches = {}, {}, {}
        member.blind.clear()
        member.chains.clear()
        member.figures.clear()
        return lost

    def overdue(self, now_ms: float) -> list[tuple[int, str]]:
        """Return (worker, why) for those that must be killed: silent, or too long at one thing; each is named once."""
        self._look_ms = now_ms + LOOK_MS
        return [
            (worker, why)
            for worker, member in enumerate(self.members)
            if member.alive and not member.why and (why := self._complaint(worker, member, now_ms))
        ]

    def _settle_max_ms(self, worker: int) -> float:
        """How long what is on a worker's streams at one moment may take, and copies of some of it."""
        return max((self._plan.steps[step].run_max_ms for step in self._steps_of[worker]), default=math.inf)

    def _complaint(self, worker: int, member: WorkerState, now_ms: float) -> str:
        if member.state == STARTING:
            late = now_ms - member.heard_ms > OPEN_MAX_MS
            return f"it said nothing for {OPEN_MAX_MS / 1000:g} s while opening" if late else ""
        if member.state == LEAVING:
            late = now_ms - member.heard_ms > LEAVE_MAX_MS
            return f"it did not close its nodes within {LEAVE_MAX_MS / 1000:g} s" if late else ""
        if self._loads(member):
            return ""  # which may silence it; how long that may take is watched elsewhere
        if now_ms - member.heard_ms > self._silence_max_ms:
            return f"it gave no sign of life for {self._silence_max_ms / 1000:g} s"
        first = member.running[0] if member.running else None
        if first is not None and now_ms - first.started_ms > first.limit_ms:
            return "it was busy for longer than run_max_ms"
        oldest = next(iter(member.unfinished.values()), None)
        if oldest is not None and now_ms - oldest.since_ms > oldest.limit_ms:
            return "its device was busy for longer than run_max_ms"
        if member.rest.moving:
            return ""  # all else stands still until one of its steps sleeps or is awake
        if member.settles and now_ms - min(member.settles.values()) > self._settle_max_ms(worker):
            return "its device did not settle within run_max_ms"
        if member.fetches and not member.running:  # it comes to them once it has answered those
            since_ms = max(member.free_ms, min(member.fetches.values()))
            if now_ms - since_ms > self._settle_max_ms(worker):
                return "it did not copy to host memory what was asked for within run_max_ms"
        at_work = [
            task
            for task in member.streams.values()
            if not (task.request.stalled or task.held or (task.feed is not None and task.feed.waits))
        ]
        limits = (self._plan.steps[task.unit.step].run_max_ms for task in at_work)
        return (
            "it was busy for longer than run_max_ms" if now_ms - member.spoke_ms > min(limits, default=math.inf) else ""
        )

    def heard_of(self, step: int, now_ms: float) -> bool:
        """Whether an instance of the step is ready and gave a sign of life lately, or sleeps until it is needed."""
        workers = self._plan.steps[step].workers
        return not workers or any(self._can_answer(self.members[worker], now_ms) for worker in workers)

    def _can_answer(self, member: WorkerState, now_ms: float) -> bool:
        if member.state in (ASLEEP, LEAVING) or member.called:
            return True
        heard = now_ms - member.heard_ms <= self._silence_max_ms or self._loads(member)
        return member.state == READY and not member.why and heard

    def _loads(self, member: WorkerState) -> bool:
        """Whether a worker has said that it is waking a step; until it has come to that, it is not to be silent."""
        return member.rest.loading

    def unavailable(self, steps: Sequence[int]) -> str:
        """Return the name of the first of `steps` that has no worker left to hope for, or ''."""
        for step in steps:
            planned = self._plan.steps[step]
            if planned.workers and all(self.members[worker].state == GIVEN_UP for worker in planned.workers):
                return planned.name
        return ""

    @property
    def restarts(self) -> int:
        """How often a worker was started again, but for those that had been asleep."""
        return max(0, self._starts - len(self.members) - self._calls)

    def ready_count(self, step: int) -> int:
        """How many instances of a step are ready; of a control, which has none, 0."""
        return sum(self.members[worker].state == READY for worker in self._plan.steps[step].workers)

    def figures(self) -> dict[str, dict[str, Mapping[str, float]]]:
        """Return what nodes last said of themselves, by step and worker, of those that live."""
        told: dict[str, dict[str, Mapping[str, float]]] = {}
        for member in self.members:
            for step, values in member.figures.items():
                told.setdefault(self._plan.steps[step].name, {})[member.name] = values
        return told

    def all_ready(self) -> bool:
        return all(member.state == READY for member in self.members)

    def starting(self) -> list[int]:
        return [worker for worker, member in enumerate(self.members) if member.state == STARTING]

    def busy(self) -> bool:
        return any(member.busy for member in self.members)

    def steps_of(self, worker: int) -> tuple[int, ...]:
        """Return the steps that a worker holds, as indexes in the plan."""
        return self._steps_of[worker]

    def owner_on_device(self, arena: int) -> int | None:
        """Return the living worker whose device arena, or its events, has this id; None for any other arena."""
        for worker, member in enumerate(self.members):
            if member.near_arena and member.near_arena == abs(arena) and member.alive:
                return worker
        return None

    def sharing(self) -> dict[str, dict[str, str]]:
        """Return how what living workers give on their devices reaches others: device, rung, and why that is 'host'."""
        return {
            planned.name: {
                "device": planned.device,
                "rung": "host" if member.on_host else member.rung,
                "why": member.on_host,
            }
            for planned, member in zip(self._plan.workers, self.members)
            if member.rung and member.alive
        }

    def asleep_count(self, step: int) -> int:
        """How many instances of a step are asleep, with or without their process."""
        return sum(
            self.members[worker].state in (ASLEEP, LEAVING) or self.members[worker].rest.asleep((step,))
            for worker in self._plan.steps[step].workers
        )

    def wake_at_ms(self) -> float | None:
        """When something becomes due: a restart, or a look at those that live."""
        soonest: float | None = None
        for member in self.members:
            at = member.start_ms if member.start_ms is not None else self._look_ms if member.alive else None
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest
