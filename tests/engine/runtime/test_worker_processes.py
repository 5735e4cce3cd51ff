"""Starts that the system refuses, and who sees a wake-up."""

from __future__ import annotations

import errno
import os
import select
from dataclasses import replace
from pathlib import Path

import pytest

from weftline.engine.runtime import mps
from weftline.engine.runtime import worker_processes as fleets
from weftline.engine.runtime.worker_processes import WorkerProcesses
from weftline.engine.scheduler.events import WorkerDied
from weftline.engine.session import load
from weftline.errors import ModelError
from weftline.pipelines.spec.builder import Builder


@pytest.mark.parametrize(("refusal", "passes"), [(errno.EAGAIN, True), (errno.EMFILE, True), (errno.ENOENT, False)])
def test_only_what_the_system_is_short_of_passes(
    refusal: int, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*words: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(fleets, "WorkerProcess", refuses)
    p = Builder("one")
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    deaths: list[tuple[object, ...]] = []
    fleet = WorkerProcesses(load(p).plan, tmp_path, lambda *message: None, lambda *death: deaths.append(death))
    fleet.open()
    try:
        fleet.start(0, 1)
    finally:
        fleet.close()
    (death,) = deaths
    died, name = death
    assert isinstance(died, WorkerDied) and name == "s"
    assert (died.worker, died.arena, died.cause, died.refused) == (0, 1, "not_started", passes)
    assert died.how.startswith("it could not be started: ")


def test_an_exclusive_gpu_refuses_workers_before_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = Builder("two")
    first = p.step("first", "echo", value=p.input("x", "text"))
    p.output("y", p.step("second", "echo", value=first.value).value)
    plan = load(p).plan
    plan = replace(plan, workers=tuple(replace(worker, device="cuda:0") for worker in plan.workers))
    monkeypatch.delenv(mps.PIPE_DIRECTORY, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(fleets, "compute_modes", lambda: {"cuda:0": mps.EXCLUSIVE_PROCESS})
    fleet = WorkerProcesses(plan, tmp_path, lambda *message: None, lambda *death: None)
    try:
        with pytest.raises(ModelError, match="EXCLUSIVE_PROCESS"):
            fleet.open()
    finally:
        fleet.close()


def test_a_wake_up_is_seen_by_the_thread_and_not_by_a_loop(tmp_path: Path) -> None:
    p = Builder("one")
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    fleet = WorkerProcesses(load(p).plan, tmp_path, lambda *message: None, lambda *death: None)
    fleet.open()
    try:
        fleet.wake()
        # A loop that saw it would read again and again until the thread has cleared it.
        assert select.select([fleet.epoll_fd], [], [], 0)[0] == [] and fleet.unread() == []
        (ready,) = fleet.wait_ready(0)
        fleet.read([ready])
        assert fleet.wait_ready(0) == []
    finally:
        fleet.close()
