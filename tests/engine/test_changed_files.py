"""A step whose files changed since it was planned does not open: at start, after a death, and when it wakes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.fire import wait_until
from weftline.engine.session import Session, Source, load
from weftline.errors import ModelError, WorkerDied
from weftline.pipelines.spec.builder import Builder

Start = Callable[[Source], Session]

NODES = '''
from dataclasses import dataclass

from weftline.node import BatchNode, Ports, port


@dataclass(frozen=True, slots=True)
class Weights:
    weights: str


class Model(BatchNode):
    """Answers with the text of its weights."""
    Config = Weights

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))

    @classmethod
    def files(cls, config, step):
        return [step.base_dir / config.weights]

    def open(self, context):
        self.weights = (context.base_dir / self.config.weights).read_text()

    def sleep(self, keep):
        self.weights = ""
        return keep == "host"

    def wake(self):
        self.weights = "kept"

    def run(self, batch):
        return {"text": [self.weights for _ in batch["text"]]}
'''
CHANGED = "its files changed since it was planned: .*weights.txt; reload the pipeline"


def pipeline(folder: Path, **more: object) -> Builder:
    (folder / "nodes.py").write_text(NODES)
    (folder / "weights.txt").write_text("old")
    p = Builder("test", base_dir=folder, limits={"arena_bytes": 1 << 20})
    p.output("y", p.step("s", "nodes.py:Model", text=p.input("x", "text"), weights="weights.txt", **more).text)  # type: ignore[arg-type]
    return p


def test_a_step_does_not_open_with_other_files(tmp_path: Path) -> None:
    planned = load(pipeline(tmp_path))
    (tmp_path / "weights.txt").write_text("new")
    with pytest.raises(ModelError, match=CHANGED):
        planned.open()
    (tmp_path / "weights.txt").unlink()
    with pytest.raises(ModelError, match=CHANGED):
        planned.open()


@pytest.mark.slow
def test_a_step_does_not_restart_with_other_files(start: Start, tmp_path: Path) -> None:
    session = start(pipeline(tmp_path))
    (tmp_path / "weights.txt").write_text("new")
    assert session.run(x="a")["y"] == "old"  # what is open goes on
    os.kill(session.pids()["s"], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=CHANGED):
        for _ in range(50):
            assert session.run(x="a")["y"] == "old"


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["process", "host"])
def test_a_step_does_not_wake_with_other_files(start: Start, tmp_path: Path, keep: str) -> None:
    session = start(pipeline(tmp_path, idle={"after_s": 0.2, "keep": keep}))
    wait_until(lambda: session.stats()["idle"]["s"]["state"] == "asleep", 10)
    (tmp_path / "weights.txt").write_text("new")
    with pytest.raises(WorkerDied, match=CHANGED):
        session.run(x="a")
