"""An external engine as a step of a running pipeline: in a worker process of its own, the only one with its key."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.fire import ask, together, wait_until
from tests.engine.llm.external.scripted import STREAM, Reply, Script, Scripted, says, scripted
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, load
from weftline.errors import DeadlineExceeded, StepError, Unavailable
from weftline.pipelines.spec.builder import Builder

STEPS = """\
import os
from weftline.node import BatchNode, Ports, port

def variables(text: str) -> list[str]:
    return sorted(os.environ)
"""


class Opened:
    """A session whose step `answer` calls a scripted server, with a key of its own."""

    def __init__(self, server: Scripted, session: Session) -> None:
        self.server, self.session = server, session

    def answers(self, *scripts: Script) -> Session:
        """Return the session, after setting what the server does with its next requests."""
        self.server.scripts[:] = scripts
        self.server.asked.clear()
        return self.session


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("ask")
    (folder / "steps.py").write_text(STEPS)
    with pytest.MonkeyPatch.context() as patch, scripted(says("hi")) as server:
        patch.setenv("ENGINE_KEY", "sk-1")
        patch.setenv("OTHER_KEY", "sk-2")
        p = Builder("ask", base_dir=folder, limits={"arena_bytes": 4 << 20})
        question, external = p.input("question", "text"), {"engine": "openai", "url": server.url, "key": "ENGINE_KEY"}
        answer = p.step("answer", "llm", model="m", inputs={"prompt": question}, **external)
        p.output("text", answer.text)
        p.output("usage", answer.usage)
        p.output("names", p.step("names", "function", function="steps.py:variables", text=question).output)
        with load(p).open() as session:
            yield Opened(server, session)


def test_requests_run_together_and_stream(opened: Opened) -> None:
    both = threading.Barrier(2)

    def script(reply: Reply) -> None:
        both.wait(20)
        reply.send(STREAM)
        reply.text("one ")
        time.sleep(0.05)
        reply.text(reply.asked.json["messages"][0]["content"], "stop")
        reply.end(prompt=4, completion=2)

    session = opened.answers(script)
    texts = [answer["text"] for answer in together(session, [{"question": "a"}, {"question": "b"}])]
    assert texts == ["one a", "one b"]
    both.reset()
    other = threading.Thread(target=lambda: ask(session, question="c"))
    other.start()
    stream = session.stream(question="d")
    came = list(stream)
    pieces = [piece.value for piece in came if piece.output == "text" and not piece.last]
    assert "".join(pieces) == "one d" and len(pieces) >= 2
    [usage] = [piece.value for piece in came if piece.output == "usage"]
    assert usage["prompt_tokens"] == 4
    other.join(20)


def test_only_the_process_of_the_step_inherits_its_key(opened: Opened) -> None:
    session = opened.answers(says("hi"))
    result = session.run(question="a")
    assert opened.server.asked[0].headers["authorization"] == "Bearer sk-1"
    assert "PATH" in result["names"] and not {"ENGINE_KEY", "OTHER_KEY"} & set(result["names"])
    [pid] = [pid for name, pid in session.pids().items() if name == "answer"]
    inherited = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"ENGINE_KEY=sk-1" in inherited and not any(line.startswith(b"OTHER_KEY") for line in inherited)


def test_a_cancelled_stream_closes_the_connection_to_the_engine(opened: Opened) -> None:
    closed = threading.Event()

    def script(reply: Reply) -> None:
        reply.send(STREAM)
        reply.text("a")
        if reply.wait_closed(20):
            closed.set()

    session = opened.answers(script)
    stream = session.stream(RequestOptions(outputs=("text",)), question="a")
    assert next(iter(stream)).value == "a"
    stream.close()
    assert closed.wait(10)
    wait_until(lambda: session.stats()["requests"]["open"] == 0)


def test_a_deadline_closes_the_connection_and_a_retry_stays_within_it(opened: Opened) -> None:
    closed = threading.Event()

    def script(reply: Reply) -> None:
        reply.send(STREAM)
        if reply.wait_closed(20):
            closed.set()

    session = opened.answers(lambda reply: reply.status(503, retry_after="60"), script)
    assert isinstance(ask(session, RequestOptions(deadline_ms=5000), question="a"), Unavailable)
    assert isinstance(ask(session, RequestOptions(deadline_ms=300), question="a"), DeadlineExceeded)
    assert closed.wait(10)


def test_an_error_of_the_engine_reaches_the_caller_without_its_text(opened: Opened) -> None:
    session = opened.answers(lambda reply: reply.status(500, "secret-host down"), says("hi"))
    failed = ask(session, question="a")
    assert type(failed) is StepError
    assert str(failed) == "step answer: the external engine failed (HTTP status 500)"
    assert ask(session, question="b")["text"] == "hi"


NO_SOCKETS = """\
import sys
from weftline.engine.session import load
from weftline.pipelines.spec.builder import Builder

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise RuntimeError(f"{event} {arguments}")

sys.addaudithook(refuse)
p = Builder("ask")
answer = p.step("answer", "llm", engine="openai", url=sys.argv[1], model="m", inputs={"prompt": p.input("q", "text")})
p.output("text", answer.text)
with load(p).open() as session:
    print(session.run(q="a")["text"])
"""


@pytest.mark.slow
def test_the_process_that_opens_a_pipeline_connects_to_nothing(tmp_path: Path) -> None:
    with scripted(says("hi")) as server:
        command = [sys.executable, "-c", NO_SOCKETS, server.url]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "hi\n"), ended.stderr
