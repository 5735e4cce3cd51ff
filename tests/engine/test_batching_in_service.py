"""Batches in real processes: which items share a call, and that answers do not depend on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import STEPS, Gate, ask, batches, builder, function, outputs, together
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, Source
from weftline.errors import StepError

Start = Callable[[Source], Session]


def shaped(batch: dict[str, Any]) -> Any:
    p = builder()
    step = p.step("s", f"{STEPS}:Shaped", x=p.input("x", "float32[T, 4]"), batch=batch)
    p.output("y", step.y)
    p.output("report", step.report)
    return p


def matrices(sizes: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.normal(size=(size, 4)).astype(np.float32) for size in sizes]


@pytest.mark.slow
def test_only_equal_shapes_share_a_call_where_the_step_says_so(start: Start) -> None:
    session = start(shaped({"items_max": 4, "wait_max_ms": 300, "shapes": "same"}))
    xs = matrices([3, 5, 3, 5, 3, 5, 3, 5])
    answers = together(session, [{"x": x} for x in xs])
    for x, answer in zip(xs, answers, strict=True):
        assert isinstance(answer, Result), answer
        np.testing.assert_array_equal(answer["y"], x * 2 + 1)
        assert answer["report"] == {"items": 4, "shape": [len(x), 4]}


@pytest.mark.slow
def test_padded_items_share_a_call_and_get_back_their_own_size(start: Start) -> None:
    session = start(shaped({"items_max": 6, "wait_max_ms": 300, "pad": {"T": [4, 8, 16]}}))
    alone = start(shaped({"items_max": 1}))
    xs = matrices([1, 3, 4, 2, 4, 1]) + matrices([9, 12, 16, 10, 11, 13]) + matrices([20, 20])
    answers = together(session, [{"x": x} for x in xs])
    for x, answer in zip(xs, answers, strict=True):
        assert isinstance(answer, Result), answer
        np.testing.assert_array_equal(answer["y"], alone.run(x=x)["y"])
    report = [answer["report"] for answer in answers if isinstance(answer, Result)]
    assert report[:6] == [{"items": 6, "shape": [4, 4]}] * 6
    assert report[6:12] == [{"items": 6, "shape": [16, 4]}] * 6
    assert report[12:] == [{"items": 2, "shape": [20, 4]}] * 2, "a size above the last is the batch's longest"


@pytest.mark.slow
def test_preferred_sizes_are_kept_to(start: Start) -> None:
    session = start(shaped({"items_max": 8, "wait_max_ms": 200, "sizes": [4], "shapes": "same"}))
    answers = together(session, [{"x": x} for x in matrices([3] * 10)])
    assert all(isinstance(answer, Result) for answer in answers)
    assert sorted(batches(answers)) == [2] * 2 + [4] * 8


@pytest.mark.slow
def test_a_batch_leaves_when_it_is_full_and_else_when_the_wait_is_over(start: Start) -> None:
    session = start(shaped({"items_max": 4, "wait_max_ms": 400, "shapes": "same"}))
    x = matrices([3])[0]
    began = time.monotonic()
    full = together(session, [{"x": x}] * 4)
    full_ms = (time.monotonic() - began) * 1000
    began = time.monotonic()
    session.run(x=x)
    alone_ms = (time.monotonic() - began) * 1000
    print(f"full after {full_ms:.0f} ms, alone after {alone_ms:.0f} ms")
    assert batches(full) == [4] * 4 and full_ms < 350 and alone_ms >= 395


@pytest.mark.slow
def test_a_deadline_that_is_nearer_than_the_wait_ends_the_wait(start: Start) -> None:
    session = start(shaped({"items_max": 8, "wait_max_ms": 20_000, "shapes": "same"}))
    x = matrices([3])[0]
    together(session, [{"x": x}] * 8)
    answers = []
    for _ in range(5):
        began = time.monotonic()
        answers.append(ask(session, RequestOptions(deadline_ms=400), x=x))
        took_ms = (time.monotonic() - began) * 1000
        print(f"ended {took_ms:.0f} ms into 400")
        assert 100 < took_ms < 1000
    answered = [answer for answer in answers if isinstance(answer, Result)]
    assert len(answered) >= 3, "it leaves some milliseconds before it must, which a busy machine may use up"
    for result in answered:
        (timing,) = result.timings
        assert timing.batch == 1 and timing.batch_wait_ms > 100, "a worker was free, and it waited for company"


@pytest.mark.slow
def test_adaptive_waiting_batches_under_load_and_not_for_a_single_request(start: Start) -> None:
    p = builder()
    batch = {"items_max": 8, "wait": "auto"}
    p.output("y", p.step("s", "echo", value=p.input("x", "text"), delay_ms=10, delay_item_ms=1, batch=batch).value)
    session = start(p)

    async def load(callers: int, rounds: int) -> list[int]:
        found: list[int] = []

        async def caller() -> None:
            for _ in range(rounds):
                found.extend(timing.batch for timing in (await session.arun(x="a")).timings)

        await asyncio.gather(*(caller() for _ in range(callers)))
        return found

    found = asyncio.run(load(16, 25))
    later = found[len(found) // 2 :]
    waits = [session.run(x="a").timings[0].batch_wait_ms for _ in range(10)]
    print(f"mean batch under load {sum(later) / len(later):.1f}; alone it waits {sorted(waits)[5]:.2f} ms")
    assert sum(later) / len(later) > 5
    assert sorted(waits)[5] < 5


@pytest.mark.slow
def test_instances_share_one_queue(start: Start, gate: Gate) -> None:
    p = builder()
    x = p.input("x", "text")
    p.output("y", p.step("s", f"{STEPS}:Gated", value=x, instances=2, batch={"items_max": 2}, **gate.options).value)
    session = start(p)
    assert len(session.pids()) == 2
    gate.close()

    async def script() -> list[Any]:
        asked = [asyncio.create_task(session.arun(x=f"t{place}")) for place in range(8)]
        while len(gate.calls()) < 2:
            await asyncio.sleep(0.002)
        gate.open()
        return list(await asyncio.gather(*asked))

    answers = asyncio.run(script())
    assert outputs(answers) == [f"t{place}" for place in range(8)]
    workers = {timing.worker for answer in answers for timing in answer.timings}
    assert workers == set(session.pids())


@pytest.mark.slow
def test_items_of_many_requests_lists_included_share_batches(start: Start, gate: Gate) -> None:
    p = builder()
    x, texts = p.input("x", "text"), p.input("texts", "list[text]")
    step = p.step("s", f"{STEPS}:Gated", value=texts, map="value", batch={"items_max": 8}, **gate.options)
    held = p.step("held", "echo", value=x)
    p.output("y", step.value)
    p.output("x", held.value)
    session = start(p)
    gate.close()

    async def script() -> list[Any]:
        asked = [asyncio.create_task(session.arun(x="x", texts=[f"{place}{at}" for at in range(3)])) for place in "abc"]
        while session.stats()["queued"]["s"] + sum(map(len, gate.calls())) < 9:
            await asyncio.sleep(0.002)
        gate.open()
        return list(await asyncio.gather(*asked))

    answers = asyncio.run(script())
    assert outputs(answers) == [[f"{place}{at}" for at in range(3)] for place in "abc"]
    assert any({value[0] for value in call} >= {"b", "c"} for call in gate.calls()), "two requests in one call"


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("whole", [False, True], ids=["the item", "the whole call"])
def test_seven_mates_of_a_bad_item_are_answered_as_if_alone(start: Start, whole: bool) -> None:
    p = builder()
    x = p.input("x", "float32[N]")
    batch = {"items_max": 8, "wait_max_ms": 500}
    named = function("all_lines", batched=True) if whole else function("line")
    p.output("y", p.step("s", "function", x=x, batch=batch, **named).output)
    q = builder("solo")
    alone = {"items_max": 1}
    q.output("y", q.step("s", "function", x=q.input("x", "float32[N]"), batch=alone, **named).output)
    session, solo = start(p), start(q)
    rng = np.random.default_rng(3)
    good = [rng.normal(size=6000).astype(np.float32) for _ in range(7)]
    bad = np.full(6000, np.nan, np.float32)
    answers = together(session, [{"x": one} for one in [*good[:5], bad, *good[5:]]])
    error = answers.pop(5)
    assert isinstance(error, StepError) and "not a number" in str(error)
    for one, answer in zip(good, answers, strict=True):
        assert isinstance(answer, Result)
        assert np.array_equal(answer["y"], solo.run(x=one)["y"])
    assert set(batches(answers)) <= ({8} if not whole else {1, 2, 4, 8})
    assert session.stats()["worker_deaths"] == 0


@pytest.mark.slow
def test_a_finite_step_fails_only_the_item_with_nan(start: Start) -> None:
    p = builder()
    x, batch = p.input("x", "float32[N]"), {"items_max": 8, "wait_max_ms": 500}
    p.output("y", p.step("s", "echo", value=x, type="float32[N]", batch=batch, finite=True).value)
    p.output("unseen", p.step("t", "echo", value=x, type="float32[N]").value)
    session = start(p)
    good = [np.full(6000, place, np.float32) for place in range(7)]
    bad = np.append(np.zeros(5999, np.float32), np.float32("nan"))
    answers = together(
        session, [{"x": one} for one in [*good[:5], bad, *good[5:]]], [RequestOptions(outputs=["y"])] * (len(good) + 1)
    )
    error = answers.pop(5)
    assert isinstance(error, StepError) and error.step == "s"
    assert "value: found NaN or an infinite number" in str(error)
    for one, answer in zip(good, answers, strict=True):
        assert isinstance(answer, Result)
        assert np.array_equal(answer["y"], one)
    assert set(batches(answers)) == {8}
    assert np.isnan(session.run(RequestOptions(outputs=["unseen"]), x=bad)["unseen"][-1]), "no check without the key"


@pytest.mark.slow
def test_memory_that_runs_out_halves_the_batch_and_later_ones_are_smaller(start: Start) -> None:
    p = builder()
    batch = {"items_max": 8, "wait_max_ms": 1000}
    x = p.input("x", "text")
    p.output("y", p.step("s", "fail", value=x, out_of_memory_above=2, batch=batch).value)
    session = start(p)
    requests = [{"x": f"t{place}"} for place in range(8)]
    sizes = []
    for _ in range(4):
        answers = together(session, requests)
        assert outputs(answers) == [request["x"] for request in requests]
        before = session.stats()
        sizes.append(max(batches(answers)))
    dispatched = session.stats()["dispatches"]
    answers = together(session, requests)
    assert session.stats()["dispatches"] - dispatched >= 4, "two at a time from now on"
    print(f"largest batch by round: {sizes}; {before['dispatches']} dispatches")
    assert max(batches(answers)) <= 2 and session.stats()["worker_deaths"] == 0
