"""Many pipelines by name: loaded, replaced and unloaded from many threads, with nothing left behind."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from weftline.engine.repository import FAILED, READY, TRANSITIONS, Repository
from weftline.errors import InputError, LimitReached, ModelError, SessionClosed, WeftlineError
from weftline.pipelines.spec.builder import Builder

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
def make(tmp_path: Path) -> Callable[..., Builder]:
    """Return a pipeline of one step that answers with a mark."""
    (tmp_path / "nodes.py").write_text(NODES)

    def make(mark: str = "1", node: str = "") -> Builder:
        (tmp_path / f"mark{mark}.py").write_text(f"def say(text: str) -> str:\n    return text + {mark!r}\n")
        p = Builder("one", base_dir=tmp_path, limits={"arena_bytes": 1 << 20})
        options = {} if node else {"function": f"mark{mark}.py:say"}
        p.output("y", p.step("s", node or "function", text=p.input("x", "text"), **options).output)
        return p

    return make


def descriptors() -> int:
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def workers() -> list[int]:
    found = []
    for child in psutil.Process().children():
        try:
            found += [child.pid] if "weftline.engine.worker" in child.cmdline() else []
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_pipelines_answer_under_their_names_until_they_are_unloaded(make: Callable[..., Builder]) -> None:
    with Repository() as pipelines:
        assert pipelines.load("a", make("1")) == 1
        assert pipelines.load("b", make("2")) == 1
        assert pipelines.get("a").run(x="x")["y"] == "x1" and pipelines.get("b").run(x="x")["y"] == "x2"
        assert [(e.name, e.state, e.ready, e.version) for e in pipelines.index()] == [
            ("a", READY, True, 1),
            ("b", READY, True, 1),
        ]
        session = pipelines.get("a")
        pipelines.unload("a")
        with pytest.raises(SessionClosed):
            session.run(x="x")
        with pytest.raises(InputError, match="no pipeline is called a; there are: b"):
            pipelines.get("a")
        assert [entry.name for entry in pipelines.index()] == ["b"]
    with pytest.raises(SessionClosed, match="the repository is closed"):
        pipelines.load("a", make("1"))
    assert workers() == []


def test_a_name_is_reloaded_from_its_own_source_or_from_another(make: Callable[..., Builder], tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("def say(text: str) -> str:\n    return text + ' old'\n")
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {x: text}\nsteps:\n"
        "  s: {node: function, function: 'say.py:say', inputs: {text: x}}\noutputs: {y: s.output}\n"
    )
    with Repository() as pipelines:
        pipelines.load("a", tmp_path / "p.yaml")
        (tmp_path / "say.py").write_text("def say(text: str) -> str:\n    return text + ' newer'\n")
        assert pipelines.reload("a") == 2
        session = pipelines.get("a")
        assert session.run(x="x")["y"] == "x newer"
        assert pipelines.load("a", make("3")) == 3
        assert session.run(x="x")["y"] == "x3", "who holds the session meets the new version"


@pytest.mark.slow
def test_a_version_that_fails_leaves_the_old_one_and_says_why(make: Callable[..., Builder]) -> None:
    with Repository() as pipelines:
        with pytest.raises(ModelError, match="no such model"):
            pipelines.load("a", make(node="nodes.py:Refuses"))
        (entry,) = pipelines.index()
        assert entry.state == FAILED and not entry.ready and "no such model" in entry.why
        with pytest.raises(SessionClosed, match=r"a is failed: .*no such model"):
            pipelines.get("a")
        pipelines.load("a", make("1"))
        with pytest.raises(ModelError):
            pipelines.reload("a", make(node="nodes.py:Refuses"))
        (entry,) = pipelines.index()
        assert (entry.state, entry.ready, entry.version) == (READY, True, 1) and "no such model" in entry.why
        assert pipelines.get("a").run(x="x")["y"] == "x1"
        assert pipelines.reload("a") == 2, "its source is still the one that worked"


def test_names_are_checked_and_counted(make: Callable[..., Builder]) -> None:
    with Repository(pipelines_max=1) as pipelines:
        for name in ("", "../a", "a/b", "a\n", "a" * 129, 3):
            with pytest.raises(InputError, match="1 to 128"):
                pipelines.load(name, make("1"))  # type: ignore[arg-type]
        for operation in (pipelines.unload, pipelines.reload, pipelines.get):
            with pytest.raises(InputError, match="no pipeline is called b; there are: none"):
                operation("b")
        pipelines.load("a", make("1"))
        with pytest.raises(LimitReached, match="pipelines_max is 1"):
            pipelines.load("b", make("1"))


@pytest.mark.slow
def test_one_name_being_loaded_does_not_hold_up_another(make: Callable[..., Builder]) -> None:
    with Repository() as pipelines, ThreadPoolExecutor(1) as others:
        loading = others.submit(pipelines.load, "slow", make(node="nodes.py:Loads"))
        while not pipelines.index():
            time.sleep(0.01)
        pipelines.load("quick", make("1"))
        assert pipelines.get("quick").run(x="x")["y"] == "x1"
        with pytest.raises(SessionClosed, match="slow is loading"):
            pipelines.get("slow")
        pipelines.close()  # while it loads
        with pytest.raises(SessionClosed):
            loading.result(10)
    assert workers() == []


def test_a_table_has_no_way_out_of_nowhere() -> None:
    states = {state for state, _ in TRANSITIONS}
    assert set(TRANSITIONS.values()) == states, "every state can be reached, and left"


@pytest.mark.slow
def test_eight_threads_act_at_random_and_it_is_closed_while_loading(
    make: Callable[..., Builder],
) -> None:
    good = [make(str(number)) for number in range(3)]
    bad = make(node="nodes.py:Refuses")
    with Repository() as pipelines:
        pipelines.load("warm", good[0])
    before = descriptors()
    pipelines = Repository()
    until = time.monotonic() + 4
    needed = {"run", "load", "reload", "unload"}
    wrong: list[BaseException] = []
    seen: Counter[str] = Counter()

    def act(seed: int) -> None:
        choose = random.Random(seed)
        while time.monotonic() < until or (needed - set(seen) and time.monotonic() < until + 50):
            name, what = choose.choice("abc"), choose.choice(["load", "unload", "reload", "bad", *["run"] * 12])
            try:
                if what == "load":
                    pipelines.load(name, choose.choice(good))
                elif what == "unload":
                    pipelines.unload(name)
                elif what == "reload":
                    pipelines.reload(name)
                elif what == "bad":
                    pipelines.reload(name, bad)
                elif pipelines.get(name).run(x="x")["y"] not in ("x0", "x1", "x2"):
                    raise AssertionError("a wrong answer")
                seen[what] += 1
            except (InputError, SessionClosed, ModelError):
                seen["refused"] += 1
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=act, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == [] and needed <= set(seen)
    for entry in pipelines.index():
        if entry.state == READY:
            assert pipelines.get(entry.name).run(x="x")["y"] in ("x0", "x1", "x2")

    def load(name: str) -> None:
        try:
            pipelines.load(name, good[0])
        except WeftlineError:
            pass

    loading = [threading.Thread(target=load, args=(name,)) for name in ("a", "d", "e")]
    for thread in loading:
        thread.start()
    time.sleep(0.1)
    pipelines.close()
    for thread in loading:
        thread.join(10)
    assert workers() == [] and descriptors() == before
