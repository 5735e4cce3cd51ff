"""How long a worker may be silent or busy: each limit just kept, and just missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.scheduler_harness import plan_of
from weftline.engine.scheduler.device_work import Unfinished
from weftline.engine.scheduler.restarts import RestartPolicy, Restarts
from weftline.engine.scheduler.routes import Routes
from weftline.engine.scheduler.timeouts import LEAVE_MAX_MS, OPEN_MAX_MS, Timeouts
from weftline.engine.scheduler.workers import LEAVING, READY, STARTING, Dispatch, WorkerState
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.builder import Builder

NOW_MS, RUN_MS, SILENCE_MS = 10_000_000.0, 5_000.0, 3_000.0


def one_step() -> Plan:
    p = Builder("one", limits={"silence_max_ms": SILENCE_MS})
    p.output("y", p.step("a", "echo", value=p.input("x", "text"), run_max_ms=RUN_MS).value)
    return plan_of(p)


PLAN = one_step()
UNIT = Routes(PLAN).route(None).units[0]


def time_limits() -> Timeouts:
    return Timeouts(PLAN, [(0,)])


def worker_state(state: str = READY, message_ms: float = NOW_MS) -> WorkerState:
    return WorkerState(Restarts(RestartPolicy(), 0), "w", state, True, last_message_ms=message_ms)


def calling(since_ms: float) -> WorkerState:
    one = worker_state()
    one.running = [Dispatch(1, UNIT, [], [], since_ms, RUN_MS)]
    return one


def left(since_ms: float) -> WorkerState:
    one = worker_state()
    one.unfinished = {1: Unfinished(1, UNIT, (), frozenset(), (), (-1, 0, 0), since_ms, RUN_MS)}
    return one


def settling(since_ms: float) -> WorkerState:
    one = worker_state()
    one.settles = {7: since_ms, 8: NOW_MS}
    return one


def fetching(since_ms: float) -> WorkerState:
    one = worker_state()
    one.fetches = {7: 0.0}
    one.free_ms = since_ms  # it comes to them once it is free
    return one


@pytest.mark.parametrize(
    ("made", "limit_ms", "why"),
    [
        (lambda since: worker_state(STARTING, since), OPEN_MAX_MS, "it sent no message for 1800 s while opening"),
        (lambda since: worker_state(LEAVING, since), LEAVE_MAX_MS, "it did not close its nodes within 2 s"),
        (lambda since: worker_state(READY, since), SILENCE_MS, "it sent no heartbeat for 3 s"),
        (calling, RUN_MS, "a call took longer than run_max_ms"),
        (left, RUN_MS, "its work on the device took longer than run_max_ms"),
        (settling, RUN_MS, "its device fence was not reached within run_max_ms"),
        (fetching, RUN_MS, "a copy to host memory took longer than run_max_ms"),
    ],
)
def test_a_limit_that_is_kept_is_no_complaint_and_one_that_is_missed_is(
    made: Callable[[float], WorkerState], limit_ms: float, why: str
) -> None:
    assert time_limits().complaint(0, made(NOW_MS - limit_ms), NOW_MS) == ""
    assert time_limits().complaint(0, made(NOW_MS - limit_ms - 1), NOW_MS) == why


def test_a_worker_that_loads_may_be_silent_and_counts_as_one_that_answers() -> None:
    silent = worker_state(READY, 0.0)
    assert not time_limits().answers(silent, NOW_MS)
    for event in ("sleep", "slept", "wake"):
        silent.sleep.move(0, event)
    assert time_limits().complaint(0, silent, NOW_MS)  # its wake may have been lost
    silent.sleep.begin(0)
    assert time_limits().complaint(0, silent, NOW_MS) == "" and time_limits().answers(silent, NOW_MS)


def test_work_behind_a_step_that_falls_asleep_does_not_time_out() -> None:
    one = settling(0.0)
    one.sleep.move(0, "sleep")
    assert time_limits().complaint(0, one, NOW_MS) == ""


def test_a_worker_about_to_be_killed_answers_no_more() -> None:
    doomed, called = worker_state(), worker_state(STARTING)
    doomed.why = "a call took longer than run_max_ms"
    called.woken = True
    assert time_limits().answers(worker_state(), NOW_MS)
    assert not time_limits().answers(doomed, NOW_MS) and not time_limits().answers(worker_state(STARTING), NOW_MS)
    assert time_limits().answers(called, NOW_MS) and time_limits().answers(worker_state(LEAVING, 0.0), NOW_MS)
