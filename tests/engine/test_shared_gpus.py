"""One owner of the GPUs of a process: what is open shares them, and what is gone has nothing of them."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weftline.engine import planned as planned_module
from weftline.engine import shared_gpus, versions
from weftline.engine.jobs.answering import opening
from weftline.engine.jobs.rows import Block
from weftline.engine.repository import FAILED, READY, Repository
from weftline.engine.runtime import Runtime
from weftline.engine.session import Session, load
from weftline.engine.shared_gpus import GPUS, TRIES_MAX, SharedGpus
from weftline.errors import ModelError, PipelineError, SessionClosed, WeftlineError
from weftline.pipelines.builder import Builder
from weftline.pipelines.machine import Device, Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan

MIB = 1 << 20
ONE = Machine(2, 8 << 30, (Device("fake:0", 100 * MIB),))
TWO = Machine(2, 8 << 30, (Device("fake:0", 100 * MIB), Device("fake:1", 100 * MIB)))
NODES = '''
import time
from weftline.nodes.contract import BatchNode
from weftline.nodes.ports import Ports, port

class Says(BatchNode):
    """Answers with its input, and what it computes on."""
    heavy = True
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("output", "text"),))
    def open(self, context):
        self.device = context.device
    def run(self, batch):
        return {"output": [f"{text} on {self.device}" for text in batch["text"]]}

class Refuses(Says):
    """Cannot be opened."""
    def open(self, context):
        raise ValueError("no such model")

class Loads(Says):
    """Takes a while to open."""
    def open(self, context):
        time.sleep(0.5)
'''


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Builder]:
    """Return a pipeline of one step that takes so many MiB of a GPU, 1 MiB of them for its process."""
    (tmp_path / "nodes.py").write_text(NODES)

    def make(mib: int, node: str = "Says", device: str = "auto", name: str = "one") -> Builder:
        gpu = {"reserve_bytes": 0, "context_bytes": MIB}
        p = Builder(name, base_dir=tmp_path, limits={"arena_bytes": MIB}, gpu=gpu)
        step = p.step("s", f"nodes.py:{node}", text=p.input("x", "text"), device=device, device_bytes=(mib - 1) * MIB)
        p.output("y", step.output)
        return p

    return make


def planned(builder: Builder) -> tuple[Plan, Callable[[Machine], Plan]]:
    graph = builder.build()
    return make_plan(graph, TWO), lambda machine: make_plan(graph, machine)


# what is held


def test_a_plan_is_made_again_for_what_others_have_left(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = SharedGpus(), planned(make(60))
    first, second, third = (gpus.hold("one", gpus.new_session()) for _ in range(3))
    assert first.take(plan, again, TWO) is plan, "nobody has anything"
    assert first.take(plan, again, TWO) is plan and gpus.held_bytes == {"fake:0": 60 * MIB}, "it is held once"
    moved = second.take(plan, again, TWO)
    assert second.take(plan, again, TWO) is moved
    assert moved.step("s").device == "fake:1" and gpus.held_bytes == {"fake:0": 60 * MIB, "fake:1": 60 * MIB}
    with pytest.raises(PipelineError, match="20 MiB too much"):
        third.take(plan, again, TWO)
    first.give_back()
    first.give_back()
    with pytest.raises(SessionClosed):
        first.take(plan, again, TWO)
    assert third.take(plan, again, TWO).step("s").device == "fake:0"


def test_what_closes_is_told_nothing_and_its_claim_comes_back_whatever_happens(
    make: Callable[..., Builder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, (plan, _) = SharedGpus(), planned(make(60))
    hold = gpus.hold("ocr", 1)
    told: list[str] = []

    def breaks() -> None:
        hold.tell("fake:0", 1)
        raise OSError("an arena that does not close")

    hold.take(plan)
    runtime = Runtime(plan, tmp_path, hold=hold)
    monkeypatch.setattr(runtime, "tell_later", lambda *events: told.append("while it closed"))
    monkeypatch.setattr(runtime.fleet, "close", breaks)
    with pytest.raises(OSError, match="does not close"):
        runtime.close()
    assert told == [] and gpus.held_bytes == {}


def test_a_plan_alone_is_taken_as_it_is_or_refused(make: Callable[..., Builder]) -> None:
    gpus, (plan, _) = SharedGpus(), planned(make(60))
    gpus.hold("ocr", 1).take(plan)
    with pytest.raises(PipelineError, match="another pipeline"):
        gpus.hold("chat", 2).take(plan)
    small, _ = planned(make(40))
    assert gpus.hold("chat", 2).take(small) is small and gpus.held_bytes == {"fake:0": 100 * MIB}


def test_a_plan_without_a_gpu_holds_nothing_and_is_not_made_again(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = SharedGpus(), planned(make(60, device="cpu"))
    gpus.hold("ocr", 1).take(*planned(make(60)), TWO)
    assert gpus.hold("chat", 2).take(plan, again, TWO) is plan and gpus.held_bytes == {"fake:0": 60 * MIB}


def test_what_others_take_while_it_is_planned_counts(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = SharedGpus(), planned(make(60))
    gpus.hold("first", 1).take(planned(make(10))[0])
    made: list[str] = []

    def meanwhile(machine: Machine) -> Plan:
        made.append(again(machine).step("s").device)
        if len(made) == 1:  # made for fake:1, which somebody else takes before it is held
            other, _ = planned(make(60, device="fake:1"))
            gpus.hold("other", 2).take(other)
        return again(machine)

    assert gpus.hold("one", 3).take(plan, meanwhile, TWO).step("s").device == "fake:0"
    assert made == ["fake:1", "fake:0"]


def test_a_refusal_that_others_made_untrue_meanwhile_is_none(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = SharedGpus(), planned(make(60, device="fake:0"))
    blocking = gpus.hold("first", 1)
    blocking.take(plan)

    def meanwhile(machine: Machine) -> Plan:
        blocking.give_back()
        return again(machine)

    gpus.hold("one", 2).take(plan, meanwhile, TWO)
    assert gpus.held_bytes == {"fake:0": 60 * MIB}


def test_it_does_not_plan_for_ever(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = SharedGpus(), planned(make(60, device="fake:0"))
    gpus.hold("first", 1).take(planned(make(10))[0])
    tries: list[int] = []

    def always(machine: Machine) -> Plan:
        """Somebody takes what it was made for, each time."""
        gpus.hold("other", 100 + len(tries)).take(planned(make(50, device="fake:0"))[0]) if not tries else None
        tries.append(1)
        gpus.holdings.changes += 1
        return again(ONE)

    with pytest.raises(PipelineError, match="open it again"):
        gpus.hold("one", 2).take(plan, always, TWO)
    assert len(tries) == TRIES_MAX


def test_a_forked_process_begins_with_nothing(make: Callable[..., Builder]) -> None:
    gpus, (plan, _) = SharedGpus(), planned(make(60))
    gpus.hold("one", 1).take(plan)
    with gpus.lock:  # whoever has it in the parent is not there in the child
        child = os.fork()
        if not child:
            signal.alarm(10)  # a child that waits for the lock would wait for ever
            gpus.hold("two", 1).take(plan)
            os._exit(0 if gpus.held_bytes == {"fake:0": 60 * MIB} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_eight_threads_take_and_give_back_and_nothing_is_left(make: Callable[..., Builder]) -> None:
    gpus, plans = SharedGpus(), [planned(make(mib, name=f"p{mib}")) for mib in (20, 35, 60, 90)]
    most: list[int] = []

    def live(seed: int) -> tuple[int, int]:
        draw, taken, refused = random.Random(seed), 0, 0
        for _ in range(20):
            plan, again = draw.choice(plans)
            hold = gpus.hold(plan.name, gpus.new_session())
            try:
                made = hold.take(plan, again if draw.random() < 0.7 else None, TWO)
                taken += 1
                if draw.random() < 0.5:
                    hold.settle(made.step("s").device, draw.randrange(19) * MIB, 100 * MIB)
                most.append(max(gpus.held_bytes.values()))
            except PipelineError:
                refused += 1
            finally:
                hold.give_back()
        return taken, refused

    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(live, range(8)))
    assert gpus.held_bytes == {} and max(most) <= 100 * MIB
    assert sum(taken for taken, _ in counts) > 20, counts


def talking(mib: int | None) -> Callable[[Machine], Plan]:
    """Return what plans an llm step that takes so many MiB, 1 of them for its process; None: nobody knows."""
    p = Builder("talks", gpu={"reserve_bytes": 0, "context_bytes": MIB})
    known = {} if mib is None else {"device_bytes": (mib - 1) * MIB}
    p.output("y", p.step("s", "llm", prompt=p.input("x", "text"), model="m", device="fake:0", **known).text)
    graph = p.build()
    return lambda machine: make_plan(graph, machine)


def test_what_is_to_be_open_together_claims_before_the_first_opens(make: Callable[..., Builder]) -> None:
    gpus, agains = SharedGpus(), [talking(11), talking(21), planned(make(20))[1]]
    gpus.hold("other", 1).take(planned(make(8, device="fake:0"))[0])
    holds = [gpus.hold(f"p{number}", gpus.new_session()) for number in range(3)]
    gpus.take_together([*zip(holds, agains)], ONE)
    plans = [hold.take(again(ONE), again, ONE) for hold, again in zip(holds, agains)]
    assert [plan.budgets[0].kv_bytes for plan in plans] == [20 * MIB, 20 * MIB, 0]
    assert gpus.held_bytes == {"fake:0": 100 * MIB}
    more = gpus.hold("more", gpus.new_session())
    with pytest.raises(PipelineError, match=r"p0 .* another pipeline, with all that was left"):
        gpus.take_together([(more, talking(11))], ONE)
    holds[0].give_back()
    with pytest.raises(SessionClosed):
        gpus.take_together([(more, agains[0]), (holds[0], agains[0])], ONE)
    for hold in holds:
        hold.give_back()
    more.give_back()
    assert gpus.held_bytes == {"fake:0": 8 * MIB}


def test_who_takes_or_gives_back_while_several_are_planned_counts(make: Callable[..., Builder]) -> None:
    gpus, again, blocking = SharedGpus(), planned(make(60, device="fake:0"))[1], None
    tries: list[int] = []

    def meanwhile(machine: Machine) -> Plan:
        nonlocal blocking
        tries.append(1)
        if len(tries) == 1:
            blocking = gpus.hold("first", 1)
            blocking.take(planned(make(60))[0])
        elif blocking is not None and len(tries) == 2:
            blocking.give_back()
        return again(machine)

    gpus.take_together([(gpus.hold("one", 2), meanwhile)], ONE)
    assert (gpus.held_bytes, len(tries)) == ({"fake:0": 60 * MIB}, 3)


def test_who_waits_for_a_part_is_told_of_it_when_the_others_are_measured_or_gone() -> None:
    gpus, again = SharedGpus(), talking(None)
    first, second, third = (gpus.hold(name, gpus.new_session()) for name in "abc")
    gpus.take_together([(first, again), (second, again), (third, again)], ONE)
    told: list[tuple[str, int]] = []
    first.tell = lambda device, bytes: told.append((device, bytes))
    assert first.settle("fake:0", 20 * MIB, 100 * MIB).waits and second.settle("fake:0", 10 * MIB, 100 * MIB).waits
    assert told == []
    third.give_back()
    assert told == [("fake:0", (100 - 21 - 11) * MIB // 2)]


# what is open


def test_pipelines_of_a_repository_share_its_gpus(make: Callable[..., Builder]) -> None:
    with Repository(machine=TWO, gpus=(gpus := SharedGpus())) as pipelines:
        pipelines.load("a", make(60))
        pipelines.load("b", make(60))
        assert (
            pipelines.get("a").run(x="x")["y"] == "x on fake:0" and pipelines.get("b").run(x="x")["y"] == "x on fake:1"
        )
        with pytest.raises(PipelineError) as refused:
            pipelines.load("c", make(50))
        told = str(refused.value)
        assert "fake:0 has 100 MiB, and 110 MiB of it are claimed: 10 MiB too much" in told
        assert "60 MiB  a           another pipeline  claimed" in told and "or unload a" in told
        assert {entry.name: entry.state for entry in pipelines.index()} == {"a": READY, "b": READY, "c": FAILED}
        pipelines.unload("b")
        assert gpus.held_bytes == {"fake:0": 60 * MIB}
        pipelines.load("c", make(50))
        assert pipelines.get("c").run(x="x")["y"] == "x on fake:1"
    assert gpus.held_bytes == {}


def test_a_new_version_is_opened_beside_the_old_where_it_fits_and_else_the_old_goes_on(
    make: Callable[..., Builder],
) -> None:
    with Repository(machine=ONE, gpus=(gpus := SharedGpus())) as pipelines:
        pipelines.load("a", make(60))
        with pytest.raises(PipelineError) as refused:
            pipelines.reload("a")
        told = str(refused.value)
        assert "60 MiB  a           the version that serves  claimed" in told
        assert "unload the version that serves and load the new one (until then the old one goes on serving)" in told
        assert gpus.held_bytes == {"fake:0": 60 * MIB} and pipelines.get("a").run(x="x")["y"] == "x on fake:0"
        assert pipelines.reload("a", make(40)) == 2
        assert gpus.held_bytes == {"fake:0": 40 * MIB}, "the old version is gone, and what it had with it"


def test_what_does_not_open_gives_back_what_it_had_claimed(make: Callable[..., Builder]) -> None:
    with Repository(machine=ONE, gpus=(gpus := SharedGpus())) as pipelines:
        with pytest.raises(ModelError, match="no such model"):
            pipelines.load("a", make(60, "Refuses"))
        assert gpus.held_bytes == {}
        with ThreadPoolExecutor(1) as others:
            loading = others.submit(pipelines.load, "slow", make(60, "Loads"))
            while not gpus.held_bytes:
                time.sleep(0.01)
            pipelines.close()
            with pytest.raises(SessionClosed):
                loading.result()
        assert gpus.held_bytes == {}


def test_a_version_that_cannot_even_be_made_gives_back_what_it_had_claimed(
    make: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = SharedGpus()
    gpus.hold("other", 1).take(planned(make(10))[0])
    pipeline = load(make(60), TWO)
    opened, reloaded = (pipeline.session(gpus=gpus) for _ in range(2))

    def fails(*told: object) -> None:
        raise RuntimeError("no version")

    monkeypatch.setattr(versions, "Version", fails)
    for begin in (opened.open, lambda: reloaded.reload(pipeline)):
        with pytest.raises(RuntimeError, match="no version"):
            begin()
        assert gpus.held_bytes == {"fake:0": 10 * MIB}


def test_threads_that_open_a_session_at_once_start_it_once(make: Callable[..., Builder]) -> None:
    gpus, (plan, again), both = SharedGpus(), planned(make(60)), threading.Barrier(2)
    gpus.hold("other", 1).take(plan)

    def meanwhile(machine: Machine) -> Plan:
        both.wait(20)
        return again(machine)

    session, ended = Session(plan, None, TWO, again=meanwhile, gpus=gpus), list[str]()

    def begin() -> None:
        try:
            session.open()
            ended.append("open")
        except SessionClosed:
            ended.append("refused")

    with ThreadPoolExecutor(2) as threads, session:
        for done in [threads.submit(begin) for _ in range(2)]:
            done.result(30)
        assert sorted(ended) == ["open", "refused"] and session.run(x="x")["y"] == "x on fake:1"
    assert gpus.held_bytes == {"fake:0": 60 * MIB}


def test_sessions_that_nobody_introduced_share_the_gpus_of_their_process(make: Callable[..., Builder]) -> None:
    first, second = load(make(60, name="ocr"), ONE), load(make(60, name="chat"), ONE)
    with first.open() as session:
        with pytest.raises(PipelineError, match=r"60 MiB  ocr         another pipeline"):
            second.open()
        unopened = second.session()
        unopened.close()
        with pytest.raises(SessionClosed):
            unopened.open()
        with pytest.raises(PipelineError, match="the version that serves"):
            session.reload(second)
        assert GPUS.held_bytes == {"fake:0": 60 * MIB}
    assert GPUS.held_bytes == {}


@pytest.mark.parametrize("mode", ["blocks", "rows"])
def test_jobs_share_them_too(make: Callable[..., Builder], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (planned_module, opening, shared_gpus):
        monkeypatch.setattr(module, "this_machine", lambda: TWO)
    blocking = GPUS.hold("other", GPUS.new_session())
    blocking.take(planned(make(60))[0])
    try:
        answerer = opening.open_here(make(60).build(), mode=mode)(None)
        try:
            answer = answerer.ask(Block(0, 0, ["0"], {"x": ["x"]}, None)).result(30)
            assert list(answer.outputs["y"]) == ["x on fake:1"]
        finally:
            answerer.close()
        assert GPUS.held_bytes == {"fake:0": 60 * MIB}
    finally:
        blocking.give_back()


@pytest.mark.parametrize("more", [{}, {"timeout_ms": 60_000}], ids=["blocks", "rows"])
def test_a_pipelines_rows_are_answered_on_the_machine_that_it_was_planned_for(
    make: Callable[..., Builder], more: dict[str, Any], tmp_path: Path
) -> None:
    make(1)  # writes its nodes
    p = Builder("rows", base_dir=tmp_path, gpu={"ordering": "event", "reserve_bytes": 0, "context_bytes": MIB})
    p.output("y", p.step("s", "nodes.py:Says", text=p.input("x", "text"), device="fake:0", **more).output)
    rows = load(p, ONE).map([{"x": "one"}, {"x": "two"}])
    assert [row["y"] for row in rows] == ["one on fake:0", "two on fake:0"]


def test_what_it_really_takes_is_claimed_once_it_is_known(make: Callable[..., Builder], tmp_path: Path) -> None:
    """Nobody has said what they take; the second would be too much, and is told so when it has been measured."""
    (tmp_path / "taking.py").write_text(TAKING)

    def taking(name: str) -> Builder:
        gpu = {"reserve_bytes": 0, "context_bytes": MIB, "arena_bytes": 2 * MIB}
        p = Builder(name, base_dir=tmp_path, limits={"arena_bytes": 8 * MIB}, gpu=gpu)
        given = p.input("x", "float32[1048576]")
        p.output("y", p.step("s", "taking.py:Takes", x=given, device="fake:0", batch={"items_max": 8}).y)
        return p

    machine, gpus = dataclasses.replace(ONE, devices=(Device("fake:0", 8 * MIB),)), SharedGpus()
    with Repository(machine=machine, gpus=gpus) as pipelines:
        pipelines.load("a", taking("a"))
        assert gpus.held_bytes == {"fake:0": 5 * MIB}, "an item of 4 MiB, and its process"
        with pytest.raises(ModelError) as refused:
            pipelines.load("b", taking("b"))
        rows = [line.split() for line in str(refused.value).splitlines()]
        assert [row[2:] for row in rows if row[2:3] == ["a"]] == [["a", "another", "pipeline", "claimed"]]
        assert str(refused.value).endswith("or unload a")


TAKING = '''
from weftline.nodes.contract import BatchNode
from weftline.nodes.ports import Ports, port

class Takes(BatchNode):
    """Takes its input on its device."""
    @classmethod
    def ports(cls, config, step):
        return Ports((port("x", "float32[1048576]"),), (port("y", "json"),))
    @classmethod
    def device_ports(cls, config, ports):
        return frozenset({"x"})
    def run(self, batch):
        batch["x"]
        return {"y": [1] * len(batch)}
'''


def test_threads_that_load_and_unload_leave_nothing_claimed(make: Callable[..., Builder]) -> None:
    """There is room for one at a time, so that most are refused, and which ones is chance."""
    gpus, outcomes = SharedGpus(), list[Any]()
    started = threading.Barrier(8)
    with Repository(machine=ONE, gpus=gpus) as pipelines:

        def live(number: int) -> None:
            name = f"p{number % 3}"
            new = make((60, 70)[number % 2], "Refuses" if number == 5 else "Says")
            started.wait()
            for act in (lambda: pipelines.load(name, new), lambda: pipelines.unload(name) if number % 2 else None):
                try:
                    act()
                    outcomes.append(None)
                except WeftlineError as error:
                    outcomes.append(type(error).__name__)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(live, range(8)))
        serving = [entry.name for entry in pipelines.index() if entry.state == READY]
        assert bool(gpus.held_bytes) == bool(serving)
        assert all(bytes <= 100 * MIB for bytes in gpus.held_bytes.values())
    assert gpus.held_bytes == {}
    assert {*outcomes} <= {None, "PipelineError", "ModelError", "InputError"}, outcomes
