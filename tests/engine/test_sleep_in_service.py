"""Steps that sleep and wake in real worker processes: the next request is answered, whatever was given back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fire import ask, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, Source
from weftline.errors import DeadlineExceeded
from weftline.pipelines.spec.builder import Builder

Start = Callable[[Source], Session]

IDLE_S = 0.2

NODES = '''
import os
import time

from weftline.errors import ModelError
from weftline.node import BatchNode, NodeMemory, Piece, Ports, StreamNode, port
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kv:
    kv_bytes: int | None = None


class Model(BatchNode):
    """Answers with its process and how often it has been opened there; refuses to open beside a file `gone`."""
    opens = 0

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))

    def open(self, context):
        if (context.base_dir / "gone").exists():
            raise ModelError("its weights are gone")
        type(self).opens += 1
        self.weights = bytearray(32 << 20)

    def close(self):
        self.weights = None

    def run(self, batch):
        return {"text": [f"{text} {os.getpid()} {type(self).opens} {len(self.weights)}" for text in batch["text"]]}


class Rests(Model):
    """Sleeps by itself."""
    def sleep(self, keep):
        self.kept, self.weights = len(self.weights), None
        return keep == "host"

    def wake(self):
        self.weights = bytearray(self.kept)


class Talks(StreamNode):
    """Three pieces for every item; the last says how often it was opened."""
    Config = Kv
    opens = 0

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))

    def open(self, context):
        type(self).opens += 1
        self.left = {}

    def close(self):
        self.left = None

    def submit(self, item, inputs, urgency=None):
        self.left[item] = 3

    def cancel(self, item):
        self.left.pop(item, None)

    def memory(self):
        return NodeMemory(0, 0, self.config.kv_bytes or 1 << 20)

    def figures(self):
        return {"items": len(self.left)}

    @property
    def busy(self):
        return bool(self.left)

    def round(self):
        pieces = []
        for item in list(self.left):
            self.left[item] -= 1
            if not self.left[item]:
                del self.left[item]
                pieces.append(Piece(item, {"text": f"{type(self).opens}"}, last=True))
        return pieces
'''


def pipeline(folder: Path, keep: str, node: str = "Model", after_s: float = IDLE_S, **more: Any) -> Builder:
    (folder / "nodes.py").write_text(NODES)
    p = Builder("test", base_dir=folder, limits={"arena_bytes": 1 << 20})
    idle = {"after_s": after_s, "keep": keep}
    p.output("y", p.step("s", f"nodes.py:{node}", text=p.input("x", "text"), idle=idle, **more).text)
    return p


def state(session: Session) -> str:
    return str(session.stats()["idle"]["s"]["state"])


def fall_asleep(session: Session) -> None:
    wait_until(lambda: state(session) == "asleep", 10)


def said(session: Session, **request: Any) -> list[str]:
    """Return what `Model` answers: text, process, how often it was opened there, and its weights."""
    return str(session.run(x="hi", **request)["y"]).split()


def test_an_idle_step_is_closed_and_the_next_request_has_it_opened_again(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path, "process"))
    first = said(session)
    fall_asleep(session)
    assert (session.ready, session.health().summary) == (True, "asleep: s")
    second = said(session)
    assert (first[1], first[2], second[2]) == (second[1], "1", "2")
    idle = session.stats()["idle"]["s"]
    assert (idle["slept"], idle["woken"]) == (1, 1) and idle["wake_ms"] > 0


@pytest.mark.slow
def test_a_node_that_can_keeps_what_it_has_loaded(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path, "host", "Rests"))
    fall_asleep(session)
    assert said(session) == ["hi", str(session.pids()["s"]), "1", str(32 << 20)]


@pytest.mark.slow
def test_a_stateless_sleeping_worker_ends_and_a_request_starts_another(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path, "nothing"))
    first = said(session)
    wait_until(lambda: session.pids() == {}, 10)
    with pytest.raises(ProcessLookupError):
        os.kill(int(first[1]), 0)
    assert (session.ready, state(session), session.stats()["worker_deaths"]) == (True, "asleep", 0)
    second = said(session)
    assert second[1] != first[1] and second[1] == str(session.pids()["s"])
    assert session.stats()["worker_restarts"] == 0


@pytest.mark.slow
def test_a_streaming_step_sleeps_with_its_memory_and_streams_again(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path, "process", "Talks"))
    assert session.run(x="a")["y"] == "1"
    fall_asleep(session)
    assert session.run(x="a")["y"] == "2"


@pytest.mark.slow
def test_a_step_that_cannot_be_woken_is_opened_by_the_next_worker(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path, "process"))
    fall_asleep(session)
    pid = session.pids()["s"]
    gone = tmp_path / "gone"
    gone.touch()
    with pytest.raises(DeadlineExceeded):
        session.run(RequestOptions(deadline_ms=300), x="hi")
    wait_until(lambda: session.stats()["worker_deaths"] >= 1, 10)
    gone.unlink()
    wait_until(lambda: session.ready and session.pids().get("s") not in (None, pid), 10)
    assert said(session)[2] == "1"


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_sleeps_is_started_on_demand(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path, "process"))
    fall_asleep(session)
    pid = session.pids()["s"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: session.pids() == {}, 10)
    assert session.ready
    assert said(session)[1] != str(pid)


@pytest.mark.slow
def test_requests_around_the_moment_of_sleep_are_all_answered(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path, "nothing", after_s=0.02))
    answers = []
    for turn in range(6):
        answers.append(ask(session, x=f"{turn}"))
        wait_until(lambda turn=turn: state(session) != "awake" or turn % 2, 5)  # type: ignore[misc]
    assert [str(answer["y"]).split()[0] for answer in answers if isinstance(answer, Result)] == list("012345")


@pytest.mark.slow
def test_a_worker_that_was_started_for_a_thread_outlives_it(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path, "nothing", after_s=1.0))
    wait_until(lambda: session.pids() == {}, 10)
    answers: list[list[str]] = []
    thread = threading.Thread(target=lambda: answers.append(said(session)))
    thread.start()
    thread.join(20)
    assert said(session)[1] == answers[0][1]
    assert session.stats()["worker_deaths"] == 0
