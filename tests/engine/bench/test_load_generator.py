"""How a load is driven: callers that wait, arrivals that do not, and an account of every request whatever happens."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.engine.loads import one_request
from weftline.engine.bench import load_generator as driving
from weftline.engine.bench.load import run_closed, run_open
from weftline.engine.bench.load_generator import LoadGenerator
from weftline.engine.bench.outcome import RequestOutcome
from weftline.errors import LimitReached, StepError


class Server:
    """Answers after `ms` milliseconds; notes how many it holds at a time and what it was given."""

    def __init__(self, ms: float = 5.0) -> None:
        self.ms = ms
        self.open = self.most = 0
        self.given: list[tuple[dict, float | None]] = []

    async def __call__(self, inputs: Mapping[str, Any], deadline_ms: float | None) -> Any:
        self.given.append((dict(inputs), deadline_ms))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(self.ms / 1000)
        finally:
            self.open -= 1
        return one_request()


def number(at: int) -> dict[str, int]:
    return {"number": at}


def test_a_closed_load_has_as_many_open_requests_as_callers() -> None:
    server = Server()
    run = LoadGenerator(server, number, None)
    assert asyncio.run(run.closed(3, 100)) == ""
    assert server.most == 3
    assert len(run.outcomes) == len(server.given) > 6
    assert [inputs["number"] for inputs, _ in server.given] == list(range(len(server.given)))
    assert all(one.ok and one.latency_ms >= 5 and one.timings == one_request().timings for one in run.outcomes)


@pytest.mark.slow
def test_an_open_load_does_not_wait_for_answers() -> None:
    server = Server(ms=200)
    run = LoadGenerator(server, number, None)
    asyncio.run(run.open(iter([0.0, 10.0, 10.0, 20.0])))
    assert server.most == 4
    sent = [one.sent_ms - run.start_ms for one in sorted(run.outcomes, key=lambda one: one.sent_ms)]
    assert sent == pytest.approx([0, 10, 10, 20])
    assert max(one.late_ms for one in run.outcomes) < 150


@pytest.mark.slow
def test_latency_counts_from_the_intended_moment_and_the_deadline_too() -> None:
    given = []

    async def blocks(inputs: Mapping[str, Any], deadline_ms: float | None) -> None:
        given.append(deadline_ms)
        time.sleep(0.03)  # the whole load stands still

    run = LoadGenerator(blocks, number, 100.0)
    asyncio.run(run.open(iter([0.0, 5.0])))
    first, second = run.outcomes
    assert second.sent_ms - first.sent_ms == pytest.approx(5)
    assert second.late_ms >= 20 and second.latency_ms >= 50
    assert given[1] == pytest.approx(100 - second.late_ms)


@pytest.mark.slow
def test_errors_are_outcomes_with_what_is_known_of_them() -> None:
    async def fails(inputs: Mapping[str, Any], deadline_ms: float | None) -> None:
        error = StepError("no luck", "see") if inputs["number"] else ValueError("odd")
        error.timings = one_request().timings  # type: ignore[union-attr]
        raise error

    run = LoadGenerator(fails, number, None)
    asyncio.run(run.open(iter([0.0, 1.0])))
    assert [(one.ok, one.error, one.message) for one in run.outcomes] == [
        (False, "ValueError", "odd"), (False, "StepError", "step see: no luck"),
    ]  # fmt: skip
    assert run.outcomes[1].timings == one_request().timings


@pytest.mark.slow
def test_a_refused_caller_waits_for_retry_after() -> None:
    async def refuses(inputs: Mapping[str, Any], deadline_ms: float | None) -> None:
        raise LimitReached("full", retry_after_s=0.04)

    run = LoadGenerator(refuses, number, None)
    asyncio.run(run.closed(1, 100))
    assert 1 <= len(run.outcomes) <= 3


@pytest.mark.slow
def test_a_load_ends_after_so_many_measured_requests() -> None:
    run = LoadGenerator(Server(ms=1), number, None)
    asyncio.run(run.closed(2, 10_000, warm_up_ms=50, requests_max=7))
    measured = [one for one in run.outcomes if one.sent_ms >= run.start_ms + 50]
    assert len(measured) == 7 < len(run.outcomes)


@pytest.mark.slow
def test_an_open_load_holds_so_many_requests_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "OPEN_MAX", 2)
    server = Server(ms=50)
    run = LoadGenerator(server, number, None)
    asyncio.run(run.open(iter([0.0, 1.0, 2.0])))
    assert server.most == 2
    assert sorted(one.error for one in run.outcomes) == ["", "", "LimitReached"]


@pytest.mark.slow
def test_requests_open_at_the_end_are_cancelled_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "DRAIN_S", 0.05)
    server = Server(ms=60_000)
    run = LoadGenerator(server, number, None)
    assert asyncio.run(run.closed(2, 20)) == "2 requests had not ended 0.05 s after the last was sent"
    assert server.open == 0
    assert [one.error for one in run.outcomes] == ["RequestCancelled"] * 2
    assert (
        asyncio.run(LoadGenerator(server, number, None).open(iter([0.0])))
        == "1 requests had not ended 0.05 s after the last was sent"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed", "open"])
def test_an_interrupted_load_keeps_what_was_measured(kind: str) -> None:
    answer = Server(ms=1)

    async def interrupts(inputs: Mapping[str, Any], deadline_ms: float | None) -> Any:
        if inputs["number"] == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return await answer(inputs, deadline_ms)

    run = LoadGenerator(interrupts, number, None)
    started = time.monotonic()
    load = run.closed(1, 20_000) if kind == "closed" else run.open(float(at) for at in range(0, 20_000, 5))
    assert asyncio.run(load) == "interrupted"
    assert 20 <= len(run.outcomes) < 1000
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_progress_is_reported_and_nothing_stays_frozen() -> None:
    progress_calls: list[tuple[float, int]] = []
    before = gc.get_freeze_count()
    run = LoadGenerator(Server(ms=1), number, None, lambda share, ended: progress_calls.append((share, ended)))
    asyncio.run(run.closed(1, 600))
    assert progress_calls == sorted(progress_calls) and len(progress_calls) <= 2
    assert 0.3 < progress_calls[0][0] <= 1 and progress_calls[0][1] > 0
    assert gc.get_freeze_count() <= before


# any function


@pytest.mark.slow
def test_a_function_can_be_loaded_as_a_session_is() -> None:
    running = most = 0
    counting = threading.Lock()

    def plain(inputs: Mapping[str, Any]) -> str:
        nonlocal running, most
        with counting:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with counting:
            running -= 1
        return "answer"

    async def quick(inputs: Mapping[str, Any]) -> str:
        return "answer"

    outcomes = run_open(plain, [float(at) for at in range(50)], number)
    assert most > 4, "calls of a plain function run side by side"
    assert [one.ok for one in outcomes] == [True] * 50
    assert all(isinstance(one, RequestOutcome) and one.latency_ms >= 50 for one in outcomes)
    assert [one.ok for one in run_open(quick, [0.0, 1.0], number)] == [True] * 2
    assert all(one.ok for one in run_closed(quick, 2, number, duration_s=0.05))
