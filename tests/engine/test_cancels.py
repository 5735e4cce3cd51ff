"""Requests cancelled at any stage: others are not affected, and what they held is free again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import STEPS, Gate, builder, function, settled, wait_until
from weftline.engine.session import Session, Source
from weftline.errors import WeftlineError

Start = Callable[[Source], Session]


class Asked:
    """A request that was asked for in a task, and can be given up."""

    def __init__(self, session: Session, **request: Any) -> None:
        self._task = asyncio.create_task(self._ask(session, request))

    async def _ask(self, session: Session, request: dict[str, Any]) -> Any:
        return (await session.arun(**request))["y"]

    async def give_up(self) -> None:
        self._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._task

    async def answer(self) -> Any:
        return await asyncio.wait_for(self._task, 20)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until the condition holds, and let other tasks run meanwhile."""
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.002)


def gated(gate: Gate, **more: Any) -> Any:
    p = builder()
    p.output("y", p.step("s", f"{STEPS}:Gated", value=p.input("x", "text"), **gate.options, **more).value)
    return p


@pytest.mark.slow
def test_what_waits_in_the_queue_never_reaches_the_model(start: Start, gate: Gate) -> None:
    session = start(gated(gate, batch={"items_max": 1}))
    gate.close()

    async def script() -> None:
        first = Asked(session, x="first")
        await until(lambda: gate.seen() == ["first"])
        second, third = Asked(session, x="second"), Asked(session, x="third")
        await until(lambda: session.stats()["requests"]["open"] == 3)
        began = time.monotonic()
        await second.give_up()
        assert time.monotonic() - began < 1 and session.stats()["requests"]["open"] == 2
        gate.open()
        assert await first.answer() == "first" and await third.answer() == "third"

    asyncio.run(script())
    assert gate.seen() == ["first", "third"]
    assert session.stats()["requests"]["cancelled"] == 1


@pytest.mark.slow
def test_one_that_waits_for_company_leaves_the_others_to_go_without_it(start: Start, gate: Gate) -> None:
    session = start(gated(gate, batch={"items_max": 3, "wait_max_ms": 60_000}))

    async def script() -> None:
        asked = [Asked(session, x=text) for text in ("one", "two")]
        await until(lambda: session.stats()["queued"]["s"] == 2)
        await asked[0].give_up()
        more = [Asked(session, x=text) for text in ("three", "four")]
        assert [await one.answer() for one in (asked[1], *more)] == ["two", "three", "four"]

    asyncio.run(script())
    assert gate.calls() == [["two", "three", "four"]]


@pytest.mark.slow
def test_what_was_sent_ahead_to_a_worker_that_is_busy_is_left_out(start: Start, gate: Gate) -> None:
    session = start(gated(gate, batch={"items_max": 1}))
    for _ in range(20):  # it learns that the step is quick, and gives its worker a second message from now on
        session.run(x="quick")
    before = len(gate.seen())
    gate.close()

    async def script() -> None:
        first = Asked(session, x="first")
        await until(lambda: len(gate.seen()) == before + 1)
        second = Asked(session, x="second")
        await until(lambda: session.stats()["dispatches"] == before + 2)
        await second.give_up()
        gate.open()
        assert await first.answer() == "first"
        assert await Asked(session, x="third").answer() == "third"

    asyncio.run(script())
    assert gate.seen()[before:] == ["first", "third"]


@pytest.mark.slow
def test_a_running_node_can_ask_and_stops_early(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "function", text=p.input("x", "text"), **function("patient")).output)
    session = start(p)

    async def script() -> float:
        first = Asked(session, x="first")
        await until(lambda: session.stats()["dispatches"] == 1)
        await first.give_up()
        return time.monotonic()

    gone = asyncio.run(script())
    wait_until(lambda: settled(session), 10)
    took_s = time.monotonic() - gone
    print(f"the worker stopped {took_s * 1000:.0f} ms after the cancel")
    assert took_s < 5, "its call would take a minute"


@pytest.mark.slow
def test_mates_of_a_cancelled_item_get_their_answers(start: Start, gate: Gate) -> None:
    session = start(gated(gate, gives_up=True, batch={"items_max": 2, "wait_max_ms": 5000}))
    gate.close()

    async def script() -> None:
        one, two = Asked(session, x="one"), Asked(session, x="two")
        await until(lambda: gate.calls() == [["one", "two"]])
        await one.give_up()
        await asyncio.sleep(0.1)
        gate.open()
        assert await two.answer() == "two"

    asyncio.run(script())
    assert gate.seen() == ["one", "two"]


@pytest.mark.slow
def test_between_two_steps_the_second_never_sees_it(start: Start, gate: Gate) -> None:
    second = Gate(gate.folder.parent / "second")
    p = builder()
    first = p.step("a", f"{STEPS}:Gated", value=p.input("x", "text"), **gate.options)
    p.output("y", p.step("b", f"{STEPS}:Gated", value=first.value, **second.options).value)
    session = start(p)
    gate.close()

    async def script() -> None:
        asked = Asked(session, x="gone")
        await until(lambda: gate.seen() == ["gone"])
        await asked.give_up()
        gate.open()
        assert await Asked(session, x="stays").answer() == "stays"

    asyncio.run(script())
    assert gate.seen() == ["gone", "stays"] and second.seen() == ["stays"]


@pytest.mark.slow
def test_an_abandoned_stream_stops_its_producer_and_no_other(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "trickle", value=p.input("x", "text"), pieces=40, delay_ms=10).value)
    session = start(p)
    stays, leaves = session.stream(x="a"), session.stream(x="b")
    for _ in range(3):
        next(leaves)
    leaves.close()
    wait_until(lambda: session.stats()["requests"]["open"] == 1, 5)
    assert sum(1 for _ in stays) == 41
    wait_until(lambda: settled(session), 5)
    assert session.stats()["requests"]["cancelled"] == 1 and session.stats()["requests"]["ok"] == 1


@pytest.mark.slow
def test_after_the_end_a_cancel_changes_nothing(start: Start) -> None:
    p = builder()
    p.output("y", p.step("s", "trickle", value=p.input("x", "text")).value)
    session = start(p)
    stream = session.stream(x="a")
    assert len(list(stream)) == 5
    stream.close()
    unread = session.stream(x="b")
    wait_until(lambda: session.stats()["requests"]["ok"] == 2)
    unread.close()
    with pytest.raises(StopIteration):
        next(unread)
    requests = session.stats()["requests"]
    assert requests["ok"] == 2 and requests["cancelled"] == 0


@pytest.mark.slow
def test_elements_of_a_list_leave_their_queue_with_their_request(start: Start, gate: Gate) -> None:
    p = builder()
    x = p.input("x", "list[text]")
    step = p.step("s", f"{STEPS}:Gated", value=x, map="value", batch={"items_max": 1}, **gate.options)
    p.output("y", step.value)
    session = start(p)
    gate.close()

    async def script() -> None:
        asked = Asked(session, x=["a", "b", "c", "d"])
        await until(lambda: gate.seen() == ["a"])
        await asked.give_up()
        assert session.stats()["queued"]["s"] == 0
        gate.open()
        assert await Asked(session, x=["e"]).answer() == ["e"]

    asyncio.run(script())
    assert gate.seen() == ["a", "e"]


@pytest.mark.slow
def test_two_thousand_random_cancels_leave_every_counter_at_its_baseline(start: Start) -> None:
    p = builder(arena_bytes=32 << 20, requests_max=1000)
    x, words = p.input("x", "float32[N]"), p.input("words", "list[text]")
    half = p.step("half", "function", x=x, batch={"items_max": 4, "wait_max_ms": 2}, **function("halves"))
    more = p.step("more", "function", x=half.output, batch={"items_max": 4}, instances=2, **function("copied"))
    each = p.step("each", "function", text=words, map="text", batch={"items_max": 8}, **function("shout"))
    report = p.step("report", "trickle", value=p.input("text", "text"), pieces=5, delay_ms=1)
    p.output("y", more.output)
    p.output("words", each.output)
    p.output("report", report.value)
    session = start(p)
    rng = random.Random(11)
    xs = [np.full(size, size, np.float32) for size in (10, 8_000, 20_000)]
    counts = {"answered": 0, "cancelled": 0, "failed": 0}

    async def one() -> None:
        request = {"x": rng.choice(xs), "words": ["a"] * rng.randrange(4), "text": "t"}
        streams = rng.random() < 0.3

        async def ask() -> None:
            if streams:
                async for _ in session.astream(**request):
                    pass
                return
            answer = await session.arun(**request)
            assert answer["y"].shape[0] == len(request["x"]) // 2 and (answer["y"] == request["x"][0] + 1).all()
            assert answer["words"] == ["A"] * len(request["words"])

        task = asyncio.create_task(ask())
        await asyncio.sleep(0)  # it is submitted
        await asyncio.sleep(rng.choice((0, 0.001, 0.005, 0.02, 0.05)) * rng.random())
        if rng.random() < 0.9:
            task.cancel()
        try:
            await asyncio.wait_for(task, 30)
            counts["answered"] += 1
        except asyncio.CancelledError:
            counts["cancelled"] += 1
        except WeftlineError:
            counts["failed"] += 1

    async def all_of_them() -> None:
        while session.stats()["requests"]["cancelled"] < 2000:
            await asyncio.gather(*(one() for _ in range(45)))

    asyncio.run(all_of_them())
    print(counts, session.stats()["requests"])
    assert counts["failed"] == 0 and counts["answered"] > 100
    wait_until(lambda: settled(session), 10)
    assert session.stats()["worker_deaths"] == 0
    assert session.stats()["arena"]["stale_total"] == 0, "nothing was released twice"
