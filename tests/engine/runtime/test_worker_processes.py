"""What becomes of a start that the system refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weftline.engine.runtime import worker_processes as fleets
from weftline.engine.runtime.worker_processes import WorkerProcesses
from weftline.engine.session import load
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
    assert death[:3] == (0, 1, "s") and death[-1] is passes
    assert str(death[3]).startswith("it could not be started: ")
