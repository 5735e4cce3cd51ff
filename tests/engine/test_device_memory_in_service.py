"""What steps take of a device is measured when they open, in real worker processes on a made-up GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import wait_until
from weftline.engine.session import Session, load
from weftline.errors import ModelError
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.spec.builder import Builder

MIB = 1 << 20
ITEM_BYTES, ITEMS_MAX = 4 * MIB, 8

NODES = '''
from weftline.node import BatchNode, Ports, port


class Takes(BatchNode):
    """Takes its input on its device, and answers with how many items it was ever given at most."""
    most = 0

    @classmethod
    def ports(cls, config, step):
        return Ports((port("x", "float32[1048576]"),), (port("y", "json"),))

    @classmethod
    def device_ports(cls, config, ports):
        return frozenset({"x"})

    def run(self, batch):
        batch.stacked("x")
        self.most = max(self.most, len(batch))
        return {"y": [self.most] * len(batch)}
'''


def session(folder: Path, device_bytes: int, **more: Any) -> Session:
    """Return a session of one step on a GPU of this size, 16 MiB of it a reserve; by the plan the rest is free."""
    (folder / "nodes.py").write_text(NODES)
    gpu = {"reserve_bytes": 16 * MIB, "context_bytes": 1 * MIB, "arena_bytes": 2 * MIB}
    p = Builder("test", base_dir=folder, gpu=gpu)
    given = p.input("x", "float32[1048576]")
    step = p.step("s", "nodes.py:Takes", x=given, device="fake:0", batch={"items_max": ITEMS_MAX}, **more)
    p.output("y", step.y)
    return load(p, machine=Machine(2, 8 << 30, (Device("fake:0", device_bytes),)))


@pytest.mark.slow
def test_a_step_is_measured_at_its_largest_batch(tmp_path: Path) -> None:
    with session(tmp_path, 1 << 30).open() as opened:
        memory = opened.stats()["device_memory"]["fake:0"]
        assert memory["steps"]["s"]["peak_bytes"] >= ITEMS_MAX * ITEM_BYTES
        assert memory["workers"]["s"] >= memory["steps"]["s"]["peak_bytes"]
        assert memory["left_bytes"] == (1 << 30) - 16 * MIB - memory["workers"]["s"]


@pytest.mark.slow
def test_a_device_that_is_too_small_is_refused_with_a_table_of_its_users(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        session(tmp_path, 40 * MIB).open()
    message = str(error.value)
    assert message.startswith("fake:0 has 40 MiB, and ") and "too much" in message
    rows = [line.split() for line in message.splitlines()[1:-1]]
    assert [row[2:] for row in rows[:2]] == [["s", "weights", "and", "work", "measured"], ["reserve", "stated"]]


@pytest.mark.slow
def test_a_sleeping_step_frees_device_memory_and_wakes_for_a_request(tmp_path: Path) -> None:
    with session(tmp_path, 1 << 30, idle={"after_s": 0.2, "keep": "host"}).open() as opened:
        wait_until(lambda: opened.stats()["idle"]["s"]["state"] == "asleep", 10)
        assert opened.stats()["idle"]["s"]["freed_bytes"] >= ITEMS_MAX * ITEM_BYTES
        assert opened.run(x=np.zeros(1 << 20, np.float32))["y"] == 1, "it was opened anew"
