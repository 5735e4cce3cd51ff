"""KV memory that moves between two steps while both answer requests, in real worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, load
from weftline.pipelines.spec.builder import Builder

NODES = '''
import time
from dataclasses import dataclass
from weftline.node import NodeMemory, Piece, Ports, StreamNode, port

@dataclass(frozen=True, slots=True)
class HoldsConfig:
    kv_bytes: int | None = None

class Holds(StreamNode):
    """Each item holds 64 KiB for as many rounds as it says; one that finds no room waits. 'size' answers with it."""
    Config = HoldsConfig
    item_bytes = 64 << 10
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))
    def __init__(self, config):
        super().__init__(config)
        self.size, self.waiting, self.running, self.preempted = config.kv_bytes, [], {}, 0
    def submit(self, item, inputs, urgency=None):
        self.waiting.append((item, int(inputs["text"])))
    def cancel(self, item):
        self.running.pop(item, None)
        self.waiting = [one for one in self.waiting if one[0] != item]
    @property
    def busy(self):
        return bool(self.waiting or self.running)
    def memory(self):
        used = len(self.running) * self.item_bytes
        return NodeMemory(used, 0, self.size - used, len(self.waiting), self.preempted)
    def resize_memory(self, bytes):
        self.size = bytes // self.item_bytes * self.item_bytes
        while len(self.running) * self.item_bytes > self.size:
            self.waiting.insert(0, self.running.popitem())
            self.preempted += 1
        return self.size
    def round(self):
        time.sleep(0.01)
        while self.waiting and (len(self.running) + 1) * self.item_bytes <= self.size:
            item, rounds = self.waiting.pop(0)
            self.running[item] = rounds
        pieces = []
        for item in list(self.running):
            self.running[item] -= 1
            if self.running[item] <= 0:
                del self.running[item]
                pieces.append(Piece(item, {"text": str(self.size)}, last=True))
        return pieces

class Breaks(Holds):
    """Cannot change its size."""
    def resize_memory(self, bytes):
        raise MemoryError("no room")
'''

MIB = 1 << 20


def opened(folder: Path, large: str = "Holds") -> Session:
    (folder / "nodes.py").write_text(NODES)
    pipeline = Builder("test", limits={"kv_bytes": {"cpu": 2 * MIB}}, base_dir=folder)
    text = pipeline.input("text", "text")
    for name, kind in (("small", "Holds"), ("large", large)):
        pipeline.output(name, pipeline.step(name, f"nodes.py:{kind}", inputs={"text": text}).text)
    return load(pipeline).open()


def held(session: Session) -> dict[str, int]:
    return dict(session.stats()["kv"]["cpu"]["held_bytes"])


def until(what: Callable[[], Any], most_s: float = 30.0) -> Any:
    end_s = time.monotonic() + most_s
    while not (found := what()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_kv_memory_follows_the_load_and_a_new_worker_starts_with_least(tmp_path: Path) -> None:
    with opened(tmp_path) as session, ThreadPoolExecutor(64) as pool:
        assert held(session) == {"small": MIB // 2, "large": MIB // 2}
        pids = session.pids()

        def crowd(step: str) -> list[Any]:
            return [pool.submit(session.run, RequestOptions(outputs=[step]), text="150") for _ in range(60)]

        answers = crowd("small")
        until(lambda: held(session)["small"] >= MIB)
        grown = {int(one.result()["small"]) for one in answers}
        assert max(grown) > MIB // 2 >= min(grown), "its items saw the memory grow, and none was lost"
        total = session.stats()["kv"]["cpu"]
        assert sum(total["held_bytes"].values()) + total["unassigned_bytes"] == 2 * MIB
        assert session.pids() == pids, "no worker was restarted for it"
        until(lambda: session.stats()["kv"]["cpu"]["used_bytes"]["small"] == 0)

        os.kill(pids["small"], signal.SIGKILL)
        until(lambda: held(session)["small"] == MIB // 2)
        until(lambda: session.ready)
        assert session.run(RequestOptions(outputs=["small"]), text="1")["small"] == str(MIB // 2)


@pytest.mark.slow
def test_a_node_that_cannot_change_its_size_keeps_it_and_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path, "Breaks") as session, ThreadPoolExecutor(32) as pool:
        pids = session.pids()
        answers = [pool.submit(session.run, RequestOptions(outputs=["large"]), text="80") for _ in range(24)]
        assert {one.result()["large"] for one in answers} == {str(MIB // 2)}
        assert session.pids() == pids
        until(lambda: held(session) == {"small": MIB // 2, "large": MIB // 2})
