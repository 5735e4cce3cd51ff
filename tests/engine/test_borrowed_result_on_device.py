"""Outputs that lie on a device too, lent while those who wrote and read them die: they stay whole until given back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.engine.fire import ask, settled, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import load
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.spec.builder import Builder

HERE = Path(__file__).parent
SIZE = 50_000


@pytest.mark.slow
def test_what_is_lent_stays_whole_when_its_writer_and_its_readers_die() -> None:
    gpu = {"processes": "separate", "arena_bytes": 2 << 20, "reserve_bytes": 0, "ordering": "event"}
    p = Builder("lent", base_dir=HERE, limits={"arena_bytes": 4 << 20}, gpu=gpu)
    made = p.step("make", "device_steps.py:Make", x=p.input("x", "json")).y
    doubled = p.step("double", "device_steps.py:Double", x=made).y
    p.output("y", doubled)
    p.output("report", p.step("look", "device_steps.py:Look", x=doubled).report)
    with load(p, machine=Machine(4, 16 << 30, (Device("fake:0", 8 << 30),))).open() as session:
        runtime = session._current.runtime
        assert session.plan.steps[1].device_outputs == {"y": "both"}

        async def lends() -> None:
            with await session.borrow({"x": [3, SIZE]}, RequestOptions()) as lent:
                before = len(runtime.fleet.arenas)
                for name in ("double", "look"):
                    os.kill(session.pids()[name], signal.SIGKILL)
                wait_until(lambda: session.stats()["worker_deaths"] == 2 and session.health().ready)
                assert len(runtime.fleet.arenas) == before + 1  # that of `double` is kept for what is lent
                assert (lent.outputs["y"] == 6).all() and lent.outputs["report"][0] == 6.0 * SIZE
                for value in range(4):  # others write where they may
                    other = await session.arun(x=[value, SIZE])
                    assert (other["y"] == 2 * value).all()
                assert (lent.outputs["y"] == 6).all() and lent.outputs["y"].shape == (SIZE,)
                assert not settled(session)
            wait_until(lambda: settled(session) and len(runtime.fleet.arenas) == before, 10)

        asyncio.run(lends())
        stats = session.stats()
        assert (stats["arena"]["stale_total"], stats["arena"]["quarantined_bytes"], stats["unfinished"]) == (0, 0, 0)
        assert isinstance(ask(session, x=[1, SIZE]), Result)
