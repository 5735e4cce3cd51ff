"""Rows of a job that came together, and form their batches by their order alone.

A batch of usual requests is whoever happens to wait; its make-up, and with it the last bit of what a model computes,
differs from run to run. A *cohort* is held back at every step until all of its rows that will ever come there are
there. Then they form batches in row order. The same cohort forms the same batches in every run.

When are all there? Nothing of the cohort runs or waits elsewhere (it is at rest), and none is held at a step that comes
before this one. One step is let go at a time: a row that fails in one branch is then missing from another in every run,
or in none; what is idle meanwhile works for other cohorts. Steps that take items whenever they come (streams, steps
with memory) hold nothing back.

What is held keeps its inputs in shared memory. When that is full, and nothing else will free any, a cohort is let go
before it is all there: rows are then answered in smaller batches, instead of failing for want of room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftline.engine.scheduling.request import Task
from weftline.pipelines.plan import Plan


class Cohort:
    """Rows that came together.

    held:    tasks that wait for the others, by step and id.
    running: tasks that are alive and not held.
    """

    __slots__ = ("held", "running")

    def __init__(self) -> None:
        self.held: dict[int, dict[int, Task]] = {}
        self.running = 0


class Cohorts:
    """Holds tasks back and lets them go. Pure; owned by the scheduler.

    form:  called with a step and its tasks, in row order, when they are all there.
    moved: cohorts in which something has changed since `release`.
    """

    def __init__(self, plan: Plan, form: Callable[[int, list[Task]], None]) -> None:
        self._before = ancestors(plan)
        self._holds = [not step.streams and step.sequence is None and not step.control for step in plan.steps]
        self._form = form
        self.moved: dict[Cohort, None] = {}
        self._holding: dict[Cohort, None] = {}  # those that hold something, the oldest first

    def begin(self, cohort: Cohort, task: Task) -> bool:
        """Take in a task of a cohort that has begun; True when it is held back, and not to be queued."""
        self.moved[cohort] = None
        if not self._holds[task.unit.step]:
            cohort.running += 1
            return False
        cohort.held.setdefault(task.unit.step, {})[task.id] = task
        self._holding[cohort] = None
        return True

    def copied(self, cohort: Cohort) -> None:
        """A task that runs already has come to life a second time."""
        cohort.running += 1

    def over(self, cohort: Cohort, task: Task) -> None:
        """A task of a cohort is alive no more."""
        self.moved[cohort] = None
        held = cohort.held.get(task.unit.step)
        if held is None or held.pop(task.id, None) is None:
            cohort.running -= 1
        elif not held:
            del cohort.held[task.unit.step]
            if not cohort.held:
                del self._holding[cohort]

    def release(self) -> None:
        """Let go of everything whose cohort is all there."""
        moved, self.moved = self.moved, {}
        for cohort in moved:
            if cohort.running or not cohort.held:
                continue
            step = next(step for step in sorted(cohort.held) if not self._before[step].intersection(cohort.held))
            self._let_go(cohort, step)

    def make_room(self) -> bool:
        """Let go of what the oldest cohort holds where it is furthest, all there or not; False when none holds any."""
        cohort = next(iter(self._holding), None)
        if cohort is None:
            return False
        self._let_go(cohort, max(cohort.held))
        return True

    def _let_go(self, cohort: Cohort, step: int) -> None:
        tasks = sorted(cohort.held.pop(step).values(), key=_in_order)
        if not cohort.held:
            del self._holding[cohort]
        cohort.running += len(tasks)
        self._form(step, tasks)


def ancestors(plan: Plan) -> Sequence[frozenset[int]]:
    """Return for each step those that must be over before it can begin, for one request or another.

    A stand-in begins when the step it stands in for has failed, and whoever reads that one's outputs waits for both.
    """
    index = {step.name: at for at, step in enumerate(plan.steps)}
    before: list[set[int]] = []
    for step in plan.steps:
        wires = [given.wire for given in step.inputs] + list(step.when.wires if step.when is not None else ())
        read = {wire.step for wire in wires if wire.step is not None}
        for name in list(read):
            while (stand_in := plan.steps[index[name]].fallback) is not None:
                read.add(stand_in)
                name = stand_in
        before.append({index[name] for name in read})
    for at, step in enumerate(plan.steps):
        if step.fallback is not None:
            before[index[step.fallback]].add(at)
    changed = True
    while changed:
        changed = False
        for mine in before:
            more = set().union(*(before[one] for one in mine)) - mine
            if more:
                mine |= more
                changed = True
    return [frozenset(mine - {at}) for at, mine in enumerate(before)]


def _in_order(task: Task) -> tuple[int, int, int]:
    return task.request.row, task.place, task.element
