"""v2 metadata, configuration and readiness of models.

    ModelMetadata    name, versions, platform, and for each port its datatype and shape, -1 for every open size
    config_of(...)   a dict with the keys of Triton's ModelConfig, which `ModelConfig(**config)` and JSON both take

A port with several representations (`datatypes.py`) is described by one of them: an image, a recording or json by BYTES
[1] for inputs, and by the representation in responses for outputs. `tensor` and `any` without a dtype are described as
FP32 and BYTES. The configuration's parameters have what v2 lacks: `input:<name>` and `output:<name>` with the port's
type as written in a pipeline file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weftline.engine.serving.model_info import NOT_LOADED, UNAVAILABLE, ModelInfo, ModelState, PortInfo
from weftline.engine.serving.v2.datatypes import BYTES, Numbers, form_of

PLATFORM = "weftline"
INPUT, OUTPUT, PIECES = "input:", "output:", "pieces:"
"""Prefixes of the names of parameters with port types, and of those for streamed outputs."""

_FORMATS: dict[tuple[bool, ...], str] = {(True, False, False): "FORMAT_NCHW", (False, False, True): "FORMAT_NHWC"}
"""Formats of tensors by the dimensions that can be those of channels."""

_DENSE_OUT = frozenset({"image", "audio"})


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """v2 metadata of a port. shape: -1 for a variable size; the batch size is in front where the model has batches."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """v2 metadata of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def metadata_of(info: ModelInfo) -> ModelMetadata:
    """Return the v2 metadata of a model."""
    front = (-1,) if has_batches(info) else ()
    inputs, outputs = (
        tuple(TensorMetadata(one.name, one.datatype, (*front, *one.shape)) for one in _tensors(ports, out))
        for ports, out in ((info.inputs, False), (info.outputs, True))
    )
    return ModelMetadata(info.name, (str(info.version),), PLATFORM, inputs, outputs)


def has_batches(info: ModelInfo) -> bool:
    """Return True if every request may have a batch dimension in front.

    False for sequences and streams, which have one item at a time, and where a tensor of any shape makes it ambiguous.
    """
    return bool(info.inputs) and not (info.stateful or info.streams or any(map(_has_any_shape, info.inputs)))


def _has_any_shape(port: PortInfo) -> bool:
    form = form_of(port.type)
    return form.numbers is not None and form.numbers.dims is None


def config_of(info: ModelInfo, batch_max: int) -> dict[str, Any]:
    """Return the configuration of a model with Triton's keys.

    max_batch_size is `batch_max` where requests may be batches: clients then send a batch dimension, which is not among
    the `dims`. Shapes without it are accepted too. A model that streams is decoupled; unlike Triton's, it also supports
    ModelInfer, with whole outputs.

    batch_max: limits.batch_max of the server.
    """
    inputs, outputs = _tensors(info.inputs, False), _tensors(info.outputs, True)
    config: dict[str, Any] = {
        "name": info.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": batch_max if has_batches(info) else 0,
        "input": [
            _port(tensor) | {"format": _format(port), "optional": port.optional}
            for tensor, port in zip(inputs, info.inputs, strict=True)
        ],
        "output": [_port(tensor) for tensor in outputs],
        "model_transaction_policy": {"decoupled": info.streams},
        "parameters": {key: {"string_value": value} for key, value in _parameters(info).items()},
    }
    if info.stateful:
        config["sequence_batching"] = {"direct": {}}
    return config


def _parameters(info: ModelInfo) -> dict[str, str]:
    types = {f"{INPUT}{port.name}": port.type for port in info.inputs}
    types |= {f"{OUTPUT}{port.name}": port.type for port in info.outputs}
    types |= {f"{PIECES}{port.name}": "true" for port in info.outputs if port.pieces}
    more = {
        "about": info.about,
        "steps": ",".join(info.steps),
        "request_bytes_max": str(info.request_bytes_max),
        "deadline_ms": "" if info.deadline_ms is None else f"{info.deadline_ms:g}",
    }
    return types | {key: value for key, value in more.items() if value}


def _format(port: PortInfo) -> str:
    """Return the layout of a tensor that can be a picture: 1 or 3 channels in front or at the end."""
    numbers = form_of(port.type).numbers
    if not port.type.endswith("]") or numbers is None or numbers.listed or numbers.dims is None:
        return "FORMAT_NONE"
    return _FORMATS.get(tuple(dim in (1, 3) for dim in numbers.dims), "FORMAT_NONE")


def _port(tensor: TensorMetadata) -> dict[str, Any]:
    kind = "STRING" if tensor.datatype == BYTES else tensor.datatype
    return {"name": tensor.name, "data_type": f"TYPE_{kind}", "dims": list(tensor.shape)}


def _tensors(ports: Iterable[PortInfo], out: bool) -> list[TensorMetadata]:
    return [_tensor(port, out) for port in ports]


def _tensor(port: PortInfo, out: bool) -> TensorMetadata:
    form = form_of(port.type)
    dense = form.element == "" or (out and form.numbers is not None and port.type in _DENSE_OUT)
    dense = dense or (out and form.listed and form.numbers is not None)
    if dense and form.numbers is not None:
        return TensorMetadata(port.name, form.numbers.datatype or "FP32", _shape(form.numbers))
    return TensorMetadata(port.name, BYTES, (-1,) if form.listed else (1,))


def _shape(numbers: Numbers) -> tuple[int, ...]:
    dims: Sequence[int | str] = ("?",) if numbers.dims is None else numbers.dims
    return tuple(dim if isinstance(dim, int) else -1 for dim in dims)


# readiness


def model_ready(index: Iterable[ModelState], name: str, version: str = "") -> bool:
    """Return True if a model is ready; False also for an unknown one."""
    return any(one.ready and version in ("", str(one.version)) for one in index if one.name == name)


def server_ready(index: Iterable[ModelState], strict: bool = False) -> bool:
    """Return whether a load balancer may send requests to the server: some model is ready, or none should serve.

    A model that failed must not take the others out of rotation; model_ready says which one it is. A model that is not
    loaded, or is being loaded for the first time, should not serve yet.

    strict: every model that should serve is ready.
    """
    found = tuple(index)
    failed = any(one.state == UNAVAILABLE and (one.version > 0 or one.why not in ("", NOT_LOADED)) for one in found)
    return not failed or (not strict and any(one.ready for one in found))
