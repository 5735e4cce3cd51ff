"""How long a worker may be silent or busy: each limit just kept, and just missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.desk import plan_of
from weftline.engine.crew.member import Dispatch, WorkerState
from weftline.engine.crew.patience import LEAVE_MAX_MS, OPEN_MAX_MS, Patience
from weftline.engine.crew.supervisor import LEAVING, READY, STARTING, RestartPolicy, Restarts
from weftline.engine.crew.unfinished import Unfinished
from weftline.engine.scheduling.routes import Unit
from weftline.pipelines.builder import Builder

NOW_MS, RUN_MS, SILENCE_MS = 10_000_000.0, 5_000.0, 3_000.0
UNIT = Unit(0, 0, (0,), (), (), ())


def patience() -> Patience:
    p = Builder("one", limits={"silence_max_ms": SILENCE_MS})
    p.output("y", p.step("a", "echo", value=p.input("x", "text"), run_max_ms=RUN_MS).value)
    return Patience(plan_of(p), [(0,)])


def member(state: str = READY, heard_ms: float = NOW_MS) -> WorkerState:
    return WorkerState(Restarts(RestartPolicy(), 0), "w", state, True, heard_ms=heard_ms)


def calling(since_ms: float) -> WorkerState:
    one = member()
    one.running = [Dispatch(1, UNIT, [], [], since_ms, RUN_MS)]
    return one


def left(since_ms: float) -> WorkerState:
    one = member()
    one.unfinished = {1: Unfinished(1, UNIT, (), frozenset(), (), (-1, 0, 0), since_ms, RUN_MS)}
    return one


def settling(since_ms: float) -> WorkerState:
    one = member()
    one.settles = {7: since_ms, 8: NOW_MS}
    return one


def fetching(since_ms: float) -> WorkerState:
    one = member()
    one.fetches = {7: 0.0}
    one.free_ms = since_ms  # it comes to them once it is free
    return one


@pytest.mark.parametrize(
    ("made", "limit_ms", "why"),
    [
        (lambda since: member(STARTING, since), OPEN_MAX_MS, "it said nothing for 1800 s while opening"),
        (lambda since: member(LEAVING, since), LEAVE_MAX_MS, "it did not close its nodes within 2 s"),
        (lambda since: member(READY, since), SILENCE_MS, "it gave no sign of life for 3 s"),
        (calling, RUN_MS, "it was busy for longer than run_max_ms"),
        (left, RUN_MS, "its device was busy for longer than run_max_ms"),
        (settling, RUN_MS, "its device did not settle within run_max_ms"),
        (fetching, RUN_MS, "it did not copy to host memory what was asked for within run_max_ms"),
    ],
)
def test_a_limit_that_is_kept_is_no_complaint_and_one_that_is_missed_is(
    made: Callable[[float], WorkerState], limit_ms: float, why: str
) -> None:
    assert patience().complaint(0, made(NOW_MS - limit_ms), NOW_MS) == ""
    assert patience().complaint(0, made(NOW_MS - limit_ms - 1), NOW_MS) == why


def test_a_worker_that_loads_may_be_silent_and_counts_as_one_that_answers() -> None:
    silent = member(READY, 0.0)
    assert not patience().answers(silent, NOW_MS)
    for event in ("sleep", "slept", "wake"):
        silent.rest.move(0, event)
    assert patience().complaint(0, silent, NOW_MS)  # told to wake, it may have been lost before it came to that
    silent.rest.begin(0)
    assert patience().complaint(0, silent, NOW_MS) == "" and patience().answers(silent, NOW_MS)


def test_while_a_step_is_on_its_way_to_sleep_what_stands_still_behind_it_is_not_held_against_its_worker() -> None:
    one = settling(0.0)
    one.rest.move(0, "sleep")
    assert patience().complaint(0, one, NOW_MS) == ""


def test_a_worker_about_to_be_killed_answers_no_more_and_one_that_was_called_will() -> None:
    doomed, called = member(), member(STARTING)
    doomed.why = "it was busy for longer than run_max_ms"
    called.called = True
    assert patience().answers(member(), NOW_MS)
    assert not patience().answers(doomed, NOW_MS) and not patience().answers(member(STARTING), NOW_MS)
    assert patience().answers(called, NOW_MS) and patience().answers(member(LEAVING, 0.0), NOW_MS)
