"""Models without a server: metadata, its description in a client, and both ends of the encoding."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import model_config_pb2, service_pb2

from weftline.engine.client.decoder import values_of
from weftline.engine.client.encoder import tensor_of
from weftline.engine.client.model import DescribedModel, described
from weftline.engine.serving.backend import Answer
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.engine.serving.v2.messages import InferRequest
from weftline.engine.serving.v2.metadata import config_of, metadata_of
from weftline.engine.serving.v2.protobuf import parse_request, parse_response, request_bytes, response_bytes
from weftline.engine.serving.v2.request import to_asks
from weftline.engine.serving.v2.response import to_response


def info(type: str, optional: bool = False) -> ModelInfo:
    """Return the metadata of a model that returns its input `x`."""
    port = PortInfo("x", type, optional)
    return ModelInfo("m", 3, (port,), (port,))


def description_of(of: ModelInfo) -> DescribedModel:
    """Return a client's description from the server's metadata and configuration."""
    pb: Any = service_pb2
    meta = metadata_of(of)
    tensors = [
        [{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in side]
        for side in (meta.inputs, meta.outputs)
    ]
    answer = pb.ModelMetadataResponse(name=meta.name, versions=meta.versions, inputs=tensors[0], outputs=tensors[1])
    config: Any = model_config_pb2
    return described(of.name, answer, config.ModelConfig(**config_of(of, 256)))


def arrived(type: str, value: Any) -> Any:
    """Return the engine's value when a client sends `value` for a port of `type`."""
    tensor = tensor_of(description_of(info(type)).inputs["x"], value)
    request = parse_request(request_bytes(InferRequest("m", (tensor,))))
    (ask,) = to_asks(request, info(type), ServeLimits()).asks
    return ask.inputs["x"]


def came_back(type: str, value: Any, optional: bool = False) -> Any:
    """Return the caller's value when the engine outputs `value` on a port of `type`."""
    of = info(type, optional)
    response = to_response(InferRequest("m", ()), of, [Answer({"x": value}, version=3)], None)
    return values_of(parse_response(response_bytes(response)).outputs, description_of(of).outputs)["x"]
