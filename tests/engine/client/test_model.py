"""Model descriptions: port types from a Weftline server, datatypes from others."""

from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from tests.engine.client.model_infos import description_of
from weftline.engine.client.model import described
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.errors import InputError

pb: Any = service_pb2
config_pb: Any = model_config_pb2

FACE = ModelInfo(
    "m", 7, (PortInfo("a", "image"), PortInfo("b", "list[text]", optional=True)), (PortInfo("y", "text", pieces=True),)
)


def test_a_weftline_server_tells_types_and_what_may_be_left_out() -> None:
    model = description_of(FACE)
    assert (model.name, model.version, model.streams) == ("m", "7", True)
    assert [(str(port), port.optional) for port in model.inputs.values()] == [("image", False), ("list[text]", True)]


def test_another_server_tells_datatypes() -> None:
    port = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
    metadata = pb.ModelMetadataResponse(name="m", versions=["1", "3"], inputs=[port], outputs=[port])
    model = described("m", metadata, config_pb.ModelConfig())
    assert (model.version, str(model.inputs["x"]), model.inputs["x"].type) == ("3", "FP32[-1, 3]", None)
    assert not model.streams


@pytest.mark.parametrize("written", ["hologram", "", "float9[3]"])
def test_a_type_that_is_not_known_here_is_left_to_the_datatype(written: str) -> None:
    port = {"name": "x", "datatype": "FP32", "shape": [1]}
    config = config_pb.ModelConfig(parameters={"input:x": {"string_value": written}})
    metadata = pb.ModelMetadataResponse(name="m", inputs=[port])
    assert described("m", metadata, config).inputs["x"].type is None


def test_wrong_names_are_reported_all_at_once() -> None:
    with pytest.raises(InputError) as refused:
        description_of(FACE).check_inputs({"c": 1, "b": None})
    assert str(refused.value) == (
        "inputs unknown: c; missing: a; the inputs of m are a (image), b (list[text], may be left out)"
    )
    description_of(FACE).check_inputs({"a": 1})


def test_wanted_outputs_are_names_of_outputs() -> None:
    assert description_of(FACE).check_outputs(None) == () and description_of(FACE).check_outputs(("y", "y")) == ("y",)
    for wrong in ((), ("z",)):
        with pytest.raises(InputError):
            description_of(FACE).check_outputs(wrong)
