"""A new version takes over while requests go on: none is lost, and what cannot be opened changes nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weftline.engine.session import Session, load
from weftline.errors import ModelError, PipelineError, RequestCancelled, SessionClosed, WeftlineError
from weftline.pipelines.spec.builder import Builder

STEPS = """
import time

def one(text: str) -> str:
    return text + " 1"

def two(text: str) -> str:
    return text + " 2"

def slow(text: str) -> str:
    time.sleep(0.4)
    return text + " slow"

def long(text: str) -> str:
    time.sleep(3)
    return text + " long"

def lasting(text: str) -> str:
    time.sleep(30)
    return text
"""

NODES = '''
import time
from weftline.node import BatchNode, Ports, port

class Refuses(BatchNode):
    """Cannot be opened."""
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("output", "text"),))
    def open(self, context):
        raise ValueError("no such model")
    def run(self, batch):
        return {"output": list(batch["text"])}

class Loads(Refuses):
    """Takes long to open."""
    def open(self, context):
        time.sleep(30)
'''


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., Builder]:
    """Return a pipeline of one step."""
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "nodes.py").write_text(NODES)

    def make(function: str = "", node: str = "function", input: str = "x") -> Builder:
        p = Builder("one", base_dir=tmp_path, limits={"arena_bytes": 1 << 20})
        options = {"function": f"steps.py:{function}"} if function else {}
        p.output("y", p.step("s", node, text=p.input(input, "text"), **options).output)
        return p

    return make


def descriptors() -> int:
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def memory_maps() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:weftline")


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.005)


@pytest.mark.slow
def test_no_request_notices_five_reloads_of_which_one_fails(pipeline: Callable[..., Builder]) -> None:
    with load(pipeline("one")).open() as session:
        session.run(x="warm")
        before = descriptors(), memory_maps()
        stop = threading.Event()
        failures: list[BaseException] = []
        answers: list[list[str]] = [[] for _ in range(8)]

        def ask(caller: int) -> None:
            while not stop.is_set():
                try:
                    answers[caller].append(session.run(x="a")["y"])
                except WeftlineError as error:
                    failures.append(error)

        callers = [threading.Thread(target=ask, args=(caller,)) for caller in range(8)]
        for caller in callers:
            caller.start()
        versions = []
        for step in (pipeline("two"), pipeline("one"), pipeline(node="nodes.py:Refuses"), pipeline("two")):
            try:
                versions.append(session.reload(step))
            except ModelError as error:
                assert "no such model" in str(error)
        versions.append(session.reload(load(pipeline("two"))))
        stop.set()
        for caller in callers:
            caller.join()
        assert failures == []
        assert versions == [2, 3, 4, 5] and session.version == 5
        for answered in answers:
            changes = [answer for at, answer in enumerate(answered) if at == 0 or answered[at - 1] != answer]
            assert changes == ["a 1", "a 2", "a 1", "a 2"], "a caller never meets an older version again"
        assert session.stats()["draining"] is False and session.stats()["version"] == 5
        assert (descriptors(), memory_maps()) == before


def test_a_pipeline_with_problems_leaves_everything_as_it_was(pipeline: Callable[..., Builder]) -> None:
    with load(pipeline("one")).open() as session:
        pids = session.pids()
        with pytest.raises(PipelineError):
            session.reload(pipeline(node="nothing-like-it"))
        assert session.pids() == pids and session.version == 1 and session.run(x="a")["y"] == "a 1"


@pytest.mark.slow
def test_requests_are_held_against_the_version_they_meet(pipeline: Callable[..., Builder]) -> None:
    with load(pipeline("one")).open() as session:
        session.reload(pipeline("two", input="other"))
        assert session.run(other="a")["y"] == "a 2"
        assert [given.name for given in session.plan.inputs] == ["other"]


def test_open_requests_finish_in_the_old_version(pipeline: Callable[..., Builder]) -> None:
    with load(pipeline("slow")).open() as session, ThreadPoolExecutor(1) as callers:
        old = callers.submit(session.run, x="a")
        wait_until(lambda: session.stats()["requests"]["open"] == 1)
        session.reload(pipeline("two"))
        assert old.result()["y"] == "a slow"


@pytest.mark.slow
def test_stats_say_draining_while_the_old_version_lives(pipeline: Callable[..., Builder]) -> None:
    with load(pipeline("lasting")).open() as session, ThreadPoolExecutor(2) as callers:
        old = callers.submit(session.run, x="a")
        wait_until(lambda: session.stats()["requests"]["open"] == 1)
        reload = callers.submit(session.reload, pipeline("one"), drain_s=1.0)
        wait_until(lambda: session.version == 2)
        assert session.stats()["draining"] is True and session.run(x="b")["y"] == "b 1"
        assert reload.result() == 2 and session.stats()["draining"] is False
        assert isinstance(old.exception(), RequestCancelled)


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_cancelled(pipeline: Callable[..., Builder]) -> None:
    with load(pipeline("lasting")).open() as session, ThreadPoolExecutor(1) as callers:
        old = callers.submit(session.run, x="a")
        stream = session.stream(x="b")
        wait_until(lambda: session.stats()["requests"]["open"] == 2)
        session.reload(pipeline("one"), drain_s=0.1)
        with pytest.raises(RequestCancelled, match="new version"):
            old.result()
        with pytest.raises(RequestCancelled, match="new version"):
            next(stream)
        assert session.run(x="c")["y"] == "c 1"


@pytest.mark.slow
def test_tasks_cross_a_reload_unharmed(pipeline: Callable[..., Builder]) -> None:
    async def ask_across(session: Session) -> list[str]:
        reload = asyncio.create_task(asyncio.to_thread(session.reload, pipeline("two")))
        answers = []
        while not reload.done():
            answers += [result["y"] for result in await asyncio.gather(*(session.arun(x="a") for _ in range(8)))]
            answers += [piece.value async for piece in session.astream(x="a") if piece.last]
        return answers

    with load(pipeline("one")).open() as session:
        assert set(asyncio.run(ask_across(session))) <= {"a 1", "a 2"}
        assert session.run(x="a")["y"] == "a 2"


@pytest.mark.slow
def test_reloads_wait_for_each_other(pipeline: Callable[..., Builder]) -> None:
    with load(pipeline("one")).open() as session, ThreadPoolExecutor(3) as callers:
        reloads = [callers.submit(session.reload, pipeline("two")) for _ in range(3)]
        assert sorted(reload.result() for reload in reloads) == [2, 3, 4]


@pytest.mark.slow
def test_a_version_that_takes_too_long_to_open_is_given_up(pipeline: Callable[..., Builder]) -> None:
    with load(pipeline("one")).open() as session:
        with pytest.raises(ModelError, match=r"not open after 1\.0 s; still loading: s"):
            session.reload(pipeline(node="nodes.py:Loads"), timeout_s=1.0)
        assert session.run(x="a")["y"] == "a 1"


@pytest.mark.slow
def test_closing_while_a_reload_opens_ends_both(pipeline: Callable[..., Builder]) -> None:
    before = descriptors()
    session = load(pipeline("one")).open()
    with ThreadPoolExecutor(1) as callers:
        reload = callers.submit(session.reload, pipeline(node="nodes.py:Loads"))
        wait_until(lambda: session._versions.opening is not None)
        time.sleep(0.3)
        session.close()
        with pytest.raises(SessionClosed):
            reload.result(10)
    with pytest.raises(SessionClosed):
        session.reload(pipeline("two"))
    assert descriptors() == before


@pytest.mark.slow
def test_closing_while_a_session_opens_ends_the_opening(pipeline: Callable[..., Builder]) -> None:
    session = Session(load(pipeline(node="nodes.py:Loads")).plan)
    with ThreadPoolExecutor(1) as callers:
        opening = callers.submit(session.open)
        time.sleep(0.3)
        session.close()
        with pytest.raises(SessionClosed):
            opening.result(10)


def test_closing_can_let_open_requests_finish(pipeline: Callable[..., Builder]) -> None:
    session = load(pipeline("slow")).open()
    with ThreadPoolExecutor(2) as callers:
        asked = callers.submit(session.run, x="a")
        wait_until(lambda: session.stats()["requests"]["open"] == 1)
        closing = callers.submit(session.close, 10.0)
        wait_until(lambda: session.closed)
        with pytest.raises(SessionClosed):
            session.run(x="b")
        assert asked.result()["y"] == "a slow"
        closing.result()


@pytest.mark.slow
def test_closing_can_drain_a_version_that_is_being_replaced(pipeline: Callable[..., Builder]) -> None:
    session = load(pipeline("long")).open()
    with ThreadPoolExecutor(2) as callers:
        asked = callers.submit(session.run, x="a")
        wait_until(lambda: session.stats()["requests"]["open"] == 1)
        reload = callers.submit(session.reload, pipeline("one"))
        wait_until(lambda: session.version == 2)
        session.close(10.0)
        assert asked.result()["y"] == "a long"
        assert reload.result() == 2
