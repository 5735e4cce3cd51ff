"""Sessions in real processes: answers, batches, streams, cancels, room for large tensors, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.weftline.conftest import workers_of
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, load
from weftline.errors import (
    DeadlineExceeded,
    InputError,
    LimitReached,
    ModelError,
    RequestCancelled,
    SessionClosed,
    StepError,
    WeftlineError,
    WorkerDied,
)
from weftline.pipelines.spec.builder import Builder

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

def makes(x: "float32[N]") -> "float32[?]":
    return np.ones(25_000, np.float32)

def gathers(x: "float32[N]") -> "float32[]":
    return np.float32(x.sum())

def spawns(text: str) -> str:
    import subprocess
    return str(subprocess.Popen(["sleep", "60"]).pid)

def bars(text: str) -> str:
    import sys
    for part in range(40):
        sys.stderr.write("x" * 100_000 + "\\r")
    return text

def passes(x: "uint8[N]") -> "uint8[N]":
    return x

def foreign(x: "float32[N]") -> "tensor":
    return np.arange(6, dtype=">f4")

def objects(x: "float32[N]") -> "tensor":
    return np.array([object(), 1], dtype=object)

def surrogate(text: str) -> str:
    raise ValueError("bad \\udcff name")

def forks(text: str) -> str:
    import os
    if os.fork() == 0:
        return "the child"
    return "the parent"

def wrong(x: "float32[N]") -> "float32[N]":
    return x.astype("float64")
"""

CLOSING = '''
from pathlib import Path
from dataclasses import dataclass
from weftline.node import BatchNode, Piece, Ports, StreamNode, port
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

class Confused(StreamNode):
    """Answer for an unknown item, or never."""
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))
    def __init__(self, config):
        super().__init__(config)
        self.text = None
    def submit(self, item, inputs):
        self.text = inputs["text"]
    def cancel(self, item):
        self.text = None
    @property
    def busy(self):
        return self.text is not None
    def round(self):
        if self.text == "hang":
            time.sleep(60)
        return [Piece(2**63, {"text": "x"}, last=True)]

class Breaks(StreamNode):
    """Raises in the round in which it holds two items."""
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))
    def __init__(self, config):
        super().__init__(config)
        self.left = {}
    def submit(self, item, inputs):
        self.left[item] = inputs["text"]
    def cancel(self, item):
        self.left.pop(item, None)
    @property
    def busy(self):
        return bool(self.left)
    def round(self):
        time.sleep(0.01)
        if len(self.left) > 1:
            raise RuntimeError("too many")
        done = [item for item, text in self.left.items() if text != "wait"]
        return [Piece(item, {"text": self.left.pop(item)}, last=True) for item in done]

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


@pytest.mark.slow
def test_a_part_of_an_input_is_passed_on_without_a_copy(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("part"))
    x = np.arange(100_000, dtype=np.float32)
    np.testing.assert_array_equal(session.run(x=x)["y"], x[:50_000])
    assert session.stats()["copied_bytes"]["between"] == 0


def test_a_node_that_writes_into_its_input_fails_with_the_reason(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("writes"))
    with pytest.raises(StepError, match="mutates_inputs"):
        session.run(x=np.zeros(100_000, np.float32))


def test_an_output_of_another_type_names_port_found_and_expected(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("wrong"))
    with pytest.raises(StepError, match=r"step s: .*found float64\[4\], expected float32\[N\]"):
        session.run(x=np.zeros(4, np.float32))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_failing_batch_is_halved_until_only_the_bad_item_fails(opened: Callable[..., Session]) -> None:
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


@pytest.mark.slow
def test_a_deadline_ends_a_request_and_frees_everything(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("slow"))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="unfinished steps: s"):
        session.run(RequestOptions(deadline_ms=50), x="a")
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


@pytest.mark.slow
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
        session.run(RequestOptions(outputs=["q"]), x="a")


@pytest.mark.slow
def test_many_tasks_share_one_session(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("picky"))

    async def all_at_once() -> list[str]:
        results = await asyncio.gather(*(session.arun(x=f"t{i}") for i in range(50)))
        return [result["y"] for result in results]

    assert asyncio.run(all_at_once()) == [f"T{i}" for i in range(50)]


def test_a_session_is_opened_and_closed_by_async_with() -> None:
    async def ask() -> tuple[Session, str]:
        pipeline = Builder("echoed")
        x = pipeline.input("x", "text")
        pipeline.output("y", pipeline.step("say", "echo", value=x).value)
        async with await load(pipeline).aopen() as session:
            return session, (await session.arun(x="a"))["y"]

    session, answer = asyncio.run(ask())
    assert (answer, session.closed, workers_of(os.getpid())) == ("a", True, [])


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
    stream.close()
    assert session.stats()["requests"]["cancelled"] == 1
    assert session.run(x="ok")["y"] == "ok"


def test_a_cancelled_stream_releases_the_leases_it_read(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Spells", "text", "text")
    for _ in range(3):
        stream = session.stream(x="a" * 100_000)
        next(stream)
        stream.close()
    session.run(x="after")
    assert session.stats()["arena"]["leased_bytes"] == 0


def test_streams_for_asyncio(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Spells", "text", "text")

    async def collect() -> list[str]:
        return [piece.value async for piece in session.astream(x="abc")]

    assert asyncio.run(collect()) == ["a", "b", "c", "abc"]


@pytest.mark.slow
def test_a_cancelled_task_withdraws_its_request(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("slow"))

    async def give_up() -> None:
        await asyncio.wait_for(session.arun(x="a"), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert session.stats()["requests"]["cancelled"] == 1
    time.sleep(0.4)  # the running item finishes, and its lease with it


def test_nodes_are_closed_and_a_closed_session_raises_an_error(opened: Callable[..., Session], tmp_path: Path) -> None:
    session = opened("text", "nodes.py:Closes", "text", "text")
    assert session.run(x="a")["y"] == "a"
    session.close()
    assert (tmp_path / "closed").read_text() == "yes"
    with pytest.raises(SessionClosed):
        session.run(x="a")


@pytest.mark.slow
def test_closing_ends_the_requests_that_wait(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("slow"))
    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(session.run, x="a")
        time.sleep(0.1)
        session.close()
        with pytest.raises((SessionClosed, RequestCancelled)):
            waiting.result(5)


@pytest.mark.slow
def test_a_forwarded_value_is_not_packed_again_and_a_new_one_always_is(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_caller_whose_event_loop_is_closed_loses_only_its_own_request(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("slow"))
    loop = asyncio.new_event_loop()
    left_behind = loop.create_task(session.arun(x="a"))
    loop.run_until_complete(asyncio.sleep(0.1))
    loop._ready.clear()  # type: ignore[attr-defined]
    loop.close()
    time.sleep(0.5)
    assert not left_behind.done() and session.run(x="b")["y"] == "b"


def test_a_stream_that_is_dropped_unread_releases_everything(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("double"))
    for _ in range(3):
        session.stream(x=np.ones(100_000, np.float32))
    session.run(x=np.ones(10, np.float32))
    assert session.stats()["arena"]["leased_bytes"] == 0


@pytest.mark.slow
def test_a_round_that_raises_fails_its_items_and_not_the_worker(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Breaks", "text", "text")
    pids = session.pids()
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(session.run, x="wait")
        time.sleep(0.1)
        for one in (first, callers.submit(session.run, x="wait")):
            with pytest.raises(StepError, match="too many"):
                one.result(10)
    assert session.run(x="ok")["y"] == "ok" and session.pids() == pids


@pytest.mark.slow
def test_a_pending_batch_frees_memory_and_no_request_is_refused_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    p = Builder("room", base_dir=tmp_path, limits={"arena_bytes": 256 << 10})
    x = p.input("x", "float32[N]")
    made = p.step("make", "function", function="steps.py:makes", x=x, batch={"items_max": 1})
    batch = {"items_max": 8, "wait_max_ms": 200}
    p.output("y", p.step("sum", "function", function="steps.py:gathers", x=made.output, batch=batch).output)
    with load(p).open() as session, ThreadPoolExecutor(6) as callers:
        results = callers.map(lambda _: session.run(x=np.zeros(4, np.float32)), range(6))
        assert [float(result["y"]) for result in results] == [25_000.0] * 6


@pytest.mark.slow
def test_a_chain_copies_8_mb_in_and_out_and_not_between_its_steps(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    p = Builder("chain", base_dir=tmp_path)
    wire: Any = p.input("x", "uint8[N]")
    for name in ("a", "b", "c"):
        wire = p.step(name, "function", function="steps.py:passes", x=wire).output
    p.output("y", wire)
    size = 8 << 20
    with load(p).open() as session:
        assert session.run(x=np.full(size, 3, np.uint8))["y"].sum() == 3 * size
        stats = session.stats()
        assert stats["copied_bytes"] == {"in": size, "between": 0, "out": size}
        assert stats["copied_bytes_total"] == 2 * size
        assert len(set(session.pids().values())) == 3


def test_a_killed_workers_children_go_with_it(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("spawns"))
    child = int(session.run(x="a")["y"])
    assert psutil.pid_exists(child)
    os.kill(session.pids()["s"], signal.SIGKILL)
    until = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie" and time.monotonic() < until:
        time.sleep(0.02)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


@pytest.mark.slow
def test_a_restarted_worker_leaves_no_old_arena_descriptor_in_others(tmp_path: Path) -> None:
    p = Builder("three")
    wire: Any = p.input("x", "text")
    for name in ("a", "b", "c"):
        wire = p.step(name, "echo", value=wire).value
    p.output("y", wire)

    def arenas(pid: int) -> int:
        return sum("memfd:weftline" in str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir())

    with load(p).open() as session:
        assert answers(session)  # so that every worker has taken in what it was sent
        before = session.pids()
        counts = {name: arenas(pid) for name, pid in before.items()}
        os.kill(before["a"], signal.SIGKILL)
        until = time.monotonic() + 20
        while (session.pids().get("a") in (None, before["a"]) or not answers(session)) and time.monotonic() < until:
            time.sleep(0.05)
        assert {name: arenas(pid) for name, pid in session.pids().items()} == counts


def answers(session: Session) -> bool:
    try:
        return bool(session.run(RequestOptions(deadline_ms=500), x="a")["y"])
    except WeftlineError:
        return False


@pytest.mark.slow
def test_modules_in_the_current_folder_are_not_run_by_workers(tmp_path: Path) -> None:
    (tmp_path / "logging.py").write_text("raise SystemExit('a stranger ran')")
    script = (
        "from weftline.engine.session import load\n"
        "from weftline.pipelines.spec.builder import Builder\n"
        "p = Builder('one')\n"
        "p.output('y', p.step('s', 'echo', value=p.input('x', 'text')).value)\n"
        "with load(p).open() as session: print(session.run(x='fine')['y'])\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.slow
def test_endless_lines_on_standard_error_are_cut(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("bars"))
    assert session.run(x="a")["y"] == "a"
    time.sleep(0.2)
    (_, process), *_ = session._current.runtime.fleet._workers.values()
    assert process.last_lines and all(len(line) <= 8192 for line in process.last_lines)
    assert session.stats()["output_dropped_bytes"]["s"] > 3_000_000


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("deadline_ms", [float("inf"), float("nan"), 1e300, -1, "soon", True])
def test_an_invalid_deadline_is_refused_and_affects_no_other_request(
    opened: Callable[..., Session], deadline_ms: Any
) -> None:
    session = opened("text", "nodes.py:Spells", "text", "text")
    with pytest.raises(InputError, match="deadline_ms"):
        session.stream(RequestOptions(deadline_ms=deadline_ms), x="a")
    assert session.run(RequestOptions(deadline_ms=86_400_000), x="ok")["y"] == "ok"


@pytest.mark.slow
def test_foreign_byte_order_is_converted_and_objects_are_refused(opened: Callable[..., Session]) -> None:
    session = opened("float32[N]", port="x", **function("foreign"))
    assert session.run(x=np.zeros(1, np.float32))["y"].tolist() == [0, 1, 2, 3, 4, 5]
    session = opened("float32[N]", port="x", **function("objects"))
    with pytest.raises(StepError, match="found object"):
        session.run(x=np.zeros(1, np.float32))


def test_a_message_that_utf8_cannot_hold_is_escaped(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("surrogate"))
    with pytest.raises(StepError, match=r"bad \\udcff name"):
        session.run(x="a")


def test_a_chunk_of_an_unknown_item_fails_the_step_with_the_reason(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Confused", "text", "text")
    with pytest.raises(StepError, match="which was not submitted"):
        session.run(RequestOptions(deadline_ms=10_000), x="a")


@pytest.mark.slow
def test_a_streaming_node_that_hangs_is_killed_after_run_max_ms(opened: Callable[..., Session]) -> None:
    session = opened("text", "nodes.py:Confused", "text", "text", run_max_ms=300)
    with pytest.raises(WorkerDied, match="run_max_ms"):
        session.run(RequestOptions(deadline_ms=20_000), x="hang")


def test_a_session_belongs_to_the_process_that_opened_it(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("picky"))
    child = os.fork()
    if child == 0:
        try:
            session.run(RequestOptions(deadline_ms=2000), x="a")
        except SessionClosed:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert session.run(x="a")["y"] == "A"


def test_a_child_that_a_step_forks_does_not_answer_for_it(opened: Callable[..., Session]) -> None:
    session = opened("text", port="text", **function("forks"))
    pids = session.pids()
    assert [session.run(x="a")["y"] for _ in range(5)] == ["the parent"] * 5
    assert session.pids() == pids


@pytest.mark.slow
def test_a_progress_callback_may_use_the_session_and_runs_for_every_step() -> None:
    p = Builder("one", limits={"arena_bytes": 1 << 20})
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    reported: list[tuple[str, int]] = []
    session = Session(
        load(p).plan, lambda step, phrase, share: reported.append((phrase, session.stats()["queued"][step]))
    )
    with ThreadPoolExecutor(1) as callers:
        callers.submit(session.open, 20.0).result(10)
        assert reported == [("opening", 0), ("warming up", 0), ("ready", 0)]
        session.close()


DETECTOR = """
import os
from dataclasses import dataclass
from pathlib import Path
import numpy as np

AT_IMPORT = os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"]

@dataclass
class Box:
    label: str
    corners: np.ndarray

class Detector:
    def __init__(self, labels: list[str], log: Path, least: float = 0.5):
        self.labels, self.log, self.least = labels, log, least

    def __call__(self, scores: "float32[N]", scale: int = 1) -> list[Box]:
        found = np.flatnonzero(scores >= self.least)
        return [Box(self.labels[at], scores[at] * np.ones(2, np.float32) * scale) for at in found]

    def close(self):
        self.log.write_text("closed")

def threads(scores: "float32[N]") -> list:
    return AT_IMPORT

def wrong(scores: "float32[N]", scale: float) -> dict[str, float]:
    return {"best": scores.max() * scale, "all": None}
"""


@pytest.fixture
def detector(tmp_path: Path) -> Builder:
    (tmp_path / "steps.py").write_text(DETECTOR)
    return Builder("sample", base_dir=tmp_path)


def test_a_steps_file_that_opens_a_pipeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import weftline\n"
        "def same(note: str) -> str:\n    return note\n"
        "p = weftline.Pipeline('p')\n"
        "step = p.step('same', 'function', function='script.py:same', note=p.input('note', 'text'))\n"
        "p.output('note', step.output)\n"
        "if __name__ != '__main__':\n    weftline.load(p).open()\n"
    )
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {note: text}\noutputs: {note: same.output}\n"
        "steps: {same: {node: function, function: 'script.py:same', inputs: {note: note}}}\n"
    )
    with pytest.raises(
        ModelError, match=r"script\.py opens a pipeline while a step imports it\n    fix: put what opens"
    ):
        load(tmp_path / "p.yaml").open()


@pytest.mark.slow
def test_a_class_gets_arguments_answers_with_dataclasses_and_is_closed(detector: Builder, tmp_path: Path) -> None:
    scores = detector.input("scores", "float32[N]")
    arguments = {"labels": ["cat", "dog"], "log": "closed.txt"}
    find = detector.step("find", "function", function="steps.py:Detector", arguments=arguments, scores=scores)
    bad = detector.step("bad", "function", function="steps.py:wrong", arguments={"scale": 2}, scores=scores)
    detector.output("boxes", find.output)
    detector.output("bad", bad.output)
    with load(detector.build()).open() as session:
        given = np.array([0.25, 0.75], np.float32)
        assert session.run(RequestOptions(outputs=["boxes"]), scores=given)["boxes"] == [
            {"label": "dog", "corners": [0.75, 0.75]}
        ]
        with pytest.raises(StepError, match=r"output\.all: found null \(None\), expected float"):
            session.run(RequestOptions(outputs=["bad"]), scores=given)
    assert (tmp_path / "closed.txt").read_text() == "closed"


@pytest.mark.slow
def test_a_functions_threads_are_set_before_it_is_imported(detector: Builder) -> None:
    scores = detector.input("scores", "float32[N]")
    for name, more in (("usual", {}), ("three", {"threads": 3})):
        step = detector.step(name, "function", function="steps.py:threads", scores=scores, **more)
        detector.output(name, step.output)
    with load(detector.build()).open() as session:
        result = session.run(scores=np.zeros(1, np.float32))
    assert (result["usual"], result["three"]) == (["1", "1"], ["3", "3"])


@pytest.mark.slow
def test_torch_in_a_function_has_its_steps_threads(detector: Builder, tmp_path: Path) -> None:
    source = "import torch\ndef threads(scores: 'float32[N]') -> int:\n    return torch.get_num_threads()\n"
    (tmp_path / "with_torch.py").write_text(source)
    scores = detector.input("scores", "float32[N]")
    step = detector.step("three", "function", function="with_torch.py:threads", threads=3, scores=scores)
    detector.output("three", step.output)
    with load(detector.build()).open() as session:
        assert session.run(scores=np.zeros(1, np.float32))["three"] == 3
