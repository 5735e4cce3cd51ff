"""All workers of a plan: which incarnation of each lives, when it starts again, and what is told of them.

How long one may be silent or busy is `patience`; when to try again, the supervisor's policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weftline.engine.crew.member import Dispatch, WorkerState
from weftline.engine.crew.patience import Patience
from weftline.engine.crew.supervisor import ASLEEP, GIVEN_UP, LEAVING, READY, STARTING, RestartPolicy, Restarts
from weftline.engine.scheduling.request import Task
from weftline.pipelines.plan import Plan

LOOK_MS = 250.0
"""How often workers are looked at for silence and for calls that take too long."""


class Crew:
    """All workers of a plan. Pure: it is told what happened and says what is due."""

    def __init__(self, plan: Plan, seed: int = 0, policy: RestartPolicy | None = None) -> None:
        self._plan = plan
        self.members = [
            WorkerState(Restarts(policy or RestartPolicy(), seed + place), worker.name)
            for place, worker in enumerate(plan.workers)
        ]
        self._arenas = 0
        self._starts = 0
        self._calls = 0
        self._dispatches = 0
        self._look_ms = 0.0
        self._steps_of = [
            tuple(index for index, step in enumerate(plan.steps) if worker in step.workers)
            for worker in range(len(plan.workers))
        ]
        self._patience = Patience(plan, self._steps_of)

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
            if member.alive and not member.why and (why := self._patience.complaint(worker, member, now_ms))
        ]

    def heard_of(self, step: int, now_ms: float) -> bool:
        """Whether an instance of the step is ready and gave a sign of life lately, or sleeps until it is needed."""
        workers = self._plan.steps[step].workers
        return not workers or any(self._patience.answers(self.members[worker], now_ms) for worker in workers)

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
