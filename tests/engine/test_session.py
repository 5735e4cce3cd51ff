"""Sessions in real processes: answers, batches, streams, cancels, room for large tensors, and an orderly end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weftline.engine.session import Session, load
from weftline.errors import DeadlineExceeded, InputError, LimitReached, RequestCancelled, SessionClosed, StepError
from weftline.pipelines.builder import Builder

STEPS = """
import time
import numpy as np

def double(x: "float32[N]") -> "float32[N]":
    return x * 2

def part(x: "float32[N]") -> "float32[M]":
    return x[: len(x) // 2]

def picky(text: str) -> str:
    if text == "poison":
        raise ValueError("this one is bad")
    return text.upper()

def writes(x: "float32[N]") -> "float32[N]":
    x[0] = 1
    return x

def slow(text: str) -> str:
    time.sleep(0.3)
    return text

def wrong(x: "float32[N]") -> "float32[N]":
    return x.astype("float64")
"""

CLOSING = '''
from pathlib import Path
from dataclasses import dataclass
from weftline.nodes.contract import BatchNode, Piece, StreamNode
from weftline.nodes.ports import Ports, port
import time

class Closes(BatchNode):
    """Leaves a mark when it is closed."""
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))
    def open(self, context):
        self.mark = context.base_dir / "closed"
    def run(self, batch):
        return {"text": list(batch["text"])}
    def close(self):
        time.sleep(0.2)
        self.mark.write_text("yes")

class Spells(StreamNode):
    """Gives a word letter by letter, one each round."""
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))
    def __init__(self, config):
        super().__init__(config)
        self.left = {}
    def submit(self, item, inputs):
        if inputs["text"] == "refuse":
            raise ValueError("not this one")
        self.left[item] = (inputs["text"], 0)
    def cancel(self, item):
        self.left.pop(item, None)
    @property
    def busy(self):
        return bool(self.left)
    def round(self):
        time.sleep(0.01)
        pieces = []
        for item, (word, at) in list(self.left.items()):
            if at == len(word):
                del self.left[item]
                pieces.append(Piece(item, {"text": word}, last=True))
            else:
                self.left[item] = (word, at + 1)
                pieces.append(Piece(item, {"text": word[at]}))
        return pieces
'''


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Open a one-step pipeline by step description; every session is closed and found clean."""
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "nodes.py").write_text(CLOSING)
    sessions: list[Session] = []

    def open_one(
        type: str, node: str, port: str, out: str, limits: dict[str, int] | None = None, **options: Any
    ) -> Session:
        pipeline = Builder("one", base_dir=tmp_path, limits={"arena_bytes": 16 << 20} | (limits or {}))
        step = pipeline.step("s", node, **{port: pipeline.input("x", type)}, **options)
        pipeline.output("y", step[out])
        sessions.append(load(pipeline).open())
        return sessions[-1]

    yield open_one
    for session in sessions:
        if session.closed:
            continue
        held = session.stats()
        session.close()
        assert held["arena"]["leased_bytes"] == 0, "a lease was left behind"
        assert held["requests"]["open"] == 0


def function(name: str) -> dict[str, str]:
    return {"node": "function", "function": f"steps.py:{name}", "out": "output"}


def test_large_tensors_come_back_right_and_are_the_callers_own(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("double"))
    x = np.arange(1_000_000, dtype=np.float32)
    for _ in range(3):
        y = session.run(x=x)["y"]
        np.testing.assert_array_equal(y, x * 2)
        y[0] = 5
    copied = session.stats()["copied_bytes"]
    assert copied == {"in": 3 * x.nbytes, "between": 3 * x.nbytes, "out": 3 * x.nbytes}


def test_a_part_of_an_input_is_passed_on_without_a_copy(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("part"))
    x = np.arange(100_000, dtype=np.float32)
    np.testing.assert_array_equal(session.run(x=x)["y"], x[:50_000])
    assert session.stats()["copied_bytes"]["between"] == 0


def test_a_node_that_writes_into_its_input_is_told_why_it_failed(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("writes"))
    with pytest.raises(StepError, match="mutates_inputs"):
        session.run(x=np.zeros(100_000, np.float32))


def test_an_output_of_another_type_names_port_found_and_expected(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("wrong"))
    with pytest.raises(StepError, match=r"step s: .*float32\[N\].*float64\[4\]"):
        session.run(x=np.zeros(4, np.float32))


def test_batch_mates_of_a_bad_item_are_answered(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", batch={"items_max": 8, "wait_max_ms": 50}, **function("picky"))

    def ask(text: str) -> str:
        try:
            return str(session.run(x=text)["y"])
        except StepError as error:
            return str(error)

    with ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(ask, ["a", "b", "poison", "c", "d", "e", "f", "g"]))
    assert answers == ["A", "B", "step s: ValueError: this one is bad", "C", "D", "E", "F", "G"]
    assert session.stats()["dispatches"] < 8


def test_a_batch_that_fails_as_a_whole_is_halved_until_only_the_bad_item_fails(opened: Callable[..., Session]) -> None:
    session = opened(
        "text", "fail", "value", "value", equals="bad", whole=True, batch={"items_max": 8, "wait_max_ms": 50}
    )

    def ask(text: str) -> str:
        try:
            return str(session.run(x=text)["y"])
        except StepError:
            return "failed"

    texts = ["a", "b", "c", "bad", "d", "e", "f", "g"]
    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(ask, texts)) == ["failed" if text == "bad" else text for text in texts]


def test_a_deadline_ends_a_request_and_frees_everything(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("slow"))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="unfinished steps: s"):
        session.run(x="a", deadline_ms=50)
    assert time.monotonic() - started < 0.28
    assert session.run(x="b")["y"] == "b"


def test_over_the_limit_is_refused_at_once_and_names_the_limit(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", limits={"requests_max": 1}, **function("slow"))
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(session.run, x="a")
        time.sleep(0.1)
        with pytest.raises(LimitReached, match="requests_max is 1"):
            session.run(x="b")
        assert first.result()["y"] == "a"


def test_outputs_larger_than_the_arena_fail_alone_and_name_it(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", limits={"arena_bytes": 1 << 20}, **function("double"))
    with pytest.raises((LimitReached, StepError), match="arena_bytes"):
        session.run(x=np.zeros(400_000, np.float32))
    assert session.run(x=np.ones(10, np.float32))["y"].sum() == 20


def test_inputs_are_named_when_they_are_wrong(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("picky"))
    with pytest.raises(InputError, match=r"unknown: z; missing: x"):
        session.run(z="a")
    with pytest.raises(InputError, match="input x"):
        session.run(x=b"\xff\xfe")
    with pytest.raises(InputError, match="no output is called q"):
        session.run(x="a", outputs=["q"])


def test_many_tasks_share_one_session(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("picky"))

    async def all_at_once() -> list[str]:
        results = await asyncio.gather(*(session.arun(x=f"t{i}") for i in range(50)))
        return [result["y"] for result in results]

    assert asyncio.run(all_at_once()) == [f"T{i}" for i in range(50)]


def test_pieces_come_before_the_whole_and_add_up_to_it(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Spells", "text", "text")
    pieces = list(session.stream(x="hello"))
    assert [piece.last for piece in pieces] == [False] * 5 + [True]
    assert "".join(piece.value for piece in pieces[:-1]) == pieces[-1].value == "hello"
    with pytest.raises(StepError, match="not this one"):
        list(session.stream(x="refuse"))


def test_leaving_a_stream_early_cancels_its_request(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Spells", "text", "text")
    stream = session.stream(x="a" * 1000)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert session.stats()["requests"]["cancelled"] == 1
    assert session.run(x="ok")["y"] == "ok"


def test_a_cancelled_stream_gives_back_the_leases_it_read(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Spells", "text", "text")
    for _ in range(3):
        stream = session.stream(x="a" * 100_000)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    session.run(x="after")
    assert session.stats()["arena"]["leased_bytes"] == 0


def test_streams_for_asyncio(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Spells", "text", "text")

    async def collect() -> list[str]:
        return [piece.value async for piece in session.astream(x="abc")]

    assert asyncio.run(collect()) == ["a", "b", "c", "abc"]


def test_a_cancelled_task_withdraws_its_request(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("slow"))

    async def give_up() -> None:
        await asyncio.wait_for(session.arun(x="a"), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert session.stats()["requests"]["cancelled"] == 1
    time.sleep(0.4)  # the running item finishes, and its lease with it


def test_nodes_are_closed_and_a_closed_session_says_so(opened: Callable[..., Session], tmp_path: Path) -> None:
    session = opened("text", "nodes.py:Closes", "text", "text")
    assert session.run(x="a")["y"] == "a"
    session.close()
    assert (tmp_path / "closed").read_text() == "yes"
    with pytest.raises(SessionClosed):
        session.run(x="a")


def test_closing_ends_the_requests_that_wait(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("slow"))
    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(session.run, x="a")
        time.sleep(0.1)
        session.close()
        with pytest.raises((SessionClosed, RequestCancelled)):
            waiting.result(5)


def test_what_is_passed_on_is_not_packed_again_and_a_new_value_never_mistaken_for_it(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "import numpy as np\n"
        'def both(x: "float32[N]") -> {"same": "float32[N]", "other": "float32[N]"}:\n'
        "    return {'same': x, 'other': np.stack([x, x + 1])[1]}\n"
    )
    p = Builder("both", base_dir=tmp_path)
    step = p.step("s", "function", function="steps.py:both", x=p.input("x", "float32[N]"), batch={"items_max": 4})
    p.output("same", step.same)
    p.output("other", step.other)
    with load(p).open() as session, ThreadPoolExecutor(4) as callers:
        xs = [np.full(5000 * (1 + i % 2), i, np.float32) for i in range(40)]
        for x, result in zip(xs, callers.map(lambda x: session.run(x=x), xs), strict=True):
            np.testing.assert_array_equal(result["same"], x)
            np.testing.assert_array_equal(result["other"], x + 1)
        assert session.stats()["arena"]["leased_bytes"] == 0
