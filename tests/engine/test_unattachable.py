"""Memory that a process shares and another cannot attach, in real processes: requests are answered all the same."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fire import ask, settled, wait_until
from weftline.engine.session import load
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.spec.builder import Builder

HERE = Path(__file__).parent
SIZE = 50_000


def test_unattachable_values_are_fetched_and_later_ones_use_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = {"processes": "separate", "arena_bytes": 2 << 20, "reserve_bytes": 0, "ordering": "event"}
    p = Builder("closed", base_dir=HERE, limits={"arena_bytes": 4 << 20}, gpu=gpu)
    folders = {name: tmp_path / name for name in ("make", "look")}
    for folder in folders.values():
        folder.mkdir()
    y = p.step("make", "device_fault_steps.py:Make", x=p.input("x", "json"), folder=str(folders["make"])).y
    p.output("report", p.step("look", "device_fault_steps.py:Look", x=y, folder=str(folders["look"])).report)
    with (
        caplog.at_level(logging.WARNING, "weftline.runtime"),
        load(p, machine=Machine(4, 16 << 30, (Device("fake:0", 8 << 30),))).open() as session,
    ):
        assert ask(session, x=[2, SIZE])["report"] == 2.0 * SIZE  # type: ignore[index]
        assert (
            session.stats()["device_sharing"]["make"]["share_mode"] == "descriptor" and session.health().summary == ""
        )
        # A new `make` shares its memory while `look` is busy: it is not known yet that `look` cannot attach it.
        for what in ("hold", "closed"):
            (folders["look"] / what).touch()
        answers: dict[int, Any] = {}

        def asks(value: int) -> threading.Thread:
            thread = threading.Thread(target=lambda: answers.update({value: ask(session, x=[value, SIZE])}))
            thread.start()
            return thread

        first = asks(3)
        wait_until((folders["look"] / "holds").exists)
        # Before the runtime has the message that the device of `make` is done, its death would end `look`, which waits.
        wait_until(lambda: session.stats()["unfinished"] == 0)
        os.kill(session.pids()["make"], signal.SIGKILL)
        wait_until(lambda: session.stats()["worker_deaths"] == 1 and session.health().ready, 90)  # a process starts
        before = session.stats()["dispatches"]
        second = asks(4)
        wait_until(lambda: session.stats()["dispatches"] - before + session.stats()["queued"]["look"] == 2)
        (folders["look"] / "hold").unlink()
        for thread in (first, second):
            thread.join(60)
        assert {value: one["report"] for value, one in answers.items()} == {3: 3.0 * SIZE, 4: 4.0 * SIZE}
        assert session.stats()["device_sharing"]["make"]["share_mode"] == "host"
        assert session.health().ready and session.health().summary == "through host memory: make"
        assert session.stats()["worker_deaths"] == 1 and session.stats()["retried"] == 0
        moved = session.stats()["device_moved_bytes"]
        assert ask(session, x=[5, SIZE])["report"] == 5.0 * SIZE  # type: ignore[index]
        assert session.stats()["device_moved_bytes"] == moved + SIZE * 4  # by who reads it, from host memory
        wait_until(lambda: settled(session), 10)
        assert session.stats()["arena"]["stale_total"] == 0
    report = [one.message for one in caplog.records if "cannot attach" in one.message]
    assert len(report) == 1 and report[0].startswith("device fake:0: worker look cannot attach the memory that")
