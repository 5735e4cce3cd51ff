"""Test steps with a timeout: tasks that cannot finish within it are not started."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest

from tests.engine.scheduler_harness import SchedulerHarness, items
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.latency import FRESH_MS
from weftline.pipelines.spec.builder import Builder

PAUSE_MS = 10.0
"""Time between a caller's answer and its next call."""


def one_step(timeout_ms: float = 150, items_max: int = 1, node: str = "echo", **more: Any) -> Builder:
    p = Builder("one-step")
    type = {"type": "json"} if node == "echo" else {}
    batch = {"items_max": items_max, **more.pop("batch", {})}
    a = p.step("a", node, value=p.input("x", "json"), batch=batch, timeout_ms=timeout_ms, **type, **more)
    p.output("y", a.value)
    return p


def measured(harness: SchedulerHarness, run_ms: float, calls: int = 4, step: str = "a") -> SchedulerHarness:
    """Let a step run a few requests alone."""
    for _ in range(calls):
        harness.submit(x=1)
        harness.advance(run_ms)
        if harness.running():
            harness.answer(step, run_ms=run_ms)
    return harness


class ClosedLoop:
    """Callers that call again as soon as they have an answer; workers that take `run_ms` for a batch of n items.

    good:   answers of the nodes.
    bad:    errors and fallbacks.
    wasted: items that were run for nothing.
    """

    def __init__(self, pipeline: Builder, callers: int, run_ms: Callable[[int], float]) -> None:
        self.harness = SchedulerHarness(pipeline)
        self.run_ms = run_ms
        self.good, self.bad, self.items = [], [], 0  # type: list[float], list[float], int
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._callers: dict[int, int] = {}
        self._called_ms: dict[int, float] = {}
        self._busy: dict[int, int] = {}  # worker -> the dispatch that it runs
        for caller in range(callers):
            self._at(caller * 0.1, lambda: self._call())

    def _at(self, ms: float, what: Callable[[], None]) -> None:
        heappush(self._todo, (self.harness.now_ms + ms, next(self._order), what))

    def run(self, seconds: float) -> ClosedLoop:
        until_ms = self.harness.now_ms + seconds * 1000
        while self.harness.now_ms < until_ms:
            wake_ms = self.harness.scheduler.wake_at_ms() or until_ms
            if not self._todo or wake_ms < self._todo[0][0]:
                self.harness.advance(max(0.0, wake_ms - self.harness.now_ms))
            else:
                at_ms, _, what = heappop(self._todo)
                self.harness.advance(max(0.0, at_ms - self.harness.now_ms))
                what()
            self._look()
        return self

    def _call(self) -> None:
        one = self.harness.submit(x=1)
        self._called_ms[one] = self.harness.now_ms

    def _look(self) -> None:
        self.harness.all_commands.clear()
        for request in list(self.harness.ended):
            ok = self.harness.steps_of(request) == [("a", "ok")]
            end = self.harness.ended.pop(request)
            (self.good if ok else self.bad).append(self.harness.now_ms - self._called_ms.pop(request))
            self._at(PAUSE_MS, self._call)
            if isinstance(end, ev.Finish):
                self.harness.handle(ev.Delivered(request))
        for worker, runs in self.harness.inbox.items():
            if runs and self._busy.get(worker) != runs[0].dispatch:
                self._busy[worker] = runs[0].dispatch
                self.items += len(runs[0].items)
                took_ms = self.run_ms(len(runs[0].items))
                self._at(took_ms, lambda w=worker, t=took_ms: self._answer(w, t))  # type: ignore[misc]

    def _answer(self, worker: int, took_ms: float) -> None:
        self.harness.answer("a", run_ms=took_ms - 0.5, worker=worker)


def jittered(fixed_ms: float, item_ms: float = 0.0, spread_ms: float = 1.5) -> Callable[[int], float]:
    draws = random.Random(5)
    return lambda n: fixed_ms + item_ms * n + abs(draws.gauss(0, spread_ms))


@pytest.mark.parametrize("order", ["deadline", "arrival"])
@pytest.mark.parametrize("callers", [1, 2, 8, 64])
def test_goodput_is_the_same_for_one_caller_and_for_many(callers: int, order: str) -> None:
    loop = ClosedLoop(one_step(batch={"order": order}), callers, jittered(100)).run(5)
    print(f"{callers} callers: {len(loop.good) / 5}/s good, {loop.items} run, {len(loop.bad)} failed")
    assert len(loop.good) >= 42
    assert loop.items - len(loop.good) <= 6  # the first ones, and few later
    assert callers < 8 or sorted(loop.bad)[len(loop.bad) // 2] < 60  # they fail before their timeout


@pytest.mark.parametrize("wait_max_ms", [0, 400])
@pytest.mark.parametrize(("callers", "least"), [(4, 20), (16, 45), (64, 60)])
def test_batches_keep_goodput_although_some_items_expire(callers: int, least: float, wait_max_ms: float) -> None:
    p = one_step(items_max=8, batch={"wait_max_ms": wait_max_ms})
    loop = ClosedLoop(p, callers, jittered(60, 5)).run(5)
    print(f"{callers} callers: {len(loop.good) / 5}/s good, {loop.items} run, {len(loop.bad)} failed")
    assert len(loop.good) >= least * 5
    assert loop.items - len(loop.good) <= 0.1 * loop.items + 24


def test_a_full_batch_that_takes_longer_than_the_timeout_is_made_smaller() -> None:
    loop = ClosedLoop(one_step(items_max=16, timeout_ms=100), 32, jittered(20, 10)).run(5)
    print(f"{len(loop.good) / 5}/s good, {loop.items} run")
    assert len(loop.good) >= 200 and loop.items - len(loop.good) <= 0.15 * loop.items


@pytest.mark.parametrize("callers", [1, 2, 8, 64])
@pytest.mark.parametrize("idle_ms", [0.0, FRESH_MS + 1])
def test_a_batch_as_long_as_its_items_one_by_one_costs_little(callers: int, idle_ms: float) -> None:
    """Each larger batch ends too late: all of its items are lost."""
    loop = ClosedLoop(one_step(items_max=8), callers, jittered(0, 100))
    measured(loop.harness, 100).ended.clear()
    loop.harness.advance(idle_ms)
    loop.run(3)
    print(f"{callers} callers: {len(loop.good) / 3:.1f}/s good, {loop.items} run, {len(loop.bad)} failed")
    assert len(loop.good) >= 25  # of 30
    assert loop.items - len(loop.good) <= 6


def test_the_instances_of_a_step_share_what_can_be_done() -> None:
    loop = ClosedLoop(one_step(instances=3), 32, jittered(100)).run(5)
    assert len(loop.good) >= 125 and loop.items - len(loop.good) <= 15


def test_a_dispatch_ahead_is_not_started_too_late() -> None:
    loop = ClosedLoop(one_step(timeout_ms=20), 32, jittered(15, spread_ms=0.3)).run(3)
    print(f"{len(loop.good) / 3}/s good, {loop.items} run")
    assert len(loop.good) >= 150 and loop.items - len(loop.good) <= 20


def test_a_step_whose_time_varies_runs_what_has_a_chance() -> None:
    draws = random.Random(3)
    loop = ClosedLoop(one_step(), 1, lambda n: draws.choice([50.0, 300.0])).run(20)
    assert loop.items >= 90  # of at most 114: the worker does not idle for want of a task that is certain to finish
    assert len(loop.good) >= 0.35 * loop.items


def test_without_measurements_tasks_wait_for_their_whole_timeout() -> None:
    harness = SchedulerHarness(one_step())
    harness.submit(x=1)
    two = harness.submit(x=2)
    harness.advance(149)
    assert two not in harness.ended
    harness.advance(2)
    assert harness.failure(two).message == "it took longer than its timeout_ms, 150 ms"


def test_a_task_that_cannot_finish_fails_at_once_and_names_both_times() -> None:
    harness = measured(SchedulerHarness(one_step(timeout_ms=80)), 100, calls=3)
    one = harness.submit(x=1)
    failure = harness.failure(one)
    assert (failure.error, failure.step) == ("DeadlineExceeded", "a")
    needs = "it may need 100 ms, waiting included, and has 80 ms left of its timeout_ms, 80 ms"
    assert failure.message == f"by recent measurements {needs}; it was not started"
    assert harness.running() == [] and harness.scheduler.counters.late == 1
    assert harness.steps_of(one) == [("a", "lost")]
    assert harness.is_clean()


def test_the_time_that_the_error_names_is_the_one_that_decided() -> None:
    """A step whose times vary needs more than their mean."""
    harness = SchedulerHarness(one_step(timeout_ms=170))
    for run_ms in (100.0, 120.0, 80.0) * 4:
        harness.submit(x=1)
        harness.advance(run_ms)
        harness.answer("a", run_ms=run_ms)
    harness.submit(x=1)
    message = harness.failure(harness.submit(x=2)).message
    needs, left = map(float, re.findall(r"(\d+) ms, waiting included, and has (\d+) ms left", message)[0])
    assert needs > left == 170


def test_its_fallback_runs_at_once() -> None:
    harness = measured(SchedulerHarness(one_step(timeout_ms=80, fallback={"value": "quick"})), 100, calls=3)
    assert harness.output(harness.submit(x=1)) == "quick"
    assert harness.is_clean()


def test_a_task_behind_others_expires_at_its_latest_start() -> None:
    harness = measured(SchedulerHarness(one_step(timeout_ms=250)), 100)
    first, second, third = harness.submit_all([1, 2, 3])
    harness.advance(100)
    harness.answer("a", run_ms=100)
    assert harness.output(first) == 1 and harness.batch("a") == [2]
    harness.advance(49)
    assert third not in harness.ended
    harness.advance(2)
    assert "it was not started" in harness.failure(third).message
    harness.advance(49)
    harness.answer("a", run_ms=100)
    assert harness.output(second) == 2 and harness.is_clean()


def test_after_a_slow_time_tasks_are_tried_again_and_old_times_forgotten() -> None:
    harness = measured(SchedulerHarness(one_step()), 1000, calls=6)
    assert "not started" in harness.failure(harness.submit(x=1)).message
    harness.advance(FRESH_MS + 1)
    answered = []
    for _ in range(20):
        one = harness.submit(x=1)
        if harness.running():
            harness.advance(100)
            harness.answer("a", run_ms=100)
        answered.append(isinstance(harness.ended[one], ev.Finish))
    assert all(answered)


def test_a_retried_task_has_the_whole_timeout_again() -> None:
    p = one_step(timeout_ms=160, retry={"attempts": 1, "on": ["timeout"]})
    harness = measured(SchedulerHarness(p), 100)
    busy, waits = harness.submit(x=1), harness.submit(x=2)
    harness.advance(60.5)
    assert waits not in harness.ended and harness.scheduler.counters.retried == 1
    harness.advance(39.5)
    harness.answer("a", run_ms=100)
    assert harness.batch("a") == [2]
    harness.advance(100)
    harness.answer("a", run_ms=100)
    assert harness.output(busy) == 1 and harness.output(waits) == 2
    assert harness.is_clean()


def test_a_list_that_takes_longer_than_the_timeout_is_not_begun() -> None:
    p = Builder("listed")
    x = p.input("x", "list[json]")
    p.output("y", p.step("a", "echo", type="json", value=x, map="value", batch={"items_max": 2}, timeout_ms=250).value)
    harness = SchedulerHarness(p)
    for _ in range(4):
        harness.submit(x=items(1, 2))
        harness.advance(100)
        harness.answer("a", run_ms=100)
    long = harness.submit(x=items(1, 2, 3, 4, 5))
    assert "it may need 300 ms" in harness.failure(long).message and harness.running() == []
    harness.submit(x=items(1, 2, 3, 4))
    assert harness.running() == ["a"]


def test_one_item_of_a_batch_that_would_expire_is_left_out() -> None:
    harness = SchedulerHarness(one_step(items_max=4))
    for run_ms, together in ((60, 1), (80, 2)) * 3:
        harness.submit_all(range(together))
        harness.advance(run_ms)
        harness.answer("a", run_ms=run_ms)
        while harness.running():
            harness.answer("a", run_ms=run_ms)
    busy = harness.submit(x=0)
    old = harness.submit(x=1)
    harness.advance(75)
    new = harness.submit(x=2)
    harness.answer("a", run_ms=75)
    assert busy in harness.ended
    assert harness.batch("a") in ([1], [2])  # never both: two take 80 ms
    assert (old in harness.ended) is (harness.batch("a") == [2])
    assert new not in harness.ended


def test_a_streaming_step_is_judged_by_its_short_answers() -> None:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text"), timeout_ms=100).value)
    harness = SchedulerHarness(p)
    for run_ms in (20, 90, 90, 90):
        harness.submit(x=msg.Value("text", data=b"a"))
        harness.advance(run_ms)
        harness.send_chunk(0, "whole", last=True)
    fits = harness.submit(x=msg.Value("text", data=b"a"))
    assert fits not in harness.ended
    harness.advance(101)
    assert harness.failure(fits).message == "it took longer than its timeout_ms, 100 ms"


def test_a_streaming_step_that_always_times_out_is_not_started() -> None:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text"), timeout_ms=100).value)
    harness = SchedulerHarness(p)
    ends = []
    for _ in range(4):
        ends.append(harness.submit(x=msg.Value("text", data=b"a")))
        harness.advance(101)
    assert "took longer" in harness.failure(ends[2]).message
    assert "not started" in harness.failure(ends[3]).message


def test_a_short_answer_of_a_streaming_step_is_tried_after_long_ones() -> None:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text"), timeout_ms=100).value)
    harness = SchedulerHarness(p)
    for _ in range(5):
        harness.submit(x=msg.Value("text", data=b"long"))
        harness.advance(101)
    harness.send_chunk(0, "whole", last=True)
    harness.advance(1001)
    short = harness.submit(x=msg.Value("text", data=b"short"))
    assert short not in harness.ended
    harness.advance(20)
    harness.send_chunk(0, "whole", last=True, position=len(harness.streaming[0]) - 1)
    assert isinstance(harness.ended[short], ev.Finish)
    harness.advance(5000)
    assert harness.submit(x=msg.Value("text", data=b"short")) not in harness.ended


def test_items_carry_what_is_left_of_the_timeout() -> None:
    harness = SchedulerHarness(one_step())
    harness.submit(x=1)
    (run,) = harness.sent(msg.RunBatch)
    assert run.items[0].metadata is not None and run.items[0].metadata.left_ms == 150
    harness.answer("a")
    harness.submit(x=1, deadline_ms=90)
    (run,) = harness.sent(msg.RunBatch)
    assert run.items[0].metadata.left_ms == 90


def test_rows_of_a_job_that_would_expire_are_not_started() -> None:
    harness = measured(SchedulerHarness(one_step()), 100)
    rows = harness.submit_group([1, 2, 3])
    while harness.running():
        harness.advance(100)
        harness.answer("a", run_ms=100)
    assert [isinstance(harness.ended[row], ev.Finish) for row in rows].count(True) == 1
    assert harness.is_clean()
