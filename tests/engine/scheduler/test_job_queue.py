"""Test the job queue of one step: its count stays right for every way in and out."""

from __future__ import annotations

from tests.engine.scheduler_harness import plan_of
from weftline.engine.scheduler.job_queue import JobQueue
from weftline.engine.scheduler.request import Request, Task
from weftline.engine.scheduler.routes import Routes
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.pipelines.spec.builder import Builder


def line_and_tasks(count: int) -> tuple[JobQueue, list[Task]]:
    p = Builder("one-step")
    p.output("y", p.step("a", "echo", value=p.input("x", "text")).value)
    plan = plan_of(p)
    route = Routes(plan).route(None)
    requests = [Request(id, route, 0.0, None, 0, [], job=True) for id in range(count)]
    return StepQueue(0, plan.steps[0]).job, [Task(one.id, one, 0, route.units[0], (), (), 0.0) for one in requests]


def test_single_rows_wait_until_the_last_is_taken_or_dropped() -> None:
    line, tasks = line_and_tasks(3)
    assert not line.any
    for task in tasks:
        line.add(task)
    assert line.any and line.take(1) == tasks[:1] and line.any
    assert line.discard(tasks[1]) and line.any
    assert line.discard(tasks[2]) and not line.any
    assert not line.discard(tasks[2]) and line.take(1) == [] and not line.any


def test_batches_that_were_formed_wait_until_the_last_is_taken() -> None:
    line, tasks = line_and_tasks(3)
    line.form(tasks, 2)
    assert line.any and len(line.take(2)) == 2 and line.any
    assert len(line.take(2)) == 1 and not line.any
    line.form([], 2)
    assert not line.any
