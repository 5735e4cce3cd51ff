"""Calls repeated as graphs: the same numbers, padded batches, and what cannot be captured."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.nodes.device_values import DEVICE, down
from tests.nodes.test_onnx import linear
from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.cuda_graphs import graph_sizes
from weftline.nodes.onnx import Onnx, OnnxConfig
from weftline.nodes.onnx_session import CUDA_OPTIONS, providers
from weftline.nodes.torch_module import TorchConfig, TorchModule

SOURCE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    def forward(self, x, y):
        return {"z": self.layers(x) + y, "same": x}

class Reads(Net):
    def forward(self, x, y):
        return super().forward(x, y) if x.sum().item() >= 0 else super().forward(-x, y)
"""
PORTS: dict[str, Any] = {
    "accepts": {"x": "float32[3]", "y": "float32[2]"},
    "gives": {"z": "float32[2]", "same": "float32[3]"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    (tmp_path / "nets.py").write_text(SOURCE)
    return tmp_path


def opened(folder: Path, capture: FakeCapture | None, items_max: int = 6, module: str = "Net") -> TorchModule:
    """Return the node as on a GPU where there is a capture, and without graphs where there is none."""
    node = TorchModule(TorchConfig(**PORTS, module=f"nets.py:{module}", graphs=True))
    node.open(OpenContext(folder, items_max=items_max))
    if capture is not None:
        node._sizes = graph_sizes(items_max)
        node._capture = lambda: capture  # type: ignore[method-assign]
    node.warm_up()
    return node


def batches() -> list[Batch]:
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(n, 3)), draw.normal(size=(n, 2))) for n in (1, 2, 3, 6, 4, 5, 1, 6, 2, 7)]
    return [Batch({"x": list(x.astype(np.float32)), "y": list(y.astype(np.float32))}) for x, y in rows]


def answers(node: TorchModule, batch: Batch) -> list[np.ndarray]:
    found = node.run(batch)
    return [np.array(found["z"]), np.array(found["same"])]


def test_graphs_give_what_the_module_gives_for_batches_of_every_size(folder: Path) -> None:
    capture = FakeCapture()
    plain, node = opened(folder, None), opened(folder, capture)
    assert capture.recorded == len(graph_sizes(6)) == 4 and plain._graphs is None
    for batch in batches():
        for one, other in zip(answers(node, batch), answers(plain, batch), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
            assert len(one) == len(batch)


def test_a_batch_that_has_a_graph_does_not_call_the_module(folder: Path) -> None:
    node = opened(folder, FakeCapture())
    calls: list[int] = []
    node._module.register_forward_hook(lambda module, given, gave: calls.append(len(given[0])))
    for batch in batches():
        node.run(batch)
    assert calls == [7]  # larger than any graph


def test_after_sleep_graphs_are_those_of_the_weights_where_they_are_now(folder: Path) -> None:
    capture = FakeCapture()
    node = opened(folder, capture)
    assert node.sleep("host") and node._graphs is None
    with torch.no_grad():
        for weight in node._module.parameters():
            weight.data = weight.data * 2  # somewhere else
    node.wake()
    assert capture.recorded == 8
    batch = batches()[3]
    found = answers(node, batch)[0]
    with torch.inference_mode():
        wanted = node._module(*(torch.from_numpy(np.stack(batch[port])) for port in "xy"))["z"]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_a_module_that_reads_a_value_runs_without_graphs_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weftline"), "propagate", True)
    plain, node = opened(folder, None, module="Reads"), opened(folder, FakeCapture(), module="Reads")
    assert node._graphs is None
    assert "nets.py:Reads runs without CUDA graphs: a value is read off the device" in caplog.text
    for batch in batches():
        for one, other in zip(answers(node, batch), answers(plain, batch), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "ports", [{"accepts": {"x": "float32[3]", "y": "float32[T]"}}, {"gives": {"z": "float32[?, 2]"}}]
)
def test_sizes_that_are_not_fixed_are_refused_when_checked(folder: Path, ports: dict[str, Any]) -> None:
    options = {**PORTS, "module": "nets.py:Net", **ports}
    TorchModule.ports(TorchConfig(**options), StepContext(folder))
    with pytest.raises(ConfigError) as refused:
        TorchModule.ports(TorchConfig(**options, graphs=True), StepContext(folder))
    assert refused.value.option == "graphs" and "sizes are not all fixed" in refused.value.found


def test_graph_sizes_are_stated_or_powers_of_two_and_the_largest() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(12) == (1, 2, 4, 8, 12)
    assert graph_sizes(12, (4, 12, 16)) == (4, 12)


class RecordedSession:
    """ONNX Runtime's session, noting the graph of every run: None where a run names none."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.graphs: list[str | None] = []

    def io_binding(self) -> Any:
        return self.session.io_binding()

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        self.graphs.append(None if options is None else options.get_run_config_entry("gpu_graph_id"))
        self.session.run_with_iobinding(binding, options)


def onnx_opened(folder: Path, items_max: int = 6) -> tuple[Onnx, RecordedSession]:
    """Return the node as on a GPU, with memory of a fake one, and its session."""
    linear("N", folder / "m.onnx")
    node = Onnx(OnnxConfig("m.onnx", graphs=True))
    node.open(OpenContext(folder, DEVICE, items_max=items_max))
    node._session = session = RecordedSession(node._session)
    node._sizes = graph_sizes(items_max)
    node.warm_up()
    return node, session


def test_an_onnx_session_replays_batches_of_every_size(tmp_path: Path) -> None:
    node, session = onnx_opened(tmp_path)
    assert session.graphs == ["-1", "6", "4", "2", "1"]  # the usual run, then the captures
    draw, weights = np.random.default_rng(0), np.arange(8, dtype=np.float32).reshape(4, 2)
    for items, graph in ((1, "1"), (3, "4"), (6, "6"), (5, "6"), (2, "2"), (7, "-1")):
        rows = draw.normal(size=(items, 4)).astype(np.float32)
        found = node.run(Batch({"x": list(rows)}))["y_out"]
        assert session.graphs[-1] == graph and found.spec.shape == (items, 2)
        np.testing.assert_allclose(down(found), rows @ weights + 1, rtol=1e-5)
    node.close()


def test_an_onnx_session_that_cannot_capture_runs_without_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weftline"), "propagate", True)

    def refuse(*given: Any) -> Any:
        raise RuntimeError("no stream can be captured here")

    monkeypatch.setattr("weftline.nodes.onnx_session.OnnxGraphs._run", refuse)
    node, session = onnx_opened(tmp_path)
    assert "m.onnx runs without CUDA graphs: no stream can be captured here" in caplog.text
    found = down(node.run(Batch({"x": [np.ones(4, np.float32)]}))["y_out"])
    assert found.tolist() == [[13.0, 17.0]] and set(session.graphs) == {"-1"}


def test_a_session_for_graphs_is_opened_on_cuda_without_tensorrt(tmp_path: Path) -> None:
    available = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    (cuda, on), _ = providers(available, "cuda:1", tmp_path, False, 7, graphs=True)
    assert cuda == "CUDAExecutionProvider"
    assert on == {"device_id": 1, "user_compute_stream": "7", "enable_cuda_graph": "1"} | CUDA_OPTIONS
    assert all("enable_cuda_graph" not in on for _, on in providers(available, "cuda:1", tmp_path, True, 7))


@pytest.mark.parametrize(("first", "found"), [(1, "run one by one"), ("N", "sizes are not all fixed")])
def test_an_onnx_model_without_fixed_sizes_is_refused_when_checked(tmp_path: Path, first: object, found: str) -> None:
    model = linear(first)
    if first == "N":
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "width"
    onnx.save(model, tmp_path / "m.onnx")
    Onnx.ports(OnnxConfig("m.onnx"), StepContext(tmp_path))
    with pytest.raises(ConfigError) as refused:
        Onnx.ports(OnnxConfig("m.onnx", graphs=True), StepContext(tmp_path))
    assert refused.value.option == "graphs" and found in refused.value.found


def test_on_the_cpu_there_are_no_graphs(folder: Path) -> None:
    node = TorchModule(TorchConfig(**PORTS, module="nets.py:Net", graphs=True))
    node.open(OpenContext(folder, items_max=4))
    node.warm_up()
    assert node._graphs is None and node._sizes == ()
