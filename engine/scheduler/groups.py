"""Ordered groups: rows of a job that were submitted together and form their batches by row order alone.

The make-up of a usual batch depends on timing, and with it the last bit of what a model computes. The tasks of an
ordered group are held back at every step until all rows that will ever get there are there; then they form batches in
row order. The same group forms the same batches in every run.

A group is complete at a step when none of its tasks runs or waits elsewhere, and none is held at an earlier step. One
step is released at a time: a row that fails in one branch is then missing from another branch in every run, or in none.
Steps that take items as they come (streams, steps with memory) hold nothing back.

Held tasks keep their inputs in shared memory. When that is full and nothing else will free any, the oldest group is
released before it is complete: its rows run in smaller batches instead of failing.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftline.engine.scheduler import task_table
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.state import SchedulerState
from weftline.pipelines.placement.plan import Plan


class OrderedGroup:
    """Rows that came together.

    ancestors: as returned by the function of this name, for the plan of the rows' program.
    held:      tasks that wait for the others, by step and id.
    running:   tasks that are alive and not held.
    """

    __slots__ = ("ancestors", "held", "running")

    def __init__(self, ancestors: Sequence[frozenset[int]]) -> None:
        self.ancestors = ancestors
        self.held: dict[int, dict[int, Task]] = {}
        self.running = 0


def hold_task(state: SchedulerState, group: OrderedGroup, task: Task) -> bool:
    """Register a task of a group that has begun; return True when it is held back and must not be queued."""
    state.changed_groups[group] = None
    if not task.request.program.group_holds[task.unit.step]:
        group.running += 1
        return False
    group.held.setdefault(task.unit.step, {})[task.id] = task
    state.holding_groups[group] = None
    return True


def on_task_copied(state: SchedulerState, group: OrderedGroup) -> None:
    """Count a second copy of a running task."""
    group.running += 1


def on_task_over(state: SchedulerState, group: OrderedGroup, task: Task) -> None:
    """Remove a task that is no longer live from its group."""
    state.changed_groups[group] = None
    held = group.held.get(task.unit.step)
    if held is None or held.pop(task.id, None) is None:
        group.running -= 1
    elif not held:
        del group.held[task.unit.step]
        if not group.held:
            del state.holding_groups[group]


def release(state: SchedulerState) -> None:
    """Queue the held tasks of every group that is complete."""
    moved, state.changed_groups = state.changed_groups, {}
    for group in moved:
        if group.running or not group.held:
            continue
        step = next(step for step in sorted(group.held) if not group.ancestors[step].intersection(group.held))
        _release_step(state, group, step)


def release_oldest(state: SchedulerState) -> bool:
    """Release the oldest group at its last step, complete or not; return False when no group holds any task."""
    group = next(iter(state.holding_groups), None)
    if group is None:
        return False
    _release_step(state, group, max(group.held))
    return True


def _release_step(state: SchedulerState, group: OrderedGroup, step: int) -> None:
    tasks = sorted(group.held.pop(step).values(), key=_in_order)
    if not group.held:
        del state.holding_groups[group]
    group.running += len(tasks)
    task_table.queue_group(state, tasks)


def ancestors(plan: Plan) -> Sequence[frozenset[int]]:
    """Return for each step the steps that must be over before it can begin.

    A fallback begins when its step has failed, and readers of that step's outputs wait for both.
    """
    index = {step.name: at for at, step in enumerate(plan.steps)}
    before: list[set[int]] = []
    for step in plan.steps:
        wires = [given.wire for given in step.inputs] + list(step.when.wires if step.when is not None else ())
        read = {wire.step for wire in wires if wire.step is not None}
        for name in list(read):
            while (fallback := plan.steps[index[name]].fallback) is not None:
                read.add(fallback)
                name = fallback
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
