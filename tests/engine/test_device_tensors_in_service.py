"""Tensors on a device from process to process, on fake devices: answers, what is copied, full arenas, lost devices."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import ask, settled, together, wait_until
from weftline.engine.result import Result
from weftline.engine.session import Session, load
from weftline.errors import LimitReached, WorkerDied
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.spec.builder import Builder

HERE = Path(__file__).parent
SIZE = 50_000


def builder(**gpu: Any) -> Builder:
    gpu = {"processes": "separate", "arena_bytes": 2 << 20, "reserve_bytes": 0, **gpu}
    return Builder("near", base_dir=HERE, limits={"arena_bytes": 4 << 20}, gpu=gpu)


def opened(pipeline: Builder, device: str = "fake:0") -> Session:
    machine = Machine(4, 16 << 30, (Device(device, 8 << 30),))
    return load(pipeline, machine=machine).open()


def node(name: str, **more: Any) -> dict[str, Any]:
    return {"node": f"device_steps.py:{name}", **more}


def everything(ordering: str) -> Builder:
    """Return a pipeline over three processes of one device, and one of the CPU, with every way a tensor can go."""
    p = builder(ordering=ordering)
    x, rows = p.input("x", "json"), p.input("rows", "json")
    fixed: dict[str, Any] = {"type": "float32[N]"}
    made = p.step("make", "device_steps.py:Make", worker="w1", x=x, **fixed).y
    doubled = p.step("double", "device_steps.py:Double", worker="w2", x=made, **fixed).y
    passed = p.step("pass", "device_steps.py:Pass", worker="w2", x=doubled, **fixed).y
    half = p.step("half", "device_steps.py:Half", worker="w2", x=made).y
    filled = p.step("fill", "device_steps.py:DoubleAll", worker="w2", x=made, batch={"items_max": 4}, **fixed).y
    arrays = p.step("arrays", "device_steps.py:Arrays", worker="w2", x=made, **fixed).y
    for name, of in (("passed", passed), ("half", half), ("filled", filled), ("arrays", arrays), ("doubled", doubled)):
        p.output(name, p.step(f"look_{name}", "device_steps.py:Look", worker="w3", x=of).report)
    p.output("on_host", p.step("host", "device_steps.py:HostLook", device="cpu", x=doubled).report)
    image = p.step("paint", "device_steps.py:Paint", worker="w1", x=rows).image
    cut = p.step("cut", "device_steps.py:Cut", worker="w2", image=image).rows
    p.output("rows", p.step("sum", "device_steps.py:Brightness", worker="w3", rows=cut).report)
    p.output("y", filled)
    return p


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize(
    ("device", "ordering"),
    [("fake:0", "host"), ("fake:0", "event"), ("fake-alone:0", "host"), ("fake-closed:0", "event")],
)
def test_every_way_a_tensor_can_go_gives_the_same_answers(device: str, ordering: str) -> None:
    with opened(everything(ordering), device) as session:
        requests = [{"x": [value, SIZE], "rows": 3 + value} for value in range(6)]
        for value, answer in enumerate(together(session, requests)):
            assert isinstance(answer, Result), answer
            twice = 2.0 * value * SIZE
            sums = {name: answer[name][0] for name in ("passed", "half", "filled", "arrays", "doubled", "on_host")}
            assert sums == {
                "passed": twice, "half": twice / 4, "filled": twice, "arrays": (value + 1) * SIZE,
                "doubled": twice, "on_host": twice,
            }  # fmt: skip
            assert (answer["y"] == 2 * value).all() and answer["y"].shape == (SIZE,)
            assert [answer[name][1] for name in ("passed", "on_host")] == ["DeviceTensor", "ndarray"]
            assert answer["rows"] == [[6000 * row for row in range(1, 4 + value)], ["DeviceTensor"]]
        wait_until(lambda: settled(session), 10)


def line(*names: str, **gpu: Any) -> Builder:
    """Return a pipeline in which each step is a process of its own: it makes a tensor, hands it on, looks at it."""
    p = builder(**gpu)
    x = p.step("make", "device_steps.py:Make", x=p.input("x", "json")).y
    for name in names:
        x = p.step(name.lower(), f"device_steps.py:{name}", x=x).y
    p.output("report", p.step("look", "device_steps.py:Look", x=x).report)
    return p


@pytest.fixture(scope="module")
def passing() -> Iterator[Session]:
    with opened(line("Pass", arena_bytes=4 << 20)) as session:
        yield session


def copied(session: Session) -> tuple[int, int]:
    stats = session.stats()
    return stats["copied_bytes"]["between"], stats["device_moved_bytes"]


@pytest.mark.slow
def test_a_forwarded_tensor_is_copied_once_and_stays_on_the_device(passing: Session) -> None:
    before = copied(passing)
    report, kind, pid = passing.run(x=[3, SIZE])["report"]
    assert (report, kind) == (3.0 * SIZE, "DeviceTensor") and pid != os.getpid()
    assert np.subtract(copied(passing), before).tolist() == [SIZE * 4, 0]


@pytest.mark.slow
def test_a_full_device_arena_delays_and_an_impossible_size_is_refused(passing: Session) -> None:
    answers = together(passing, [{"x": [1, 400_000]} for _ in range(8)])  # three fit at a time
    assert [isinstance(answer, Result) for answer in answers] == [True] * 8
    refused = ask(passing, x=[1, 2_000_000])
    assert isinstance(refused, LimitReached) and "gpu.arena_bytes" in str(refused)
    wait_until(lambda: settled(passing), 10)


@pytest.mark.slow
@pytest.mark.parametrize("ordering", ["host", "event"])
def test_a_worker_whose_device_is_lost_ends_and_the_next_one_answers(ordering: str) -> None:
    with opened(line("Loses", ordering=ordering)) as session:
        assert session.run(x=[1, SIZE])["report"][0] == SIZE
        lost = ask(session, x=[13, SIZE])
        assert isinstance(lost, WorkerDied) and "exit code 70" in str(lost)
        assert ask(session, x=[2, SIZE])["report"][0] == 2 * SIZE  # type: ignore[index]
        os.kill(session.pids()["make"], signal.SIGKILL)
        wait_until(lambda: session.stats()["worker_deaths"] >= 2 and session.health().ready, 20)
        assert ask(session, x=[3, SIZE])["report"][0] == 3 * SIZE  # type: ignore[index]
        wait_until(lambda: settled(session), 10)
