"""Metadata, configuration and readiness of models, with their port types."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from tests.engine.serving.v2.held import info
from weftline.engine.serving.model_info import LOADING, READY, UNAVAILABLE, ModelInfo, ModelState
from weftline.engine.serving.v2.metadata import config_of, metadata_of, model_ready, server_ready


@pytest.mark.parametrize(
    ("type", "taken", "given"),
    [
        ("text", ("BYTES", (1,)), ("BYTES", (1,))), ("json", ("BYTES", (1,)), ("BYTES", (1,))),
        ("image", ("BYTES", (1,)), ("UINT8", (-1, -1, 3))), ("audio", ("BYTES", (1,)), ("FP32", (-1,))),
        ("float32[3, H, ?]", ("FP32", (3, -1, -1)), ("FP32", (3, -1, -1))), ("bfloat16[4]", ("BF16", (4,)),
        ("BF16", (4,))),
        ("float8_e5m2[4]", ("UINT8", (4,)), ("UINT8", (4,))), ("complex64[N]", ("FP32", (-1, 2)), ("FP32", (-1, 2))),
        ("float64[]", ("FP64", ()), ("FP64", ())), ("tensor", ("FP32", (-1,)), ("FP32", (-1,))),
        ("list[text]", ("BYTES", (-1,)), ("BYTES", (-1,))), ("list[image]", ("BYTES", (-1,)),
        ("UINT8", (-1, -1, -1, 3))),
        ("list[float32[4]]", ("FP32", (-1, 4)), ("FP32", (-1, 4))), ("any", ("BYTES", (1,)), ("BYTES", (1,))),
        ("detections", ("BYTES", (1,)), ("BYTES", (1,))), ("bytes", ("BYTES", (1,)), ("BYTES", (1,))),
    ],
)  # fmt: skip
def test_a_port_has_a_datatype_and_a_shape(type: str, taken: Any, given: Any) -> None:
    meta = metadata_of(info({"x": type}, {"y": type}))
    front = () if type in ("any", "tensor") else (-1,)
    assert (meta.inputs[0].datatype, meta.inputs[0].shape) == (taken[0], (*front, *taken[1]))
    assert (meta.outputs[0].datatype, meta.outputs[0].shape) == (given[0], (*front, *given[1]))


def test_max_batch_size_is_that_of_the_server_where_requests_have_batches() -> None:
    def most(model: ModelInfo) -> int:
        built: Any = model_config_pb2.ModelConfig(**config_of(model, 64))  # type: ignore[attr-defined]
        assert all(len(one.dims) == 1 for one in built.input)
        return int(built.max_batch_size)

    assert most(info({"x": "text", "y": "float32[4]"}, {"z": "text"})) == 64
    assert most(info({"x": "text"}, {"z": "text"}, stateful=True)) == most(info({"x": "any"}, {"z": "text"})) == 0
    assert most(info({"x": "text"}, {"answer+": "text"})) == 0


def test_a_model_has_a_name_a_version_and_a_platform() -> None:
    meta = metadata_of(info({}))
    assert (meta.name, meta.versions, meta.platform) == ("m", ("3",), "weftline")


def test_the_configuration_is_one_of_tritons() -> None:
    model = info({"photo": "image", "hint?": "text"}, {"answer+": "text"}, steps=("see", "say"), stateful=True)
    built: Any = model_config_pb2.ModelConfig(**config_of(model, 256))  # type: ignore[attr-defined]
    assert built.name == "m" and built.platform == built.backend == "weftline" and built.max_batch_size == 0
    assert [(one.name, one.optional, list(one.dims)) for one in built.input] == [
        ("photo", False, [1]),
        ("hint", True, [1]),
    ]
    assert built.input[0].data_type == model_config_pb2.TYPE_STRING  # type: ignore[attr-defined]
    assert built.model_transaction_policy.decoupled and built.HasField("sequence_batching")
    texts = {key: value.string_value for key, value in built.parameters.items()}
    assert texts["input:photo"] == "image" and texts["output:answer"] == "text" and texts["steps"] == "see,say"


def test_a_model_that_neither_streams_nor_remembers_says_so() -> None:
    built: Any = model_config_pb2.ModelConfig(**config_of(info({"x": "text"}), 256))  # type: ignore[attr-defined]
    assert not built.model_transaction_policy.decoupled and not built.HasField("sequence_batching")


GOOD = ModelState("good", 2, READY)


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        (ModelState("a", 0, UNAVAILABLE, "it is not loaded"), True),
        (ModelState("a", 0, LOADING), True),
        (ModelState("a", 0, UNAVAILABLE, "no such file"), False),
        (ModelState("a", 1, UNAVAILABLE, "step see: its worker is starting again"), False),
        (ModelState("a", 1, UNAVAILABLE), False),
        (GOOD, True),
    ],
)
def test_a_server_is_ready_while_a_model_serves_or_none_should(state: ModelState, ready: bool) -> None:
    assert server_ready([GOOD, state]) and server_ready([state]) is ready
    assert server_ready([GOOD, state], strict=True) is ready


def test_a_server_without_models_is_ready() -> None:
    assert server_ready([])


def test_a_model_is_ready_in_the_version_that_serves() -> None:
    assert model_ready([GOOD], "good") and model_ready([GOOD], "good", "2")
    assert not model_ready([GOOD], "good", "1") and not model_ready([GOOD], "other")
    assert not model_ready([ModelState("a", 1, UNAVAILABLE)], "a")


@pytest.mark.parametrize(
    ("type", "format"),
    [
        ("float32[3, 224, 224]", "NCHW"), ("uint8[1, H, W]", "NCHW"), ("float32[H, W, 3]", "NHWC"),
        ("float32[3, 4, 3]", "NONE"), ("float32[3, 224]", "NONE"), ("float32[4, 8, 8]", "NONE"), ("image", "NONE"),
        ("list[float32[3, 8, 8]]", "NONE"), ("tensor", "NONE"), ("text", "NONE"),
    ],
)  # fmt: skip
def test_a_tensor_that_can_be_a_picture_has_its_layout(type: str, format: str) -> None:
    assert config_of(info({"x": type}), 8)["input"][0]["format"] == f"FORMAT_{format}"
