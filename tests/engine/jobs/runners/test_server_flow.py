"""The window grows while nothing is refused, is halved by refusals, and never leaves its bounds."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.rows import RowError
from weftline.engine.jobs.runners.server_flow import (
    LONGEST_S,
    MOST,
    REFUSALS_MAX,
    START,
    Retry,
    RetryPolicy,
    ServerActivity,
    Window,
    WindowQueue,
)
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


def windowful(window: Window) -> list[int]:
    """Send until the window is full, and return the numbers."""
    numbers = []
    while not window.full:
        numbers.append(window.send())
    return numbers


def answer(window: Window, count: int) -> None:
    for _ in range(count):
        window.back(answered=True)
        windowful(window)


def test_it_starts_small_and_doubles_until_the_first_refusal() -> None:
    window = Window()
    assert len(windowful(window)) == START
    answer(window, START)
    assert window.open == 2 * START
    answer(window, 10 * MOST)
    assert window.open == MOST


def test_rows_that_are_refused_together_halve_it_once() -> None:
    window = Window(size=64)
    numbers = windowful(window)
    for number in numbers:
        window.refuse(number)
        window.back(answered=False)
    assert window.size == 32
    later = windowful(window)[0]
    window.refuse(later)
    assert window.size == 16


def test_after_a_refusal_it_grows_by_one_a_windowful() -> None:
    window = Window(size=32)
    window.refuse(windowful(window)[0])
    for _ in range(32):
        window.back(answered=False)
    windowful(window)
    answer(window, 17)
    assert int(window.size) == 17


def test_a_window_that_is_not_full_learns_nothing() -> None:
    window = Window()
    for _ in range(100):
        window.send()
        window.back(answered=True)
    assert window.size == START


def test_a_fixed_one_stays() -> None:
    window = Window(size=4, most=4, fixed=True)
    numbers = windowful(window)
    window.refuse(numbers[0])
    answer(window, 9)
    window.begin_again()
    assert (len(numbers), window.size, window.open) == (4, 4, 4)


def test_another_server_is_met_as_at_the_beginning() -> None:
    window = Window(size=100)
    numbers = windowful(window)
    window.refuse(numbers[0])
    window.begin_again()
    assert window.size == START and window.full
    for number in numbers:
        window.refuse(number)
        window.back(answered=False)
    assert window.size == START, "what was under way before says nothing of this one"


@given(st.lists(st.sampled_from(["send", "answer", "refuse", "again"]), max_size=300), st.integers(1, 40))
def test_it_never_leaves_its_bounds(moves: list[str], most: int) -> None:
    window, under_way = Window(size=min(START, most), most=most), list[int]()
    for move in moves:
        if move == "send" and not window.full:
            under_way.append(window.send())
        elif move == "answer" and under_way:
            under_way.pop(0)
            window.back(answered=True)
        elif move == "refuse" and under_way:
            window.refuse(under_way.pop(0))
            window.back(answered=False)
        elif move == "again":
            window.begin_again()
        assert 1 <= window.size <= most and window.open == len(under_way) <= most


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_rows_go_in_their_order_whenever_they_came() -> None:
    async def go() -> None:
        turns, gone = WindowQueue(Window(1, 1, fixed=True)), list[int]()

        async def row(order: int) -> None:
            number = await turns.acquire(order)
            gone.append(order)
            await settle()
            turns.release(number, answered=True)

        first = await turns.acquire(9)
        rows = [asyncio.create_task(row(order)) for order in (7, 3, 8, 1, 5)]
        await settle()
        turns.release(first, answered=True)
        await asyncio.gather(*rows)
        assert gone == [1, 3, 5, 7, 8]
        assert turns.window.open == 0

    asyncio.run(asyncio.wait_for(go(), 10))


def test_a_cancelled_row_does_not_change_the_order() -> None:
    async def go() -> None:
        turns = WindowQueue(Window(1, 1, fixed=True))
        number = await turns.acquire(0)
        waiting = [asyncio.create_task(turns.acquire(order)) for order in (1, 2, 3)]
        await settle()
        turns.release(number, answered=True)  # it is 1's turn, which is cancelled before it can take it
        waiting[0].cancel()
        waiting[2].cancel()
        assert await waiting[1] == 2
        assert turns.window.open == 1

    asyncio.run(asyncio.wait_for(go(), 10))


def test_row_ends_change_the_window() -> None:
    async def go() -> None:
        turns = WindowQueue(Window(4))
        numbers = [await turns.acquire(order) for order in range(4)]
        turns.release(numbers[0], False, Retry(0.1, "half"))
        assert turns.window.size == 2
        turns.release(numbers[1], False, Retry(0.1))
        assert turns.window.size == 2
        turns.release(numbers[2], False, Retry(0.1, "first"))
        assert turns.window.size == 8
        for _ in range(7):
            numbers.append(await turns.acquire(4))
        turns.release(numbers[3], answered=True)
        assert (turns.window.size, turns.window.open) == (9, 7)

    asyncio.run(asyncio.wait_for(go(), 10))


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


def test_a_refused_row_waits_for_the_pause_of_the_server() -> None:
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
    with pytest.raises(LimitReached, match=r"accepted no row for 10 s: 256 requests.*\n.*run the job again"):
        tries.after(FULL, activity, 18.1)


def test_a_server_that_is_gone_is_asked_less_and_less_often() -> None:
    tries, waits = RetryPolicy(), []
    for now in range(8):
        then = tries.after(GONE, ServerActivity(), float(now), chance=0.5)
        assert isinstance(then, Retry) and then.window == "first"
        waits.append(then.wait_s)
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_S, LONGEST_S]


def test_retries_respect_the_pause_of_the_server() -> None:
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
    with pytest.raises(Unavailable, match=r"no server for 300 s: cannot reach.*\n.*resumes where it stopped"):
        tries.after(GONE, activity, 401.0)


def test_an_outage_is_counted_from_the_last_sign_of_life() -> None:
    tries, activity = RetryPolicy(patience_s=300), ServerActivity()
    assert isinstance(tries.after(GONE, activity, 0.0), Retry)
    RetryPolicy().after(FULL, activity, 200.0)  # another row was refused: the server is up
    assert isinstance(tries.after(GONE, activity, 450.0), Retry)


def test_a_row_that_meets_two_dying_workers_is_an_error_row() -> None:
    died = Unavailable("step see: its worker was killed by signal 9")
    tries = RetryPolicy()
    first = tries.after(died, ServerActivity(), 0.0)
    assert isinstance(first, Retry) and first.window == "same"
    assert tries.after(died, ServerActivity(), 1.0) == RowError(
        "see", "WorkerDied", "its worker was killed by signal 9"
    )
