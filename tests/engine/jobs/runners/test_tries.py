"""What becomes of a row by how its calls ended: a script of errors and times, and what is decided."""

from __future__ import annotations

import pytest

from weftline.engine.jobs.rows import RowError
from weftline.engine.jobs.runners.server_flow import LONGEST_S, REFUSALS_MAX, Retry, RetryPolicy, ServerActivity
from weftline.errors import (
    AccessDenied,
    DeadlineExceeded,
    InputError,
    JobChanged,
    LimitReached,
    ModelError,
    RequestCancelled,
    SessionClosed,
    StepError,
    Unavailable,
    UnknownModel,
    WeftlineError,
)

GONE = Unavailable("cannot reach a server at localhost:1")
FULL = LimitReached("256 requests are open; limits.requests_max is 256", 0.25)


@pytest.mark.parametrize(
    ("error", "meant"),
    [
        (InputError("input x: wants text, got 5"), RowError("", "InputError", "input x: wants text, got 5")),
        (StepError("RuntimeError: no", "only"), RowError("only", "StepError", "RuntimeError: no")),
        (DeadlineExceeded("step slow: took over 5 ms"), RowError("slow", "DeadlineExceeded", "took over 5 ms")),
        (LimitReached("the inputs take 9 bytes; limits.request_bytes_max is 8"),
         RowError("", "LimitReached", "the inputs take 9 bytes; limits.request_bytes_max is 8")),
        (ModelError("no such adapter"), RowError("", "ModelError", "no such adapter")),
        (WeftlineError("internal error"), RowError("", "WeftlineError", "internal error")),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_its_error(error: WeftlineError, meant: RowError) -> None:
    assert RetryPolicy().after(error, ServerActivity(), 0.0) == meant


@pytest.mark.parametrize("error", [UnknownModel("m"), AccessDenied("no"), JobChanged("x"), SessionClosed("closed")])
def test_what_no_row_would_survive_ends_the_job(error: WeftlineError) -> None:
    with pytest.raises(type(error)):
        RetryPolicy().after(error, ServerActivity(), 0.0)


def test_a_row_that_is_refused_for_now_waits_as_long_as_the_server_said() -> None:
    tries = RetryPolicy()
    assert [tries.after(FULL, ServerActivity(), float(now)) for now in range(50)] == [Retry(0.25, "half")] * 50


def test_a_row_that_never_passes_while_others_do_is_an_error_row() -> None:
    tries, activity = RetryPolicy(), ServerActivity()
    for now in range(REFUSALS_MAX - 1):
        activity.answer(float(now))
        assert isinstance(tries.after(FULL, activity, float(now)), Retry)
    activity.answer(50.0)
    activity.answer(50.0)
    found = tries.after(FULL, activity, 50.0)
    assert isinstance(found, RowError) and "requests_max" in found.reason and str(REFUSALS_MAX) in found.reason


def test_a_server_that_takes_nothing_for_long_ends_the_job() -> None:
    tries, activity = RetryPolicy(patience_s=10), ServerActivity()
    activity.answer(2.0)
    assert isinstance(tries.after(FULL, activity, 3.0), Retry)
    activity.answer(8.0)
    assert isinstance(tries.after(FULL, activity, 18.0), Retry), "ten seconds since the last answer"
    with pytest.raises(LimitReached, match=r"took no row for 10 s: 256 requests.*\n.*run the job again"):
        tries.after(FULL, activity, 18.1)


def test_a_server_that_is_gone_is_asked_less_and_less_often() -> None:
    tries, waits = RetryPolicy(), []
    for now in range(8):
        then = tries.after(GONE, ServerActivity(), float(now), chance=0.5)
        assert isinstance(then, Retry) and then.window == "first"
        waits.append(then.wait_s)
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_S, LONGEST_S]


def test_one_that_says_when_to_come_back_is_not_asked_sooner() -> None:
    draining = Unavailable("the server is shutting down")
    draining.retry_after_s = 1.0
    then = RetryPolicy().after(draining, ServerActivity(), 0.0)
    assert isinstance(then, Retry) and then.wait_s == 1.0
    assert isinstance(RetryPolicy().after(RequestCancelled("the call was cancelled"), ServerActivity(), 0.0), Retry)


def test_a_server_that_stays_away_ends_the_job() -> None:
    tries, activity = RetryPolicy(patience_s=300), ServerActivity()
    activity.answer(90.0)
    for now in (100.0, 250.0, 400.0):
        assert isinstance(tries.after(GONE, activity, now), Retry)
    with pytest.raises(Unavailable, match=r"no server for 300 s: cannot reach.*\n.*goes on where it stopped"):
        tries.after(GONE, activity, 401.0)


def test_an_outage_is_counted_from_the_last_sign_of_life() -> None:
    tries, activity = RetryPolicy(patience_s=300), ServerActivity()
    assert isinstance(tries.after(GONE, activity, 0.0), Retry)
    RetryPolicy().after(FULL, activity, 200.0)  # another row was told that the server is full: it is there
    assert isinstance(tries.after(GONE, activity, 450.0), Retry)


def test_a_row_that_meets_two_dying_workers_is_an_error_row() -> None:
    died = Unavailable("step see: its worker was killed by signal 9")
    tries = RetryPolicy()
    first = tries.after(died, ServerActivity(), 0.0)
    assert isinstance(first, Retry) and first.window == "same"
    assert tries.after(died, ServerActivity(), 1.0) == RowError(
        "see", "WorkerDied", "its worker was killed by signal 9"
    )
