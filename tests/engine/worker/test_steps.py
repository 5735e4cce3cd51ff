"""Opening the nodes of a worker: on the step's device and stream."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from weftline.engine.protocol import messages as msg
from weftline.engine.worker.device import WorkerDevice
from weftline.engine.worker.steps import Opener
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.testing.fake_gpu.gpu import FakeGpu


def open_message(device: str = "fake:0") -> msg.OpenSteps:
    return msg.OpenSteps("w", 4096, 1, ".", ".", (), device, 3 << 20, "host")


def test_a_node_is_open_once_its_work_on_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    device = WorkerDevice(FakeGpu("fake:0"))
    said: list[msg.FromWorker] = []
    waited: list[tuple[int, int]] = []
    monkeypatch.setattr(device.driver, "synchronize", lambda stream: waited.append((stream, len(said))))
    step = msg.StepToOpen(0, "a", "echo", {"type": "uint8[4]"}, (), (), "fake:0", BatchPolicy(1), False)
    opener = Opener(open_message(), device, said.append)
    stream = opener.stream(step)
    opener.node(step, stream)
    assert waited == [(stream, 2)] and said[2] == msg.OpenProgress("a", "ready", 1.0)


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", [1, 1]), ("cuda:0", []), ("fake:1", []), ("cpu", [])])
def test_torch_works_on_the_step_s_gpu_unless_it_is_the_first_anyway(
    monkeypatch: pytest.MonkeyPatch, device: str, chosen: list[int]
) -> None:
    selected: list[int] = []
    cuda = SimpleNamespace(set_device=selected.append, is_initialized=lambda: False)
    backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True))
    threads = {"get_num_threads": lambda: 1, "set_num_threads": lambda count: None}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, backends=backends, **threads))
    step = msg.StepToOpen(0, "a", "echo", {"type": "uint8[4]"}, (), (), device, BatchPolicy(1), False)
    Opener(open_message(device), None, lambda message: None).node(step)
    assert selected == chosen
