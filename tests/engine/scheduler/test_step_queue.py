"""Where the tasks of a step wait, and how many of them may leave together."""

from __future__ import annotations

from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.scheduler.request import Request, Task
from weftline.engine.scheduler.step_queue import SECOND_MS_MAX, JobQueue, StepQueue
from weftline.nodes.out_of_memory import FULL_BATCHES
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.spec.builder import Builder


class Bench:
    """A step queue with its tasks."""

    def __init__(self, node: str = "echo", **more: object) -> None:
        p = Builder("one-step")
        p.output("y", p.step("a", node, value=p.input("x", "text"), **more).value)  # type: ignore[arg-type]
        plan = plan_of(p)
        scheduler = SchedulerHarness(plan, up=False).scheduler
        self.waiting_queue = scheduler.state.queues[0]
        self.program = scheduler.program()
        self.route = self.program.routes.route(None)
        self.tasks: dict[int, Task] = {}

    def add(self, due_ms: float | None = None, part: SequencePart | None = None) -> Task:
        id = len(self.tasks) + 1
        request = Request(id, self.program, self.route, 0.0, None, 0, [], sequence=part)
        task = self.tasks[id] = Task(id, request, 0, self.route.units[0], (), (), 0.0)
        if due_ms is not None:
            task.due_ms = due_ms
        self.waiting_queue.add(task)
        return task


def test_what_has_just_come_leaves_past_the_queue_when_nothing_waits() -> None:
    bench = Bench()
    tasks = [bench.add(), bench.add()]
    assert bench.waiting_queue.take_new() == tasks
    assert bench.waiting_queue.waiting == 0


def test_what_waits_is_not_overtaken() -> None:
    bench = Bench()
    bench.add()
    bench.waiting_queue.settle(0.0)
    bench.add()
    assert bench.waiting_queue.take_new() is None
    bench.waiting_queue.settle(0.0)
    assert bench.waiting_queue.waiting == 2


def test_more_than_a_batch_and_what_has_a_deadline_go_through_the_queue() -> None:
    bench = Bench(batch={"items_max": 2})
    for _ in range(3):
        bench.add()
    assert bench.waiting_queue.take_new() is None
    other = Bench()
    other.add(due_ms=50.0)
    assert other.waiting_queue.take_new() is None


def test_a_step_that_waits_for_company_has_no_quick_way() -> None:
    bench = Bench(batch={"items_max": 2, "wait_max_ms": 5})
    bench.add()
    assert bench.waiting_queue.take_new() is None


def test_a_task_is_taken_out_wherever_it_stands() -> None:
    bench = Bench()
    queued = bench.add()
    bench.waiting_queue.settle(0.0)
    new, suspect = bench.add(), bench.add()
    bench.waiting_queue._new.remove(suspect)
    bench.waiting_queue.suspects.append([suspect])
    assert bench.waiting_queue.waiting == 3
    for task in (queued, new, suspect):
        bench.waiting_queue.discard(task)
    assert bench.waiting_queue.waiting == 0
    assert not bench.waiting_queue.suspects, "what is left of them would keep the others waiting"


def test_a_sequence_task_removed_before_it_is_queued_is_settled() -> None:
    bench = Bench("remember")
    part = SequencePart("s", True, True)
    assert bench.waiting_queue.admit(part, 0.0) is None
    task = bench.add(part=part)
    bench.waiting_queue.discard(task)
    assert bench.waiting_queue.sequences is not None
    assert bench.waiting_queue.sequences.done("s", task.id, 0.0)
    assert bench.waiting_queue.sequences.live() == 0


def test_a_new_sequence_waits_while_no_worker_accepts_one() -> None:
    bench = Bench("remember", instances=2)
    part = SequencePart("s", True, False)
    bench.waiting_queue.admit(part, 0.0)
    bench.add(part=part)
    bench.waiting_queue.settle(0.0)
    assert not bench.waiting_queue.release_sequences(bench.tasks, {}, 0.0)
    assert bench.waiting_queue.release_sequences(bench.tasks, {1: 0}, 0.0)
    assert len(bench.waiting_queue.queue(1)) == 1 and len(bench.waiting_queue.queue(0)) == 0


def learned(run_ms: float) -> StepQueue:
    waiting_queue = Bench(batch={"items_max": 8}).waiting_queue
    for _ in range(4):
        waiting_queue.learn((), 8, run_ms, 0.0)
    return waiting_queue


def test_steps_quicker_than_messages_share_one() -> None:
    assert learned(0.1).batches_a_message() == 5
    assert learned(10.0).batches_a_message() == 1


def test_a_message_carries_one_batch_when_memory_is_short() -> None:
    waiting_queue = learned(0.1)
    waiting_queue.in_place = True
    assert waiting_queue.batches_a_message() == 1
    waiting_queue = learned(0.1)
    waiting_queue.out_of_memory(8)
    assert waiting_queue.batches_a_message() == 1


def test_only_quick_steps_receive_a_second_message() -> None:
    assert learned(SECOND_MS_MAX).quick
    assert not learned(SECOND_MS_MAX + 1).quick


def test_memory_that_ran_short_halves_the_batch_down_to_one() -> None:
    waiting_queue = learned(1.0)
    sizes = []
    for _ in range(4):
        waiting_queue.out_of_memory(waiting_queue.items_max)
        sizes.append(waiting_queue.items_max)
    assert sizes == [4, 2, 1, 1]


def test_small_batches_do_not_count_towards_a_larger_limit() -> None:
    waiting_queue = learned(1.0)
    waiting_queue.out_of_memory(8)
    for _ in range(2 * FULL_BATCHES):
        waiting_queue.went_well(3)
    assert waiting_queue.items_max == 4
    for _ in range(FULL_BATCHES - 1):
        waiting_queue.went_well(4)
    waiting_queue.out_of_memory(4)
    assert waiting_queue.items_max == 2
    for _ in range(FULL_BATCHES - 1):
        waiting_queue.went_well(2)
    assert waiting_queue.items_max == 2
    waiting_queue.went_well(2)
    assert waiting_queue.items_max == 4


def line_and_tasks(count: int) -> tuple[JobQueue, list[Task]]:
    p = Builder("one-step")
    p.output("y", p.step("a", "echo", value=p.input("x", "text")).value)
    plan = plan_of(p)
    program = SchedulerHarness(plan, up=False).scheduler.program()
    route = program.routes.route(None)
    requests = [Request(id, program, route, 0.0, None, 0, [], job=True) for id in range(count)]
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
