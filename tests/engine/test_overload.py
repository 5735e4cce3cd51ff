"""More than the system can do: what is refused, how soon, and what becomes of the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import STEPS, Gate, ask, builder, function, outputs, settled, together, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, Source
from weftline.errors import DeadlineExceeded, LimitReached, StepError, WeftlineError

Start = Callable[[Source], Session]


def gated(gate: Gate, limits: dict[str, Any] | None = None, slo: dict[str, Any] | None = None, **more: Any) -> Any:
    p = builder(slo=slo, **(limits or {}))
    p.output("y", p.step("s", f"{STEPS}:Gated", value=p.input("x", "text"), **gate.options, **more).value)
    return p


def test_a_request_over_the_limit_is_refused_with_a_retry_time(start: Start, gate: Gate) -> None:
    session = start(gated(gate, {"requests_max": 8}, batch={"items_max": 1}))
    gate.close()
    with ThreadPoolExecutor(8) as callers:
        inside = [callers.submit(ask, session, x=f"t{place}") for place in range(8)]
        wait_until(lambda: session.stats()["requests"]["open"] == 8)
        took_ms = []
        for _ in range(200):
            began = time.monotonic()
            with pytest.raises(LimitReached, match="requests_max is 8") as refusal:
                session.run(x="too many")
            took_ms.append((time.monotonic() - began) * 1000)
            assert 0 < refusal.value.retry_after_s <= 5
        took_ms.sort()
        print(f"refusals: p50 {took_ms[100]:.3f} ms, p99 {took_ms[198]:.3f} ms")
        assert took_ms[100] < 10 and took_ms[198] < 200
        gate.open()
        assert outputs([one.result(20) for one in inside]) == [f"t{place}" for place in range(8)]
    assert session.run(x="again")["y"] == "again" and "too many" not in gate.seen()


@pytest.mark.slow
def test_the_bytes_of_open_requests_are_a_limit_too(start: Start) -> None:
    p = builder(open_bytes_max=1_000_000)
    p.output("y", p.step("s", "echo", value=p.input("x", "float32[N]"), type="float32[N]", delay_ms=300).value)
    session = start(p)
    x = np.zeros(100_000, np.float32)
    answers = together(session, [{"x": x}] * 5)
    refused = [answer for answer in answers if isinstance(answer, LimitReached)]
    assert len(refused) == 3 and all("open_bytes_max is 1000000" in str(error) for error in refused)
    assert session.stats()["requests"]["ok"] == 2


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("times", [2, 5])
def test_overload_keeps_goodput_and_leaves_nothing_stuck(start: Start, times: int) -> None:
    p = builder(requests_max=64)
    x = p.input("x", "text")
    batch = {"items_max": 4}
    first = p.step("a", "echo", value=x, delay_ms=10, batch=batch)
    p.output("y", p.step("b", "echo", value=first.value, delay_ms=20, batch=batch).value)
    session = start(p)

    async def peak() -> float:
        done = 0
        until = time.monotonic() + 1.5

        async def caller() -> None:
            nonlocal done
            while time.monotonic() < until:
                await session.arun(RequestOptions(deadline_ms=500), x="a")
                done += 1

        began = time.monotonic()
        await asyncio.gather(*(caller() for _ in range(12)))
        return done / (time.monotonic() - began)

    async def storm(rate: float, seconds: float) -> tuple[list[float], list[float], list[WeftlineError]]:
        good, refusals, others = [], [], list[WeftlineError]()

        async def one() -> None:
            began = time.monotonic()
            try:
                await session.arun(RequestOptions(deadline_ms=500), x="a")
                good.append(time.monotonic() - began)
            except LimitReached:
                refusals.append(time.monotonic() - began)
            except WeftlineError as error:
                others.append(error)

        tasks = []
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            while len(tasks) < now * rate:
                tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(0.002)
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        return good, refusals, others

    best = asyncio.run(peak())
    good, refusals, others = asyncio.run(storm(best * times, 3.0))
    goodput = len(good) / 3.0
    slowest_ms = sorted(refusals)[int(len(refusals) * 0.99)] * 1000 if refusals else 0.0
    print(
        f"{times}x of {best:.0f}/s: {goodput:.0f}/s good, {len(refusals)} refused (p99 {slowest_ms:.2f} ms), "
        f"{len(others)} too late, slowest answer {max(good) * 1000:.0f} ms"
    )
    assert all(isinstance(error, DeadlineExceeded) for error in others), others[:3]
    assert goodput >= 0.7 * best
    assert slowest_ms < 200
    began = time.monotonic()
    assert session.run(RequestOptions(deadline_ms=5000), x="after")["y"] == "after"
    assert time.monotonic() - began < 1, "it recovers at once"


@pytest.mark.slow
def test_one_limit_counts_over_all_steps_and_lists(start: Start) -> None:
    p = builder(requests_max=4)
    x = p.input("x", "list[text]")
    each = p.step("each", "echo", value=x, map="value", delay_ms=5, batch={"items_max": 4})
    p.output("y", p.step("again", "echo", value=each.value, map="value", delay_ms=5, batch={"items_max": 4}).value)
    session = start(p)
    wanted = [[f"{place} {item}" for item in range(20)] for place in range(12)]
    answers = together(session, [{"x": one} for one in wanted])
    assert [answer["y"] for answer in answers if isinstance(answer, Result)] == wanted[:4]
    assert [type(answer) for answer in answers[4:]] == [LimitReached] * 8


@pytest.mark.slow
def test_a_list_that_is_too_long_fails_alone(start: Start) -> None:
    p = builder(map_items_max=10)
    p.output("y", p.step("s", "echo", value=p.input("x", "list[text]"), map="value").value)
    session = start(p)
    answers = together(session, [{"x": ["a"] * 11}, {"x": ["a"] * 10}, {"x": []}])
    assert isinstance(answers[0], StepError) and "limits.map_items_max is 10" in str(answers[0])
    assert outputs(answers[1:]) == [["a"] * 10, []]


# deadlines


@pytest.mark.slow
def test_a_deadline_shorter_than_the_queue_ends_on_time_without_a_call(start: Start, gate: Gate) -> None:
    session = start(gated(gate, batch={"items_max": 1}))
    gate.close()
    with ThreadPoolExecutor(10) as callers:
        running = callers.submit(ask, session, x="running")
        wait_until(lambda: gate.seen() == ["running"])

        def timed(deadline_ms: float) -> float:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                session.run(RequestOptions(deadline_ms=deadline_ms), x="late")
            return (time.monotonic() - began) * 1000 - deadline_ms

        off_ms = sorted(callers.map(timed, [100.0 + 30 * place for place in range(9)]))
        print(f"ends {off_ms[0]:.1f} to {off_ms[-1]:.1f} ms after the deadline, median {off_ms[4]:.1f}")
        assert off_ms[0] > -2 and off_ms[4] < 20 and off_ms[-1] < 150
        gate.open()
        assert outputs([running.result(20)]) == ["running"]
    assert session.run(x="after")["y"] == "after"
    assert gate.seen() == ["running", "after"]
    assert session.stats()["requests"]["expired"] == 9


@pytest.mark.slow
def test_a_deadline_that_measured_times_rule_out_is_refused_early(start: Start, gate: Gate) -> None:
    p = builder()
    slow = p.step("slow", "echo", value=p.input("x", "text"), delay_ms=150)
    p.output("y", p.step("s", f"{STEPS}:Gated", value=slow.value, **gate.options).value)
    session = start(p)
    for _ in range(4):
        session.run(x="learn")
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"needs about \d+ ms and has \d+ ms left; it was not started"):
        session.run(RequestOptions(deadline_ms=80), x="hopeless")
    took_ms = (time.monotonic() - began) * 1000
    print(f"refused after {took_ms:.2f} ms")
    assert took_ms < 70
    assert "hopeless" not in gate.seen() and session.stats()["items"] == 8
    assert session.run(RequestOptions(deadline_ms=5000), x="enough time")["y"] == "enough time"


@pytest.mark.slow
def test_the_second_step_sees_what_the_first_has_left(start: Start) -> None:
    p = builder()
    first = p.step("a", "function", text=p.input("x", "text"), **function("left"))
    p.output("y", p.step("b", "function", before=first.output, **function("left_again")).output)
    session = start(p)
    assert session.run(x="a")["y"] == {"first": None, "second": None}
    seen = session.run(RequestOptions(deadline_ms=4000), x="a")["y"]
    assert 3000 < seen["first"] <= 4000 and seen["second"] <= seen["first"] - 50


@pytest.mark.slow
def test_a_pipelines_own_deadline_is_that_of_requests_that_bring_none(start: Start, gate: Gate) -> None:
    session = start(gated(gate, {"deadline_ms": 200}))
    gate.close()
    with pytest.raises(DeadlineExceeded):
        session.run(x="a")
    gate.open()
    assert gate.calls("left_ms")[0][0] <= 200


def test_a_request_beyond_the_latency_objective_is_answered_and_counted(start: Start) -> None:
    p = builder(slo={"latency_p99_ms": 20})
    p.output("y", p.step("a", "echo", value=p.input("x", "text"), delay_ms=40).value)
    session = start(p)
    assert session.run(x="late")["y"] == "late"
    found = session.stats()["slo"]
    assert (found["latency_p99_ms"], found["answers"], found["over"], found["met"]) == (20, 1, 1, False)
    assert found["recent_p99_ms"] >= 40
    with pytest.raises(DeadlineExceeded):
        session.run(RequestOptions(deadline_ms=20), x="fails")
    assert session.stats()["slo"]["answers"] == 1


# priorities


@pytest.mark.slow
def test_a_flood_of_low_priority_does_not_hold_up_a_high_one(start: Start, gate: Gate) -> None:
    session = start(gated(gate, batch={"items_max": 4}))
    gate.close()
    with ThreadPoolExecutor(60) as callers:
        first = callers.submit(ask, session, x="first")
        wait_until(lambda: gate.seen() == ["first"])
        flood = [callers.submit(ask, session, RequestOptions(priority=-50), x=f"low {place}") for place in range(50)]
        wait_until(lambda: session.stats()["requests"]["open"] == 51)
        high = callers.submit(ask, session, RequestOptions(priority=50), x="high")
        wait_until(lambda: session.stats()["requests"]["open"] == 52)
        gate.open()
        assert outputs([first.result(20), high.result(20)]) == ["first", "high"]
        assert all(isinstance(one.result(20), Result) for one in flood)
    place = next(place for place, call in enumerate(gate.calls()) if "high" in call)
    print(f"the urgent one was in call {place} of {len(gate.calls())}")
    assert place == 1, "it went with the first batch after the one that was running"
    assert gate.calls("priority")[1][0] == 50


@pytest.mark.slow
def test_nothing_starves_under_a_flood_of_higher_priority(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "echo", value=p.input("x", "text"), delay_ms=5, batch={"items_max": 2}).value)
    session = start(p)

    async def script() -> float:
        stop = False

        async def flood() -> None:
            while not stop:
                await session.arun(RequestOptions(priority=5), x="high")

        tasks = [asyncio.create_task(flood()) for _ in range(12)]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        answer = await asyncio.wait_for(session.arun(RequestOptions(priority=0), x="low"), 20)
        took_s = time.monotonic() - began
        assert answer["y"] == "low"
        stop = True
        await asyncio.gather(*tasks)
        return took_s

    took_s = asyncio.run(script())
    print(f"answered after {took_s:.2f} s; five levels are worth one second")
    assert took_s < 5


# retries


@pytest.mark.slow
def test_a_step_that_always_fails_is_tried_again_within_its_budget(start: Start) -> None:
    p = builder()
    x = p.input("x", "text")
    p.output("y", p.step("s", "fail", value=x, every=1, retry={"attempts": 3}).value)
    session = start(p)
    requests = 600
    answers = [answer for _ in range(10) for answer in together(session, [{"x": "a"}] * (requests // 10))]
    assert all(isinstance(answer, StepError) for answer in answers)
    items = session.stats()["items"]
    long_run = (items - 10) / requests
    print(f"{requests} requests, {items} attempts: {items / requests:.3f} each, {long_run:.3f} in the long run")
    assert requests < items <= 1.1 * requests + 10, "a tenth, and the ten that anybody may begin with"


@pytest.mark.slow
def test_without_any_budget_nothing_is_tried_again(start: Start) -> None:
    p = builder(retry_share=0.0)
    p.output("y", p.step("s", "fail", value=p.input("x", "text"), every=2, retry=3).value)
    session = start(p)
    assert outputs([ask(session, x="a") for _ in range(6)]) == ["a", "StepError"] * 3
    assert session.stats()["retried"] == 0


# memory


@pytest.mark.slow
def test_a_full_arena_makes_workers_wait_and_refuses_no_request(start: Start) -> None:
    p = builder(arena_bytes=1 << 20)
    x = p.input("x", "float32[N]")
    first = p.step("a", "function", x=x, batch={"items_max": 2}, **function("copied"))
    second = p.step("b", "function", x=first.output, batch={"items_max": 2}, **function("copied"))
    p.output("y", p.step("c", "echo", value=second.output, type="float32[N]", delay_ms=5, batch={"items_max": 1}).value)
    session = start(p)
    sizes = [20_000 + 1_000 * (place * 7 % 41) for place in range(300)]
    refused = 0

    def insist(size: int) -> np.ndarray:
        """Retry until admission; an admitted request is not refused."""
        nonlocal refused
        while True:
            answer = ask(session, x=np.full(size, size, np.float32))
            if isinstance(answer, Result):
                return np.asarray(answer["y"])
            assert isinstance(answer, LimitReached) and "not enough free shared memory for inputs" in str(answer), (
                answer
            )
            refused += 1
            time.sleep(0.002)

    with ThreadPoolExecutor(12) as callers:
        for size, y in zip(sizes, callers.map(insist, sizes), strict=True):
            assert y.shape == (size,) and (y == size + 2).all()
    print(f"{len(sizes)} answered, {refused} times no room on arrival")
    wait_until(lambda: settled(session), 10)
    whole = np.ones(200_000, np.float32)
    assert session.run(x=whole)["y"].sum() == 600_000, "nothing is fragmented when nothing is held"


@pytest.mark.slow
@pytest.mark.parametrize("callers", [2, 8, 64])
def test_a_timeout_of_a_step_keeps_goodput_for_any_number_of_callers(start: Start, callers: int) -> None:
    p = builder()
    step = p.step("s", "echo", value=p.input("x", "text"), delay_ms=100, timeout_ms=150, batch={"items_max": 1})
    p.output("y", step.value)
    session = start(p)
    for _ in range(4):
        session.run(x="a")
    until = time.monotonic() + 3.0

    def call(_: int) -> int:
        good = 0
        while time.monotonic() < until:
            try:
                session.run(x="a")
                good += 1
            except DeadlineExceeded:
                time.sleep(0.01)
        return good

    with ThreadPoolExecutor(callers) as pool:
        good = sum(pool.map(call, range(callers)))
    print(f"{callers} callers: {good / 3:.1f}/s good")
    assert good >= 15  # of 30; it was 3
