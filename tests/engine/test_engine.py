"""Pipelines that share what is loaded: one engine for a repository, and reloads that touch no model."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from tests.engine.fire import wait_until
from weftline.engine.repository import Repository
from weftline.engine.session import Session, Source, load
from weftline.errors import ModelError, PipelineError, RequestCancelled, SessionClosed, WeftlineError
from weftline.pipelines.spec.builder import Builder

Make = Callable[..., Builder]


@pytest.fixture
def pipelines() -> Iterator[Repository]:
    with Repository() as repository:
        yield repository


def waits(text: str) -> str:
    time.sleep(float(text or 0))
    return text


def chain(name: str = "p", marks: str = "", delay_ms: float = 0.0, **more: Any) -> Builder:
    """Return a pipeline whose answer begins with `marks`, by a switch that the scheduler evaluates."""
    p = Builder(name, limits={"arena_bytes": 1 << 20})
    x = p.input("x", "text")
    slow = p.step("slow", "echo", value=x, delay_ms=delay_ms, **more)
    first = p.step("pick", "first", a=slow.value, b=x)
    p.output("y", p.step("mark", "echo", value=first.value, **more).value)
    p.output("same", slow.value)
    if marks:
        p.output(marks, x)
    return p


def opened(repository: Repository, sources: dict[str, Source]) -> dict[str, int | WeftlineError]:
    return dict(repository.load_together(sources))


def arenas_of(pid: int) -> int:
    """Return the number of arenas that a process has mapped."""
    return len({line.split()[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd" in line})


def test_a_changed_graph_is_swapped_and_no_process_ends() -> None:
    with load(chain()).open() as session:
        pids = session.pids()
        assert session.reload(chain(marks="z")) == 2 == session.version
        assert session.pids() == pids and session.run(x="a")["z"] == "a"
        assert session.stats()["requests"]["admitted"] == 1, "counters are the version's own"
        assert session.reload(chain(delay_ms=1.0)) == 3
        assert session.pids() != pids and "z" not in session.run(x="b")
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()), 10)


def test_requests_of_the_version_before_finish_in_it() -> None:
    with load(chain(delay_ms=300.0)).open() as session, ThreadPoolExecutor(4) as callers:
        before = [callers.submit(session.run, x=str(at)) for at in range(4)]
        wait_until(lambda: session.stats()["requests"]["open"] == 4)
        session.reload(chain(delay_ms=300.0, marks="z"))
        assert [set(one.result(10)) for one in before] == [{"y", "same"}] * 4
        assert set(session.run(x="a")) == {"y", "same", "z"}


def test_requests_that_outlast_the_drain_are_cancelled() -> None:
    with load(chain(delay_ms=700.0)).open() as session, ThreadPoolExecutor(1) as callers:
        before = callers.submit(session.run, x="a" * 100_000)
        wait_until(lambda: session.stats()["requests"]["open"] == 1)
        pids = session.pids()
        session.reload(chain(delay_ms=700.0, marks="z"), drain_s=0.0)
        with pytest.raises(RequestCancelled, match="a new version took over"):
            before.result(10)
        assert session.pids() == pids and session.run(x="b")["z"] == "b"
        wait_until(lambda: session.stats()["arena"]["leased_bytes"] == 0, 10)
        wait_until(lambda: len(session._current.runtime.fleet._readers._inputs) == 1, 10)  # the arena of the old inputs


def test_pipelines_that_are_loaded_together_share_and_end_apart(pipelines: Repository) -> None:
    sources: dict[str, Source] = {"a": chain("a"), "b": chain("b", "z"), "c": chain("c", delay_ms=1.0)}
    assert opened(pipelines, sources) == {"a": 1, "b": 1, "c": 1}
    pids = {name: pipelines.get(name).pids() for name in "abc"}
    assert pids["a"] == pids["b"] and len({*pids["a"].values()} | {*pids["c"].values()}) == 3
    assert [pipelines.get(name).run(x=name)["y"] for name in "abc"] == ["a", "b", "c"]
    assert [pipelines.get(name).stats()["requests"]["ok"] for name in "abc"] == [1, 1, 1]
    pipelines.unload("a")
    assert pipelines.get("b").run(x="b")["z"] == "b" and pipelines.get("b").pids() == pids["b"]
    (own,) = set(pids["c"].values()) - set(pids["a"].values())
    pipelines.unload("c")
    wait_until(lambda: not psutil.pid_exists(own) or psutil.Process(own).status() == "zombie", 10)
    assert pipelines.get("b").run(x="b")["z"] == "b"
    with pytest.raises(Exception, match="no pipeline is called a"):
        pipelines.get("a")


def entered(repository: Repository, name: str) -> int:
    """Return the version that a request of now enters."""
    version, request = repository.get(name)._versions.enter()
    version.leave(request)
    return version.number


@pytest.mark.parametrize("changed", [chain("p", "z"), chain("p", delay_ms=1.0)], ids=["graph", "model"])
def test_names_of_one_reload_change_in_the_same_moment(pipelines: Repository, changed: Builder) -> None:
    names = ("p", "p.slow", "p.mark")
    opened(pipelines, {name: chain() for name in names})
    met: list[tuple[int, ...]] = []

    def look(frame: FrameType, event: str, argument: object) -> Any:
        """Look between any two lines of the code that changes versions, from there and back."""
        if Path(frame.f_code.co_filename).name not in ("versions.py", "repository.py", "session.py"):
            return None
        sys.settrace(None)
        met.append(tuple(entered(pipelines, name) for name in names))
        met.append(tuple(pipelines.get(name).version for name in reversed(names)))
        sys.settrace(look)
        return look

    traced = sys.gettrace()
    sys.settrace(look)
    try:
        done = opened(pipelines, dict.fromkeys(names, changed))
    finally:
        sys.settrace(traced)
    assert done == dict.fromkeys(names, 2)
    assert set(met) == {(1, 1, 1), (2, 2, 2)}
    assert len({frozenset(pipelines.get(name).pids().values()) for name in names}) == 1, "they share what is new"


def test_a_strict_reload_changes_all_names_or_none(pipelines: Repository, broken: Make) -> None:
    opened(pipelines, {name: chain(name) for name in "ab"})
    pids = pipelines.get("a").pids()
    for first, second in (("a", "b"), ("b", "a")):
        wanted = {first: chain(first, delay_ms=1.0), "new": chain("new"), second: broken(second)}
        with pytest.raises(ModelError, match="no such model"):
            dict(pipelines.load_together(wanted, strict=True))
        assert {entry.name: (entry.state, entry.version) for entry in pipelines.index()} == {
            "a": ("ready", 1),
            "b": ("ready", 1),
            "new": ("failed", 0),
        }
        why = {entry.name: entry.why for entry in pipelines.index()}
        assert why[first].startswith(f"{second} could not be loaded: step refuses: ")
        assert pipelines.get("a").run(x="x")["y"] == "x" and pipelines.get("a").pids() == pids
    assert opened(pipelines, {"a": chain("a", "z"), "b": broken("b")})["a"] == 2, "else the others change"
    assert dict(pipelines.load_together({"a": chain("a"), "new": chain("new")}, strict=True)) == {"a": 3, "new": 1}


def test_a_pipeline_that_is_loaded_later_joins_what_stands(pipelines: Repository) -> None:
    pipelines.load("a", chain("a"))
    pids = pipelines.get("a").pids()
    pipelines.load("b", chain("b", "z"))
    assert pipelines.get("b").pids() == pids and pipelines.get("b").run(x="b")["z"] == "b"
    pipelines.unload("a")
    assert pipelines.get("b").run(x="b")["y"] == "b"
    pipelines.load("c", chain("c", delay_ms=1.0))
    assert pipelines.get("c").pids() != pids


@pytest.fixture
def broken(tmp_path: Path) -> Make:
    (tmp_path / "nodes.py").write_text(
        "from weftline.node import BatchNode, ModelError, Port, Ports, PortType\n"
        "class Refuses(BatchNode):\n"
        "    @classmethod\n"
        "    def ports(cls, config, step):\n"
        "        return Ports([Port('value', PortType.parse('text'))], [Port('value', PortType.parse('text'))])\n"
        "    def open(self, context):\n"
        "        raise ModelError('no such model')\n"
        "    def run(self, batch):\n"
        "        return {'value': batch['value']}\n"
    )

    def make(name: str) -> Builder:
        p = Builder(name, base_dir=tmp_path, limits={"arena_bytes": 1 << 20})
        x = p.input("x", "text")
        p.output("y", p.step("refuses", "nodes.py:Refuses", value=x).value)
        p.output("same", p.step("slow", "echo", value=x).value)
        return p

    return make


def test_what_cannot_open_leaves_the_others_serving(pipelines: Repository, broken: Make) -> None:
    wrong = Builder("wrong")
    wrong.output("y", wrong.step("s", "echo", value=wrong.input("x", "no such type")).value)
    found = opened(pipelines, {"wrong": wrong, "bad": broken("bad"), "good": chain("good")})
    assert found["good"] == 1 and pipelines.get("good").run(x="a")["y"] == "a"
    assert isinstance(found["wrong"], PipelineError) and isinstance(found["bad"], ModelError)
    assert "no such model" in str(found["bad"]) and "refuses" in str(found["bad"])
    states = {entry.name: (entry.state, bool(entry.why)) for entry in pipelines.index()}
    assert states == {"bad": ("failed", True), "good": ("ready", False), "wrong": ("failed", True)}
    assert pipelines.get("good").health().ready


def test_a_worker_maps_the_arenas_of_its_own_programs_only(pipelines: Repository) -> None:
    opened(pipelines, {"a": chain("a"), "c": chain("c", delay_ms=1.0, worker="own")})
    pipelines.get("a").run(x="a")
    pipelines.get("c").run(x="c")
    own, others = pipelines.get("c").pids(), pipelines.get("a").pids()
    assert not set(own.values()) & set(others.values())
    assert {arenas_of(pid) for pid in own.values()} == {2}, "its own, and that of the inputs of c"
    assert {arenas_of(pid) for pid in others.values()} == {3}, "those of both workers, and that of the inputs of a"


def test_two_steps_of_one_pipeline_share_where_both_say_so() -> None:
    p = Builder("two", limits={"arena_bytes": 1 << 20})
    first = p.step("one", "echo", value=p.input("x", "text"), share=True)
    p.output("y", p.step("other", "echo", value=first.value, share=True).value)
    with load(p).open() as session:
        assert session.run(x="a")["y"] == "a" and len(session.pids()) == 1
        stats = session.stats()
        assert stats["workers"] == {"one": stats["workers"]["other"], "other": {"ready": 1, "asleep": 0, "all": 1}}
        assert [timing.step for timing in session.run(x="b").timings] == ["one", "other"]


def test_closing_while_a_shared_engine_opens_ends_everything(broken: Make) -> None:
    before = {one.pid for one in psutil.Process().children()}
    repository = Repository()
    loading = repository.load_together({"a": chain("a"), "b": chain("b", delay_ms=1.0)})
    assert next(loading) == ("a", 1)
    repository.close()
    found = list(loading)
    assert len(found) == 1 and isinstance(found[0][1], SessionClosed)
    wait_until(lambda: {one.pid for one in psutil.Process().children()} <= before, 10)


def test_a_pipeline_that_is_closed_while_it_opens_says_so(pipelines: Repository, tmp_path: Path) -> None:
    (tmp_path / "nodes.py").write_text(
        "import time\nfrom weftline.node import BatchNode, Port, Ports, PortType\n"
        "class Loads(BatchNode):\n"
        "    @classmethod\n"
        "    def ports(cls, config, step):\n"
        "        return Ports([Port('value', PortType.parse('text'))], [Port('value', PortType.parse('text'))])\n"
        "    def open(self, context):\n"
        "        time.sleep(30)\n"
        "    def run(self, batch):\n"
        "        return {'value': batch['value']}\n"
    )
    slow = Builder("slow", base_dir=tmp_path, limits={"arena_bytes": 1 << 20})
    slow.output("y", slow.step("loads", "nodes.py:Loads", value=slow.input("x", "text")).value)
    with ThreadPoolExecutor(1) as loads:
        loading = loads.submit(opened, pipelines, {"a": chain("a"), "slow": slow})
        wait_until(lambda: "slow" in pipelines._names and pipelines._names["slow"].session is not None)
        session = pipelines._names["slow"].session
        assert session is not None
        session.close()
        found = loading.result(10)
    assert found["a"] == 1 and isinstance(found["slow"], SessionClosed)
    assert pipelines.get("a").run(x="a")["y"] == "a"


def test_reloads_of_two_names_over_one_engine_run_at_once(pipelines: Repository) -> None:
    opened(pipelines, {"a": chain("a"), "b": chain("b")})
    pids, wrong, over = pipelines.get("a").pids(), list[str](), threading.Event()

    def ask(name: str) -> None:
        while not over.is_set():
            answer = pipelines.get(name).run(x=name)
            if answer["y"] != name:
                wrong.append(name)

    with ThreadPoolExecutor(6) as callers:
        asking = [callers.submit(ask, name) for name in "abab"]
        swaps = [
            callers.submit(lambda name=name: [pipelines.load(name, chain(name, f"z{at}")) for at in range(15)])
            for name in "ab"
        ]
        assert [one.result(60)[-1] for one in swaps] == [16, 16]
        over.set()
        for one in asking:
            one.result(10)
    assert not wrong and pipelines.get("a").pids() == pids == pipelines.get("b").pids()
    engine = pipelines.get("a")._current.engine
    assert engine is pipelines.get("b")._current.engine and len(engine._programs) == 2
    wait_until(lambda: len(engine.runtime._programs) == 2, 5)


def test_a_session_reports_its_own_steps_only(pipelines: Repository) -> None:
    opened(pipelines, {"a": chain("a"), "c": chain("c", delay_ms=1.0)})
    session: Session = pipelines.get("c")
    assert set(session.health().steps) == {"slow", "pick", "mark"}
    stats = session.stats()
    assert set(stats["queued"]) == {"slow", "mark"} and set(stats["workers"]) == {"slow", "mark"}
