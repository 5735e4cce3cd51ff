"""Light steps in real processes: they share one, a kill costs no request its answer, and `worker:` parts them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.fire import builder, function, settled, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, Source
from weftline.pipelines.spec.builder import Builder

Start = Callable[[Source], Session]

SLOW = "{% for i in range(9) %}{% for k in range(10000) %}{% endfor %}{% endfor %}{{ x }}"
"""Template that takes about 50 ms: as slow as its loops may be."""


def prompts(template: str = "a {{ x }}", **more: Any) -> Builder:
    """Return two templates that do not read each other, and a third behind a user's function."""
    p = builder()
    x = p.input("x", "text")
    p.output("a", p.step("a", "template", template=template, x=x, render_max_ms=10_000, **more).text)
    p.output("b", p.step("b", "template", template="b {{ x }}", x=x).text)
    shouted = p.step("shout", "function", text=x, **function("shout")).output
    p.output("c", p.step("c", "template", template="c {{ x }}", x=shouted).text)
    return p


def wanting(output: str, **more: Any) -> RequestOptions:
    return RequestOptions(outputs=[output], **more)


def ask_all(callers: ThreadPoolExecutor, session: Session, output: str, count: int) -> list[Future[Result]]:
    return [callers.submit(session.run, wanting(output), x=f"t{number}") for number in range(count)]


def test_light_steps_share_a_process_and_nothing_else_does(start: Start) -> None:
    session = start(prompts())
    assert set(session.pids()) == {"light", "shout"}
    result = session.run(x="t")
    assert [result[name] for name in "abc"] == ["a t", "b t", "c T"]
    ran = {timing.step: timing.worker for timing in result.timings}
    assert ran == {"a": "light", "b": "light", "c": "light", "shout": "shout"}


def test_a_worker_key_parts_a_light_step(start: Start) -> None:
    session = start(prompts(worker="mine"))
    assert set(session.pids()) == {"mine", "light", "shout"}
    ran = {timing.step: timing.worker for timing in session.run(x="t").timings}
    assert ran == {"a": "mine", "b": "light", "c": "light", "shout": "shout"}


def test_a_killed_process_of_light_steps_costs_no_request_its_answer(start: Start) -> None:
    session = start(prompts(SLOW))
    with ThreadPoolExecutor(32) as callers:
        slow, quick = ask_all(callers, session, "a", 16), ask_all(callers, session, "b", 16)
        wait_until(lambda: session.stats()["requests"]["open"] > 8)
        os.kill(session.pids()["light"], signal.SIGKILL)
        assert [one.result(30)["a"] for one in slow] == [f"t{number}" for number in range(16)]
        assert [one.result(30)["b"] for one in quick] == [f"b t{number}" for number in range(16)]
    stats = session.stats()
    assert stats["worker_deaths"] == 1 and stats["retried"] > 0
    wait_until(lambda: settled(session))


def test_a_request_is_cancelled_while_another_light_step_runs(start: Start) -> None:
    session = start(prompts(SLOW))

    async def script() -> None:
        slow = [asyncio.create_task(session.arun(wanting("a"), x=str(number))) for number in range(16)]
        await asyncio.sleep(0.01)
        gone = asyncio.create_task(session.arun(wanting("b"), x="gone"))
        kept = asyncio.create_task(session.arun(wanting("b"), x="kept"))
        await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (await kept)["b"] == "b kept"
        assert [(await one)["a"] for one in slow] == [str(number) for number in range(16)]

    asyncio.run(script())
    assert session.stats()["requests"]["cancelled"] == 1
    wait_until(lambda: settled(session))


def test_a_slow_light_step_delays_another_by_its_running_call_alone(start: Start) -> None:
    session = start(prompts(SLOW, batch={"items_max": 1}))
    with ThreadPoolExecutor(64) as callers:
        slow = ask_all(callers, session, "a", 64)
        wait_until(lambda: session.stats()["queued"]["a"] > 12)
        answered = sum(one.done() for one in slow)
        session.run(wanting("b", priority=100), x="t")
        assert sum(one.done() for one in slow) <= answered + 8, "it waited for the queue of the slow step"
        for one in slow:
            one.result(30)
