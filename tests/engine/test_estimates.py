"""An estimate counts what is known of the way ahead: busy workers, queues in front, and batches as they are."""

from __future__ import annotations

import pytest

from tests.engine.desk import plan_of
from weftline.engine.crew import Crew, Dispatch
from weftline.engine.estimates import KEPT_MS, MESSAGE_MS, Estimates
from weftline.engine.lanes import Lane
from weftline.engine.request import Request, Task
from weftline.engine.routes import Routes
from weftline.pipelines.builder import Builder

ITEMS_MAX = 8


class Two:
    """Two steps in a row, each with a worker; a call takes 8 ms and 1 ms for each item in it."""

    def __init__(self) -> None:
        p = Builder("two")
        wire = p.input("x", "text")
        for name in ("first", "second"):
            wire = p.step(name, "echo", value=wire, batch={"items_max": ITEMS_MAX}, worker=name).value
        p.output("y", wire)
        plan = plan_of(p)
        self.route = Routes(plan).route(None)
        self.lanes = [Lane(index, step) for index, step in enumerate(plan.steps)]
        self.crew = Crew(plan)
        self.estimates = Estimates(self.lanes, self.crew.members)
        self.request = Request(1, self.route, 0.0, None, 0, [])

    def learn(self, now_ms: float = 0.0) -> None:
        for lane in self.lanes:
            for items in (1, 2, 4, ITEMS_MAX) * 3:
                lane.latency.learn(items, 8.0 + items, now_ms)

    def run(self, step: int, items: int, now_ms: float) -> None:
        """Give a step's worker a batch."""
        unit = self.route.units[step]
        tasks = [Task(id, self.request, step, unit, (), (), now_ms) for id in range(items)]
        self.crew.members[self.lanes[step].workers[0]].running.append(Dispatch(1, unit, tasks, {}, now_ms, 1e9))

    def wait(self, step: int, items: int) -> None:
        unit = self.route.units[step]
        for id in range(items):
            self.lanes[step].add(Task(1000 + id, self.request, step, unit, (), (), 0.0))

    def whole_ms(self, now_ms: float = 0.0) -> float:
        return self.estimates.whole_ms(self.route, now_ms)


@pytest.fixture
def two() -> Two:
    return Two()


def test_what_nobody_knows_counts_as_nothing(two: Two) -> None:
    two.wait(0, 100)
    assert two.whole_ms() == 0.0
    two.learn(now_ms=0.0)
    assert two.whole_ms(now_ms=20_000.0) == 0.0, "what was learned long ago is not known either"


def test_an_idle_pipeline_takes_the_runs_of_one_item_and_the_messages(two: Two) -> None:
    two.learn()
    assert two.whole_ms() == pytest.approx(9 + 9 + 2 * MESSAGE_MS)
    assert two.estimates.after_ms(two.route, 0, 0.0) == pytest.approx(9 + 2 * MESSAGE_MS)


def test_a_worker_that_is_busy_is_waited_for_and_its_batch_says_how_large_the_next_will_be(two: Two) -> None:
    two.learn()
    two.run(0, ITEMS_MAX, now_ms=0.0)
    assert two.whole_ms(now_ms=6.0) == pytest.approx((16 - 6) + 16 + 9 + 2 * MESSAGE_MS)


def test_full_batches_in_front_are_waited_for(two: Two) -> None:
    two.learn()
    two.wait(0, 2 * ITEMS_MAX + 3)
    assert two.whole_ms() == pytest.approx(2 * 16 + 9 + 9 + 2 * MESSAGE_MS)


def test_a_queue_further_on_drains_while_the_request_is_on_its_way(two: Two) -> None:
    two.learn()
    two.wait(1, ITEMS_MAX)
    assert two.whole_ms() == pytest.approx(9 + (16 - 9) + 9 + 2 * MESSAGE_MS)


def test_the_size_of_a_batch_is_remembered_for_a_while_and_counts_only_while_something_is_at_work(two: Two) -> None:
    two.learn()
    two.run(0, ITEMS_MAX, now_ms=0.0)
    two.whole_ms()
    two.crew.members[0].running.clear()
    two.wait(1, 1)
    soon = two.whole_ms(now_ms=2.0)
    assert soon == pytest.approx(16 + 9 + 2 * MESSAGE_MS)
    assert two.whole_ms(now_ms=5_000.0) == pytest.approx(9 + 9 + 2 * MESSAGE_MS)


def test_an_estimate_is_used_for_a_moment_before_it_is_worked_out_again(two: Two) -> None:
    two.learn()
    idle = two.whole_ms()
    two.wait(0, 100)
    assert two.whole_ms(KEPT_MS / 2) == idle
    assert two.whole_ms(KEPT_MS * 2) > idle
