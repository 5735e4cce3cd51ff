"""`finite: true`: NaN and infinite numbers in every kind of value and every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.device_hosted import DeviceBench
from tests.engine.device_steps import Foreign
from tests.engine.hosted import run_of
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.values import pack
from weftline.engine.worker import device
from weftline.engine.worker.outputs import is_finite
from weftline.nodes.contract import Batch, Outputs
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType
from weftline.shm.device.tensor import DeviceTensor

NAN, INFINITE = float("nan"), float("inf")


def tensor(*values: float, dtype: str = "float32") -> np.ndarray:
    return np.array(values, dtype)


def finite(value: Any, type: str) -> bool:
    """Return True if the check for finite outputs accepts a value on a port of this type."""
    return is_finite(value, pack(value, PortType.parse(type), "y"))


def raw_bits(values: list[float], dtype: torch.dtype) -> np.ndarray:
    """Return how numpy sees a dtype that it does not have."""
    held = torch.tensor(values).to(dtype)
    return held.view(torch.uint16 if held.element_size() == 2 else torch.uint8).numpy()


@pytest.mark.parametrize("bad", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize(
    ("type", "made"),
    [
        ("float32[N]", lambda x: tensor(1, x)),
        ("float16[N]", lambda x: tensor(1, x, dtype="float16")),
        ("float64[N]", lambda x: tensor(1, x, dtype="float64")),
        ("bfloat16[N]", lambda x: raw_bits([1, x], torch.bfloat16)),
        ("bfloat16[N]", lambda x: torch.tensor([1, x], dtype=torch.bfloat16)),
        ("float8_e5m2[N]", lambda x: raw_bits([1, x], torch.float8_e5m2)),
        ("float8_e5m2[N]", lambda x: torch.tensor([1, x]).to(torch.float8_e5m2)),
        ("float32[N]", lambda x: torch.tensor([1, x])),
        ("tensor", lambda x: torch.tensor([1, x], dtype=torch.bfloat16)),
        ("audio", lambda x: tensor(0, x)),
        ("list[float32[N]]", lambda x: [tensor(1), tensor(x)]),
        ("json", lambda x: {"a": [1, {"b": x}]}),
        ("json", lambda x: x),
        ("detections", lambda x: Detections(tensor(0, 0, 1, x)[None], tensor(1), np.zeros(1, np.int32), ("a",))),
        ("detections", lambda x: Detections(np.zeros((1, 4), "float32"), tensor(x), np.zeros(1, np.int32), ("a",))),
    ],
)
def test_one_number_that_is_not_finite_is_found(type: str, made: Any, bad: float) -> None:
    assert not finite(made(bad), type)
    assert finite(made(0.5), type)


def test_the_only_such_number_of_float8_e4m3fn_is_nan() -> None:
    assert not finite(raw_bits([1, NAN], torch.float8_e4m3fn), "float8_e4m3fn[N]")
    assert finite(raw_bits([1, 448, -448], torch.float8_e4m3fn), "float8_e4m3fn[N]")


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("uint16[N]", tensor(0x7F80, dtype="uint16")),
        ("bool[N]", tensor(1, dtype="bool")),
        ("int64[N]", torch.ones(2, dtype=torch.int64)),
        ("float32[N]", tensor()),
        ("list[text]", ["nan"]),
        ("text", "nan"),
        ("bytes", b"\x7f\x80"),
        ("json", {"nan": [None, True, "inf", 1 << 60]}),
    ],
)
def test_what_holds_no_such_numbers_is_finite(type: str, value: Any) -> None:
    assert finite(value, type)


@pytest.mark.parametrize("passed_on", [True, False])
def test_what_lies_on_a_device_is_looked_at_there_and_not_brought_down(passed_on: bool) -> None:
    bench = DeviceBench()

    def same(batch: Batch) -> Outputs:
        return {"y": [x if passed_on else Foreign(np.asarray(x) * 1) for x in batch["x"]]}

    step = bench.on_gpu(same, {"x": "float32[?]"}, {"y": "float32[?]"}, {"y": "device"}, finite=True)
    rows = [[value] for value in bench.device_values([np.full(10_000, x, np.float32) for x in (1, NAN, 3)])]
    good, bad, other = step.run(run_of(rows)).results
    assert isinstance(good, msg.ItemResult) and isinstance(other, msg.ItemResult) and good.outputs[0].place is None
    assert isinstance(bad, msg.Failure) and bad.message.startswith("y: found NaN or an infinite number")
    bench.close()


def test_elements_on_a_device_are_looked_at_whatever_library_they_are_of() -> None:
    bench = DeviceBench()

    def listed(batch: Batch) -> Outputs:
        return {"y": [[Foreign(np.asarray(x) * 1)] for x in batch["x"]]}

    step = bench.on_gpu(listed, {"x": "float32[?]"}, {"y": "list[float32[?]]"}, finite=True)
    rows = [[value] for value in bench.device_values([np.full(10, x, np.float32) for x in (1, NAN)])]
    good, bad = step.run(run_of(rows)).results
    assert isinstance(good, msg.ItemResult) and isinstance(bad, msg.Failure)
    bench.close()


@pytest.mark.parametrize(
    ("dtype", "made"),
    [("bfloat16", lambda x: raw_bits([1, x], torch.bfloat16)), ("float32", lambda x: tensor(1, x))],
)
def test_a_worker_without_torch_looks_at_a_copy(dtype: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were torch loaded now, it would look on a stream of its own, before the step's work is done."""
    bench = DeviceBench()
    step = bench.on_gpu(lambda batch: {"y": batch["x"]}, {"x": "tensor"}, {"y": "tensor"}, {"y": "device"}, finite=True)
    rows = [bench.device_values([made(x)], dtype=dtype) for x in (0.5, NAN)]
    for name, answer in (("is_fake", False), ("_torch", None)):
        monkeypatch.setattr(device, name, lambda *asked, answer=answer: answer)
    monkeypatch.setattr(DeviceTensor, "torch", None)
    good, bad = step.run(run_of(rows)).results
    assert isinstance(good, msg.ItemResult) and isinstance(bad, msg.Failure)
    assert bad.message.startswith("y: found NaN")
    monkeypatch.undo()
    bench.close()


def test_a_passed_on_value_keeps_its_dtype_for_a_port_of_any_type() -> None:
    bench = DeviceBench()
    step = bench.on_gpu(
        lambda batch: {"y": batch["x"]}, {"x": "tensor"}, {"y": "tensor"}, device_inputs=(), finite=True
    )
    rows = [[bench.value(torch.tensor([x], dtype=torch.bfloat16), "tensor")] for x in (1.0, NAN)]
    good, bad = step.run(run_of(rows)).results
    assert isinstance(good, msg.ItemResult) and isinstance(bad, msg.Failure)
    bench.close()


def test_numbers_that_become_json_are_looked_at_as_json() -> None:
    assert finite({"x": np.float32(1)}, "json")
    assert not finite({"x": np.float32("nan")}, "json")
    assert not finite(np.array([1, np.inf]), "json")
