"""GPU memory reservations: open versions share one budget for each GPU, and a closed one has released its part."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fire import wait_until
from weftline.engine import gpus as gpus_module
from weftline.engine import planned_pipeline as planned_module
from weftline.engine import versions
from weftline.engine.gpus import TRIES_MAX, GpuReservations
from weftline.engine.jobs.rows import RowBlock
from weftline.engine.jobs.runners import factory
from weftline.engine.repository import FAILED, READY, Repository
from weftline.engine.runtime.event_loop import Runtime
from weftline.engine.session import load
from weftline.errors import ModelError, PipelineError, SessionClosed, WeftlineError
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder

MIB = 1 << 20
ONE = Machine(2, 8 << 30, (Device("fake:0", 100 * MIB),))
TWO = Machine(2, 8 << 30, (Device("fake:0", 100 * MIB), Device("fake:1", 100 * MIB)))
NODES = '''
import time
from weftline.node import BatchNode, Ports, port

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
    gpus, (plan, again) = GpuReservations(), planned(make(60))
    first, second, third = (gpus.reservation("one", gpus.new_session()) for _ in range(3))
    assert first.reserve(plan, again, TWO) is plan, "nothing is reserved"
    assert first.reserve(plan, again, TWO) is plan and gpus.reserved_bytes == {"fake:0": 60 * MIB}, "it is held once"
    moved = second.reserve(plan, again, TWO)
    assert second.reserve(plan, again, TWO) is moved
    assert moved.step("s").device == "fake:1" and gpus.reserved_bytes == {"fake:0": 60 * MIB, "fake:1": 60 * MIB}
    with pytest.raises(PipelineError, match="20 MiB too much"):
        third.reserve(plan, again, TWO)
    first.release()
    first.release()
    with pytest.raises(SessionClosed):
        first.reserve(plan, again, TWO)
    assert third.reserve(plan, again, TWO).step("s").device == "fake:0"


def test_closing_returns_a_reservation_without_notifications(
    make: Callable[..., Builder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, (plan, _) = GpuReservations(), planned(make(60))
    hold = gpus.reservation("ocr", 1)
    messages: list[str] = []

    def breaks() -> None:
        hold.notify("fake:0", 1)
        raise OSError("an arena that does not close")

    hold.reserve(plan)
    runtime = Runtime(plan, tmp_path, hold=hold)
    monkeypatch.setattr(runtime, "post_soon", lambda *events: messages.append("while it closed"))
    monkeypatch.setattr(runtime.fleet, "close", breaks)
    with pytest.raises(OSError, match="does not close"):
        runtime.close()
    assert messages == [] and gpus.reserved_bytes == {}


def test_a_plan_alone_is_taken_as_it_is_or_refused(make: Callable[..., Builder]) -> None:
    gpus, (plan, _) = GpuReservations(), planned(make(60))
    gpus.reservation("ocr", 1).reserve(plan)
    with pytest.raises(PipelineError, match="another pipeline"):
        gpus.reservation("chat", 2).reserve(plan)
    small, _ = planned(make(40))
    assert gpus.reservation("chat", 2).reserve(small) is small and gpus.reserved_bytes == {"fake:0": 100 * MIB}


def test_a_plan_without_a_gpu_holds_nothing_and_is_not_made_again(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = GpuReservations(), planned(make(60, device="cpu"))
    gpus.reservation("ocr", 1).reserve(*planned(make(60)), TWO)
    assert gpus.reservation("chat", 2).reserve(plan, again, TWO) is plan and gpus.reserved_bytes == {"fake:0": 60 * MIB}


def test_what_others_take_while_it_is_planned_counts(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = GpuReservations(), planned(make(60))
    gpus.reservation("first", 1).reserve(planned(make(10))[0])
    made: list[str] = []

    def meanwhile(machine: Machine) -> Plan:
        made.append(again(machine).step("s").device)
        if len(made) == 1:  # made for fake:1, which another session takes before it is held
            other, _ = planned(make(60, device="fake:1"))
            gpus.reservation("other", 2).reserve(other)
        return again(machine)

    assert gpus.reservation("one", 3).reserve(plan, meanwhile, TWO).step("s").device == "fake:0"
    assert made == ["fake:1", "fake:0"]


def test_a_refusal_that_others_made_untrue_meanwhile_is_none(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = GpuReservations(), planned(make(60, device="fake:0"))
    blocking = gpus.reservation("first", 1)
    blocking.reserve(plan)

    def meanwhile(machine: Machine) -> Plan:
        blocking.release()
        return again(machine)

    gpus.reservation("one", 2).reserve(plan, meanwhile, TWO)
    assert gpus.reserved_bytes == {"fake:0": 60 * MIB}


def test_it_does_not_plan_for_ever(make: Callable[..., Builder]) -> None:
    gpus, (plan, again) = GpuReservations(), planned(make(60, device="fake:0"))
    gpus.reservation("first", 1).reserve(planned(make(10))[0])
    tries: list[int] = []

    def always(machine: Machine) -> Plan:
        """Another session takes the planned GPU, each time."""
        gpus.reservation("other", 100 + len(tries)).reserve(
            planned(make(50, device="fake:0"))[0]
        ) if not tries else None
        tries.append(1)
        gpus.table.changes += 1
        return again(ONE)

    with pytest.raises(PipelineError, match="open it again"):
        gpus.reservation("one", 2).reserve(plan, always, TWO)
    assert len(tries) == TRIES_MAX


def test_a_forked_process_begins_with_nothing(make: Callable[..., Builder]) -> None:
    gpus, (plan, _) = GpuReservations(), planned(make(60))
    gpus.reservation("one", 1).reserve(plan)
    with gpus.lock:  # its holder in the parent is not in the child
        child = os.fork()
        if not child:
            signal.alarm(10)  # a child that waits for the lock would wait for ever
            gpus.reservation("two", 1).reserve(plan)
            os._exit(0 if gpus.reserved_bytes == {"fake:0": 60 * MIB} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_eight_threads_take_and_give_back_and_nothing_is_left(make: Callable[..., Builder]) -> None:
    gpus, plans = GpuReservations(), [planned(make(mib, name=f"p{mib}")) for mib in (20, 35, 60, 90)]
    most: list[int] = []

    def live(seed: int) -> tuple[int, int]:
        draw, taken, refused = random.Random(seed), 0, 0
        for _ in range(20):
            plan, again = draw.choice(plans)
            hold = gpus.reservation(plan.name, gpus.new_session())
            try:
                made = hold.reserve(plan, again if draw.random() < 0.7 else None, TWO)
                taken += 1
                if draw.random() < 0.5:
                    hold.settle(made.step("s").device, draw.randrange(19) * MIB, 100 * MIB)
                most.append(max(gpus.reserved_bytes.values()))
            except PipelineError:
                refused += 1
            finally:
                hold.release()
        return taken, refused

    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(live, range(8)))
    assert gpus.reserved_bytes == {} and max(most) <= 100 * MIB
    assert sum(taken for taken, _ in counts) > 20, counts


def talking(mib: int | None) -> Callable[[Machine], Plan]:
    """Return what plans an llm step that takes so many MiB, 1 of them for its process; None: unknown."""
    p = Builder("talks", gpu={"reserve_bytes": 0, "context_bytes": MIB})
    known = {} if mib is None else {"device_bytes": (mib - 1) * MIB}
    p.output("y", p.step("s", "llm", prompt=p.input("x", "text"), model="m", device="fake:0", **known).text)
    graph = p.build()
    return lambda machine: make_plan(graph, machine)


def test_a_waiting_session_is_notified_when_others_are_measured_or_gone() -> None:
    gpus, again = GpuReservations(), talking(None)
    first, second, third = (gpus.reservation(name, gpus.new_session()) for name in "abc")
    for one in (first, second, third):
        one.reserve(again(ONE), again, ONE)
    messages: list[tuple[str, int]] = []
    first.notify = lambda device, bytes: messages.append((device, bytes))
    assert first.settle("fake:0", 20 * MIB, 100 * MIB).waits and second.settle("fake:0", 10 * MIB, 100 * MIB).waits
    assert messages == []
    third.release()
    assert messages == [("fake:0", (100 - 21 - 11) * MIB // 2)]


# what is open


@pytest.mark.slow
def test_pipelines_of_a_repository_share_its_gpus(make: Callable[..., Builder]) -> None:
    with Repository(machine=TWO, gpus=(gpus := GpuReservations())) as pipelines:
        pipelines.load("a", make(60))
        pipelines.load("b", make(60))
        assert (
            pipelines.get("a").run(x="x")["y"] == "x on fake:0" and pipelines.get("b").run(x="x")["y"] == "x on fake:1"
        )
        with pytest.raises(PipelineError) as refused:
            pipelines.load("c", make(50))
        message = str(refused.value)
        assert "fake:0 has 100 MiB, and 110 MiB of it are claimed: 10 MiB too much" in message
        assert "60 MiB  a           another pipeline  claimed" in message and "or unload a" in message
        assert {entry.name: entry.state for entry in pipelines.index()} == {"a": READY, "b": READY, "c": FAILED}
        pipelines.unload("b")
        assert gpus.reserved_bytes == {"fake:0": 60 * MIB}
        pipelines.load("c", make(50))
        assert pipelines.get("c").run(x="x")["y"] == "x on fake:1"
    assert gpus.reserved_bytes == {}


@pytest.mark.slow
def test_a_new_version_that_does_not_fit_leaves_the_old_one_serving(
    make: Callable[..., Builder],
) -> None:
    with Repository(machine=ONE, gpus=(gpus := GpuReservations())) as pipelines:
        pipelines.load("a", make(60))
        with pytest.raises(PipelineError) as refused:
            pipelines.reload("a")
        message = str(refused.value)
        assert "60 MiB  a           the version that serves  claimed" in message
        assert "unload the version that serves and load the new one (until then the old one goes on serving)" in message
        assert gpus.reserved_bytes == {"fake:0": 60 * MIB} and pipelines.get("a").run(x="x")["y"] == "x on fake:0"
        assert pipelines.reload("a", make(40)) == 2
        assert gpus.reserved_bytes == {"fake:0": 40 * MIB}, "the old version is gone, and what it had with it"


@pytest.mark.slow
def test_what_does_not_open_gives_back_what_it_had_claimed(make: Callable[..., Builder]) -> None:
    with Repository(machine=ONE, gpus=(gpus := GpuReservations())) as pipelines:
        with pytest.raises(ModelError, match="no such model"):
            pipelines.load("a", make(60, "Refuses"))
        assert gpus.reserved_bytes == {}
        with ThreadPoolExecutor(1) as others:
            loading = others.submit(pipelines.load, "slow", make(60, "Loads"))
            while not gpus.reserved_bytes:
                time.sleep(0.01)
            pipelines.close()
            with pytest.raises(SessionClosed):
                loading.result()
        assert gpus.reserved_bytes == {}


def test_a_version_that_cannot_even_be_made_gives_back_what_it_had_claimed(
    make: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = GpuReservations()
    gpus.reservation("other", 1).reserve(planned(make(10))[0])
    pipeline = load(make(60), TWO)
    opened = pipeline.session(gpus=gpus)

    def fails(*arguments: object) -> None:
        raise RuntimeError("no version")

    monkeypatch.setattr(versions, "Version", fails)
    with pytest.raises(RuntimeError, match="no version"):
        opened.open()
    assert gpus.reserved_bytes == {"fake:0": 10 * MIB}


def test_threads_that_open_a_session_at_once_start_it_once(make: Callable[..., Builder]) -> None:
    gpus, (plan, _) = GpuReservations(), planned(make(60))
    gpus.reservation("other", 1).reserve(plan)
    session, ended = load(make(60), TWO).session(gpus=gpus), list[str]()

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
    assert gpus.reserved_bytes == {"fake:0": 60 * MIB}


def test_unrelated_sessions_share_the_gpus_of_their_process(make: Callable[..., Builder]) -> None:
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
        assert GpuReservations.of_process().reserved_bytes == {"fake:0": 60 * MIB}
    assert GpuReservations.of_process().reserved_bytes == {}


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("mode", ["blocks", "rows"])
def test_jobs_share_them_too(make: Callable[..., Builder], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (planned_module, factory, gpus_module):
        monkeypatch.setattr(module, "this_machine", lambda: TWO)
    gpus = GpuReservations.of_process()
    blocking = gpus.reservation("other", gpus.new_session())
    blocking.reserve(planned(make(60))[0])
    try:
        runner = factory.local_runner_factory(make(60).build(), mode=mode)(None)
        try:
            answer = runner.submit(RowBlock(0, 0, ["0"], {"x": ["x"]}, None)).result(30)
            assert list(answer.outputs["y"]) == ["x on fake:1"]
        finally:
            runner.close()
        assert GpuReservations.of_process().reserved_bytes == {"fake:0": 60 * MIB}
    finally:
        blocking.release()


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("more", [{}, {"timeout_ms": 60_000}], ids=["blocks", "rows"])
def test_map_uses_the_machine_that_the_pipeline_was_planned_for(
    make: Callable[..., Builder], more: dict[str, Any], tmp_path: Path
) -> None:
    make(1)  # writes its nodes
    p = Builder("rows", base_dir=tmp_path, gpu={"ordering": "event", "reserve_bytes": 0, "context_bytes": MIB})
    p.output("y", p.step("s", "nodes.py:Says", text=p.input("x", "text"), device="fake:0", **more).output)
    rows = load(p, ONE).map([{"x": "one"}, {"x": "two"}])
    assert [row["y"] for row in rows] == ["one on fake:0", "two on fake:0"]


@pytest.mark.slow
def test_what_it_really_takes_is_claimed_once_it_is_known(make: Callable[..., Builder], tmp_path: Path) -> None:
    """Sizes are unknown; the second would be too much, and is refused once it has been measured."""
    (tmp_path / "taking.py").write_text(TAKING)

    def taking(name: str) -> Builder:
        gpu = {"reserve_bytes": 0, "context_bytes": MIB, "arena_bytes": 2 * MIB}
        p = Builder(name, base_dir=tmp_path, limits={"arena_bytes": 8 * MIB}, gpu=gpu)
        given = p.input("x", "float32[1048576]")
        p.output("y", p.step("s", "taking.py:Takes", x=given, device="fake:0", batch={"items_max": 8}).y)
        return p

    machine, gpus = dataclasses.replace(ONE, devices=(Device("fake:0", 8 * MIB),)), GpuReservations()
    with Repository(machine=machine, gpus=gpus) as pipelines:
        pipelines.load("a", taking("a"))
        assert gpus.reserved_bytes == {"fake:0": 5 * MIB}, "an item of 4 MiB, and its process"
        with pytest.raises(ModelError) as refused:
            pipelines.load("b", taking("b"))
        rows = [line.split() for line in str(refused.value).splitlines()]
        assert [row[2:] for row in rows if row[2:3] == ["a"]] == [["a", "another", "pipeline", "claimed"]]
        assert str(refused.value).endswith("or unload a")


TAKING = '''
from weftline.node import BatchNode, Ports, port

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


@pytest.mark.slow
def test_threads_that_load_and_unload_leave_nothing_claimed(make: Callable[..., Builder]) -> None:
    """There is room for one at a time, so that most are refused, and which ones is chance."""
    gpus, outcomes = GpuReservations(), list[Any]()
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
        assert bool(gpus.reserved_bytes) == bool(serving)
        assert all(bytes <= 100 * MIB for bytes in gpus.reserved_bytes.values())
    assert gpus.reserved_bytes == {}
    assert {*outcomes} <= {None, "PipelineError", "ModelError", "InputError"}, outcomes


SHARED = "".join(f"\n\nclass Says{at}(Says):\n    '''A model.'''\n" for at in range(5))
SIZES_MIB = (3, 5, 7, 11, 13)


def shared(base_dir: Path, steps: Sequence[int]) -> Builder:
    """Return a pipeline of steps that share their nodes with those of others; each has a process."""
    gpu = {"reserve_bytes": 2 * MIB, "context_bytes": MIB, "processes": "separate"}
    p = Builder("one", base_dir=base_dir, limits={"arena_bytes": MIB}, gpu=gpu)
    x = p.input("x", "text")
    for at in steps:
        size = SIZES_MIB[at] * MIB
        step = p.step(f"s{at}", f"nodes.py:Says{at}", text=x, device="fake:0", device_bytes=size, share=True)
        p.output(f"y{at}", step.output)
    return p


@pytest.mark.slow
def test_memory_of_ended_processes_is_returned_over_random_reloads(tmp_path: Path) -> None:
    """After each change exactly the processes that are left have reserved memory: 1 MiB each, and their models."""
    (tmp_path / "nodes.py").write_text(NODES + SHARED)
    rng, gpus = random.Random(3), GpuReservations()
    machine = Machine(2, 8 << 30, (Device("fake:0", 1000 * MIB),))
    sums = set[int]()

    def in_use(pipelines: Repository) -> int:
        sessions = [pipelines.get(entry.name) for entry in pipelines.index()]
        nodes = {one for session in sessions for one in session.loaded_nodes()}
        processes = {pid for session in sessions for pid in session.pids().values()}
        return sum(SIZES_MIB[int(name.rpartition("s")[2])] * MIB for name, _ in nodes) + len(processes) * MIB

    with Repository(machine=machine, gpus=gpus) as pipelines:
        for _ in range(20):
            name, drawn = rng.choice("abc"), sorted(rng.sample(range(5), rng.randint(1, 3)))
            if not pipelines.index():
                wanted = {name: shared(tmp_path, sorted(rng.sample(range(5), 3))) for name in "abc"}
                assert set(dict(pipelines.load_together(wanted)).values()) == {1}
            elif rng.random() < 0.25 and any(entry.name == name for entry in pipelines.index()):
                pipelines.unload(name)
            else:
                pipelines.load(name, shared(tmp_path, drawn))
            wait_until(lambda: gpus.reserved_bytes.get("fake:0", 0) == in_use(pipelines), 10)
            sums.add(in_use(pipelines))
    assert gpus.reserved_bytes == {} and len(sums) > 6


def test_a_process_has_one_object_that_lives_while_it_is_used(make: Callable[..., Builder]) -> None:
    gpus = GpuReservations.of_process()
    assert GpuReservations.of_process() is gpus
    repository, session = Repository(), load(make(60), ONE).session()
    assert repository._gpus is gpus
    session.open()
    assert gpus.reserved_bytes == {"fake:0": 60 * MIB}
    session.close()
    repository.close()
    gone = weakref.ref(gpus)
    del gpus, repository, session
    gc.collect()
    assert gone() is None
    assert GpuReservations.of_process().reserved_bytes == {}


def test_no_module_binds_reservations_when_it_is_imported() -> None:
    bound = [
        f"{name}.{attribute}"
        for name, module in [*sys.modules.items()]
        if name.partition(".")[0] == "weftline" and module is not None
        for attribute, value in [*vars(module).items()]
        if isinstance(value, GpuReservations)
    ]
    assert bound == []
