"""NVTX ranges around calls and rounds, only with the option."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.engine.hosted import Bench
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.first_message import open_message
from weftline.engine.worker.steps import Steps
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.policy import BatchPolicy

NODES = """
from weftline.node import BatchNode, Piece, Ports, StreamNode, port
from weftline.pipelines.spec.policy import BatchPolicy

TEXTS = Ports((port("x", "text"),), (port("y", "text"),))


class Shouts(BatchNode):
    @classmethod
    def ports(cls, config, step):
        return TEXTS

    def run(self, batch):
        if "bad" in batch["x"]:
            raise ValueError("bad")
        return {"y": [text.upper() for text in batch["x"]]}


class Echoes(StreamNode):
    busy = True

    @classmethod
    def ports(cls, config, step):
        return TEXTS

    def submit(self, item, inputs):
        self.item = item, inputs["x"]

    def cancel(self, item):
        pass

    def round(self):
        item, text = self.item
        yield Piece(item, {"y": text}, last=True)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(gc, "freeze", lambda: None)
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls to torch's NVTX."""
    reported: list[str] = []
    nvtx = ModuleType("torch.cuda.nvtx")
    nvtx.range_push = reported.append  # type: ignore[attr-defined]
    nvtx.range_pop = lambda: reported.append("end")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", nvtx)
    monkeypatch.setattr("torch.cuda.nvtx", nvtx)
    return reported


def _opened(bench: Bench, folder: Path, nvtx: bool) -> Steps:
    (folder / "nodes.py").write_text(NODES)
    texts = (("x", "text"),), (("y", "text"),)
    steps = tuple(
        msg.StepToOpen(
            index, name, f"nodes.py:{node}", {}, *texts, "cpu", BatchPolicy(8), False, streams=node == "Echoes"
        )
        for index, (name, node) in enumerate([("shout", "Shouts"), ("echo", "Echoes")])
    )
    opened = Steps(bench.memory, bench.cancels, lambda message: None)
    reported = opened.open(msg.OpenSteps("w", 4096, 1, str(folder), str(folder), steps, nvtx=nvtx))
    assert isinstance(reported, msg.Ready), reported
    return opened


def _work(bench: Bench, opened: Steps, *texts: str) -> None:
    items = tuple(msg.Item(at, (bench.value(text, "text"),)) for at, text in enumerate(texts))
    opened.batches[0].run(msg.RunBatch(1, 0, items))
    opened.streams[1].submit(items[0])
    opened.streams[1].round()


def test_calls_and_rounds_have_ranges_with_the_names_of_their_steps(
    bench: Bench, tmp_path: Path, recorded: list[str]
) -> None:
    opened = _opened(bench, tmp_path, nvtx=True)
    recorded.clear()
    _work(bench, opened, "a", "b")
    assert recorded == ["shout", "end", "echo round", "end"]
    recorded.clear()
    _work(bench, opened, "bad")
    assert recorded == ["shout", "end", "echo round", "end"], "what fails ends too"


def test_without_the_option_nothing_is_imported_and_no_call_is_changed(
    bench: Bench, tmp_path: Path, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "weftline.engine.worker.nvtx", raising=False)
    opened = _opened(bench, tmp_path, nvtx=False)
    _work(bench, opened, "a")
    assert not recorded and "weftline.engine.worker.nvtx" not in sys.modules
    assert "call" not in vars(opened.batches[0]) and "round" not in vars(opened.streams[1])


def _without_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr("torch.cuda.nvtx", SimpleNamespace(range_push=fail, range_pop=fail))


@pytest.mark.slow
def test_where_torch_has_none_the_library_writes_them(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_torchs(monkeypatch)
    reported: list[Any] = []
    library = SimpleNamespace(nvtxRangePushA=reported.append, nvtxRangePop=lambda: reported.append("end"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    _work(bench, _opened(bench, tmp_path, nvtx=True), "a")
    assert reported == [b"shout", "end", b"echo round", "end"]


@pytest.mark.slow
def test_without_nvtx_the_steps_run_and_the_log_has_the_reason(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    _without_torchs(monkeypatch)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with caplog.at_level(logging.WARNING):
        _work(bench, _opened(bench, tmp_path, nvtx=True), "a")
    assert "gpu.nvtx: found no NVTX" in caplog.text


def test_the_option_reaches_the_workers_of_gpus_and_no_others(tmp_path: Path) -> None:
    def reported(**gpu: Any) -> list[tuple[str, bool]]:
        p = Builder("p", gpu=gpu)
        device = p.step("near", "echo", value=p.input("x", "text"), device="fake:0")
        p.output("y", p.step("far", "echo", value=device.value, device="cpu").value)
        plan = make_plan(p.build(), Machine(2, 8 << 30, (Device("fake:0", 8 << 30),)))
        return [
            (plan.workers[worker].device, open_message(plan, worker, tmp_path).nvtx)
            for worker in range(len(plan.workers))
        ]

    assert sorted(reported(nvtx=True)) == [("", False), ("fake:0", True)]
    assert not any(nvtx for _, nvtx in reported())
