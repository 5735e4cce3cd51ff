"""Sequences of requests in real processes: order, one instance each, limits, and what is lost with a worker."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fire import STEPS, ask, builder, function, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, Source
from weftline.errors import InputError, LimitReached, WorkerDied
from weftline.nodes.urgency import SequencePart

Start = Callable[[Source], Session]


def remembering(delay_ms: float = 0.0, **more: Any) -> Any:
    p = builder()
    p.output("y", p.step("s", "remember", value=p.input("x", "text"), delay_ms=delay_ms, **more).value)
    return p


def say(session: Session, id: str, *texts: str, start: bool = True, end: bool = False) -> list[Any]:
    """Bring these texts one after the other; return what was answered, or the error's class."""
    answers = []
    for place, text in enumerate(texts):
        part = SequencePart(id, start=start and place == 0, end=end and place == len(texts) - 1)
        answer = ask(session, RequestOptions(sequence=part), x=text)
        answers.append(answer["y"] if isinstance(answer, Result) else type(answer))
    return answers


@pytest.mark.slow
def test_twenty_sequences_each_stay_in_order_on_one_of_two_instances(start: Start) -> None:
    session = start(remembering(delay_ms=2, instances=2))
    assert len(session.pids()) == 2

    async def one(id: str) -> tuple[list[str], set[str]]:
        asked = []
        for place in range(10):  # all at once: the engine keeps their order
            part = SequencePart(id, start=place == 0, end=place == 9)
            asked.append(asyncio.create_task(session.arun(RequestOptions(sequence=part), x=str(place))))
            await asyncio.sleep(0)
        results = await asyncio.gather(*asked)
        return [result["y"] for result in results], {t.worker for result in results for t in result.timings}

    async def all_of_them() -> list[tuple[list[str], set[str]]]:
        return list(await asyncio.gather(*(one(f"q{number}") for number in range(20))))

    found = asyncio.run(all_of_them())
    wanted = [" ".join(map(str, range(place + 1))) for place in range(10)]
    assert [answers for answers, _ in found] == [wanted] * 20
    assert all(len(workers) == 1 for _, workers in found)
    assert set.union(*(workers for _, workers in found)) == set(session.pids()), "both have some of them"


@pytest.mark.slow
def test_new_sequences_are_spread_over_the_instances(start: Start) -> None:
    session = start(remembering(instances=2))
    workers = []
    for number in range(6):
        result = session.run(RequestOptions(sequence=SequencePart(f"q{number}", start=True)), x="a")
        workers.append(result.timings[0].worker)
    assert sorted(workers) == sorted(list(session.pids()) * 3)


@pytest.mark.slow
def test_new_sequences_go_to_the_instance_that_lives(start: Start, tmp_path: Path) -> None:
    p = builder()
    x = p.input("x", "text")
    step = p.step("s", f"{STEPS}:Fragile", value=x, folder=str(tmp_path), instances=2, sequence={})
    p.output("y", step.value)
    session = start(p)
    (tmp_path / "broken").touch()
    deaths = session.stats()["worker_deaths"]
    os.kill(next(iter(session.pids().values())), signal.SIGKILL)
    wait_until(lambda: session.stats()["worker_deaths"] >= deaths + 2)
    assert [say(session, f"q{number}", "a", end=True) for number in range(20)] == [["a"]] * 20
    assert session.ready, "one instance is enough"
    (tmp_path / "broken").unlink()


@pytest.mark.slow
def test_an_unstarted_sequence_and_a_request_without_one_are_refused(start: Start) -> None:
    session = start(remembering())
    with pytest.raises(InputError, match="'q' has not been started"):
        session.run(RequestOptions(sequence="q"), x="a")
    with pytest.raises(InputError, match="is stateful and needs the request's sequence"):
        session.run(x="a")
    assert say(session, "q", "a", "b", end=True) == ["a", "a b"]
    with pytest.raises(InputError, match="has ended"):
        session.run(RequestOptions(sequence="q"), x="c")


@pytest.mark.slow
def test_a_second_start_begins_anew(start: Start) -> None:
    session = start(remembering())
    assert say(session, "q", "a", "b") == ["a", "a b"]
    assert say(session, "q", "c", "d", end=True) == ["c", "c d"]


@pytest.mark.slow
def test_one_that_brings_nothing_for_too_long_is_ended(start: Start) -> None:
    session = start(remembering(sequence={"idle_max_ms": 300, "live_max": 2}))
    assert say(session, "old", "a") == ["a"]
    sequences = session._current.runtime.scheduler.state.queues[0].sequences
    wait_until(lambda: sequences.live() == 0, 10)
    assert say(session, "old", "b", start=False) == [InputError]


@pytest.mark.slow
def test_more_than_may_live_are_refused_until_one_ends(start: Start) -> None:
    session = start(remembering(sequence={"live_max": 2}))
    assert say(session, "one", "a") == ["a"] and say(session, "two", "a") == ["a"]
    with pytest.raises(LimitReached, match=r"sequence\.live_max is 2"):
        session.run(RequestOptions(sequence=SequencePart("three", start=True)), x="a")
    assert say(session, "one", "b", start=False, end=True) == ["a b"]
    assert say(session, "three", "a", end=True) == ["a"]
    assert say(session, "two", "b", start=False, end=True) == ["a b"]


@pytest.mark.slow
def test_one_cancelled_request_of_a_sequence_leaves_the_others_in_order(start: Start) -> None:
    session = start(remembering(delay_ms=100))

    async def script() -> list[Any]:
        asked = []
        for place, text in enumerate("abcd"):
            part = SequencePart("q", start=place == 0, end=place == 3)
            asked.append(asyncio.create_task(session.arun(RequestOptions(sequence=part), x=text)))
            await asyncio.sleep(0)
        while session.stats()["requests"]["open"] < 4:
            await asyncio.sleep(0.002)
        asked[2].cancel()
        return list(await asyncio.gather(*asked, return_exceptions=True))

    answers = asyncio.run(script())
    assert isinstance(answers[2], asyncio.CancelledError)
    assert [answers[place]["y"] for place in (0, 1, 3)] == ["a", "a b", "a b d"], "c was never said"


@pytest.mark.slow
def test_what_was_remembered_is_lost_with_its_worker_and_says_so(start: Start) -> None:
    session = start(remembering(delay_ms=50))
    assert say(session, "q", "a", "b") == ["a", "a b"]
    pid = session.pids()["s"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: session.pids().get("s") not in (None, pid) and session.ready)
    with pytest.raises(InputError, match="was lost when its worker died; start it again"):
        session.run(RequestOptions(sequence="q"), x="c")
    assert say(session, "q", "d", end=True) == ["d"]


@pytest.mark.slow
def test_requests_of_a_sequence_fail_at_once_when_its_worker_dies(start: Start) -> None:
    session = start(remembering(delay_ms=30_000))

    async def script() -> list[Any]:
        asked = []
        for place in range(3):
            part = SequencePart("q", start=place == 0)
            asked.append(asyncio.create_task(session.arun(RequestOptions(sequence=part), x=str(place))))
            await asyncio.sleep(0)
        while session.stats()["dispatches"] < 1 or session.stats()["requests"]["open"] < 3:
            await asyncio.sleep(0.002)
        os.kill(session.pids()["s"], signal.SIGKILL)
        return list(await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10))

    assert [type(answer) for answer in asyncio.run(script())] == [WorkerDied] * 3


@pytest.mark.slow
def test_a_function_step_can_remember_too(start: Start) -> None:
    p = builder()
    step = p.step("s", "function", text=p.input("x", "text"), sequence={}, **function("Counts"))
    p.output("y", step.output)
    session = start(p)
    assert say(session, "q", "a", "b", "c", end=True) == [1, 2, 3]
    assert say(session, "q", "a", end=True) == [1], "the end reached it, and its state is gone"
