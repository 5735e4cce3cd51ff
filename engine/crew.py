"""The workers as the scheduler sees them: which incarnation lives, what it is running, and when it starts again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from weftline.engine.request import StepTiming
from weftline.engine.supervisor import DEAD, GIVEN_UP, READY, STARTING, TRANSITIONS, RestartPolicy, Restarts
from weftline.pipelines.plan import Plan
from weftline.shm.block import Block

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Work that is with a worker: for each item its id, the input leases it reads, and when it had its inputs.

    room:     blocks leased beforehand for the outputs, by output port.
    limit_ms: how long it may take: the whole of a dispatch, or a streaming worker's silence.
    """

    id: int
    step: int
    items: tuple[int, ...]
    keys: list[list[Key]]
    room: dict[int, Block]
    started_ms: float
    arrived_ms: tuple[float, ...]
    limit_ms: float

    @property
    def until_ms(self) -> float:
        return self.started_ms + self.limit_ms

    def timing(self, step: str, position: int, now_ms: float, batch: int) -> StepTiming:
        """Return how long the item at `position` queued and ran."""
        return StepTiming(step, self.started_ms - self.arrived_ms[position], now_ms - self.started_ms, batch)


@dataclass(slots=True)
class WorkerState:
    """One worker. `arena` is the id of this incarnation's arena; a message that names another one is late.

    dispatch: what it is running; at most one.
    streams:  items of streaming steps it holds, by (step, item).
    needs:    sizes it waits to be given room for.
    granted:  blocks given for the work in hand.
    heard_ms: when a streaming worker last said something, or was first given work.
    start_ms: when to start it again while it is dead.
    why:      why it is about to die, if it said so.
    """

    restarts: Restarts
    state: str = DEAD
    arena: int = -1
    dispatch: Dispatch | None = None
    streams: dict[tuple[int, int], Dispatch] = field(default_factory=dict)
    needs: tuple[int, ...] = ()
    granted: list[Block] = field(default_factory=list)
    heard_ms: float = 0.0
    start_ms: float | None = None
    why: str = ""

    @property
    def busy(self) -> bool:
        return self.dispatch is not None or bool(self.streams)

    @property
    def until_ms(self) -> float:
        """When it has been busy for longer than its step allows without a word; infinite when it is idle."""
        if self.dispatch is not None:
            return self.dispatch.until_ms
        return min((self.heard_ms + held.limit_ms for held in self.streams.values()), default=math.inf)

    @property
    def alive(self) -> bool:
        return self.state in (STARTING, READY)

    def move(self, event: str) -> None:
        """Go to the next state; RuntimeError for a move the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"a worker that is {self.state} cannot {event}; allowed: {allowed or 'nothing'}")
        self.state = to


class Crew:
    """All workers of a plan. Pure: it is told what happened and says what is due."""

    def __init__(self, plan: Plan, seed: int = 0, policy: RestartPolicy | None = None) -> None:
        self._plan = plan
        self.members = [WorkerState(Restarts(policy or RestartPolicy(), seed + i)) for i in range(len(plan.workers))]
        self._arenas = 0
        self._dispatches = 0

    def next_dispatch(self) -> int:
        self._dispatches += 1
        return self._dispatches

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
                self._arenas += 1
                member.arena, member.start_ms, member.why = self._arenas, None, ""
                started.append((worker, member.arena))
        return started

    def ready(self, worker: int) -> None:
        member = self.members[worker]
        member.move("ready")
        member.restarts.ready()

    def died(self, worker: int, now_ms: float) -> list[Dispatch]:
        """Bury a worker, decide when it comes back, and return what it was running."""
        member = self.members[worker]
        was_ready = member.state == READY
        member.move("died")
        delay = member.restarts.died(now_ms, was_ready=was_ready)
        if delay is None:
            member.move("give_up")
        else:
            member.start_ms = now_ms + delay
        lost = [*([member.dispatch] if member.dispatch else []), *member.streams.values()]
        member.dispatch = None
        member.streams.clear()
        return lost

    def overdue(self, now_ms: float) -> list[int]:
        """Return the workers that have been at it for longer than their step allows; each is named once."""
        return [
            worker
            for worker, member in enumerate(self.members)
            if member.busy and member.until_ms <= now_ms and not member.why
        ]

    def streaming(self, item: int) -> list[tuple[int, int]]:
        """Return (worker, step) of every streaming step that holds `item`."""
        return [(w, step) for w, m in enumerate(self.members) for step, held in m.streams if held == item]

    def unavailable(self, steps: Sequence[int]) -> str:
        """Return the name of the first of `steps` that has no worker left to hope for, or ''."""
        for step in steps:
            planned = self._plan.steps[step]
            if all(self.members[worker].state == GIVEN_UP for worker in planned.workers):
                return planned.name
        return ""

    def all_ready(self) -> bool:
        return all(member.state == READY for member in self.members)

    def starting(self) -> list[int]:
        return [worker for worker, member in enumerate(self.members) if member.state == STARTING]

    def busy(self) -> bool:
        return any(member.busy for member in self.members)

    def wake_at_ms(self) -> float | None:
        """When something becomes due: a restart, or a call that takes too long."""
        soonest: float | None = None
        for member in self.members:
            at = member.start_ms
            if member.busy and not member.why:
                at = member.until_ms
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest
