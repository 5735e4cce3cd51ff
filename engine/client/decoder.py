"""Decode v2 tensors and streams into Python values, for both clients. Pure.

A value has the type that `Session.run` returns for its port: text is str, json is parsed, detections are Detections,
arrays belong to the caller. Without a Weftline type, numbers are arrays and BYTES is an array of bytes objects.

In a stream a Weftline server sends only what is new: text as it grows, other outputs once they are finished. The text
is joined here, so that a stream ends as `Session.stream` does: with every output whole, `last` set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from weftline.engine.client.encoder import ARRAYS
from weftline.engine.client.model import DescribedModel, DescribedPort
from weftline.engine.client.steps import RETRY_AFTER, Refusal, Refused
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.v2.datatypes import BYTES, DTYPES, NUMPY
from weftline.engine.serving.v2.elements import JSON, decode_elements
from weftline.engine.serving.v2.messages import STATUS, Tensor
from weftline.engine.serving.v2.protobuf import parse_stream_response
from weftline.errors import InputError, WeftlineError
from weftline.nodes.detections import Detections
from weftline.nodes.json_value import NotJson
from weftline.nodes.ports import PortType
from weftline.nodes.strict_json import VALUES, parse
from weftline.shm.spec import byte_size
from weftline.shm.view import numpy_dtype

ABSENT = "absent"
"""Parameter of an output tensor that marks an absent value."""

FINAL = "triton_final_response"
RETRY_MS = RETRY_AFTER.replace("-", "_")

_MEDIA = {"image": np.uint8, "audio": np.float32}


class InvalidResponse(WeftlineError):
    """A response that violates the protocol."""


def values_of(tensors: Iterable[Tensor], ports: Mapping[str, DescribedPort]) -> dict[str, Any]:
    """Return the values of a response by name; arrays are copies that belong to the caller."""
    return {one.name: value_of(one, ports.get(one.name)) for one in tensors}


def value_of(tensor: Tensor, port: DescribedPort | None) -> Any:
    """Return one output's value; InvalidResponse if its bytes do not match its shape and datatype."""
    if tensor.parameters.get(ABSENT):
        return None
    type = port.type if port is not None else None
    if tensor.datatype != BYTES:
        return _shaped(_numbers(tensor), type)
    elements = _elements(tensor)
    if type is None or type.kind == "tensor":
        array = np.empty(len(elements), object)
        array[:] = elements
        return array.reshape(tensor.shape)
    if type.kind == "any" and tensor.parameters.get(JSON):
        type = PortType("json")
    if type.kind != "list" and len(elements) == 1:
        return _read(type, elements[0])
    item = type.item or type
    if item.kind in ARRAYS and len(elements) == 1:  # arrays of several shapes, as nested lists
        dtype = numpy_dtype(item.dtype) if item.dtype else _MEDIA.get(item.kind)
        return [np.array(one, dtype) for one in _json(elements[0])]
    return [_read(item, one) for one in elements]


def _shaped(array: np.ndarray, type: PortType | None) -> Any:
    if type is None:
        return array
    inner = type.item or type if type.kind == "list" else type
    if inner.dtype == "complex64" and array.dtype == np.float32 and array.shape[-1:] == (2,):
        array = array.view(np.complex64).reshape(array.shape[:-1])
    if type.kind == "list":
        if not array.ndim:
            raise InvalidResponse("the answer has a single number where a list belongs")
        return list(array) if inner.kind in ARRAYS else array.tolist()
    return array.tolist() if type.kind == "json" else array


def _read(type: PortType, data: bytes) -> Any:
    if type.kind in ("bytes", *ARRAYS):
        return data
    if type.kind in ("json", "list"):
        return _json(data)
    if type.kind == "detections":
        return detections_of(_json(data))
    try:
        return data.decode()
    except UnicodeDecodeError:
        if type.kind == "any":
            return data
        raise InvalidResponse("the answer has text that is not UTF-8") from None


def _json(data: bytes) -> Any:
    try:
        return parse(data, VALUES)
    except NotJson as error:
        raise InvalidResponse(f"the answer has a json value that is none: {error.at('')}") from None


def detections_of(found: Any) -> Detections:
    """Decode detections from a list of {"name", "score", "box"}."""
    try:
        names = tuple(dict.fromkeys(str(one["name"]) for one in found))
        boxes = np.array([one["box"] for one in found], np.float32).reshape(len(found), 4)
        scores = np.array([one["score"] for one in found], np.float32).reshape(len(found))
        classes = np.array([names.index(str(one["name"])) for one in found], np.int32)
    except (TypeError, KeyError, ValueError, IndexError):
        raise InvalidResponse("the answer has detections that are none") from None
    return Detections(boxes, scores, classes, names)


def _numbers(tensor: Tensor) -> np.ndarray:
    dtype = DTYPES.get(tensor.datatype)
    if dtype is None:
        raise InvalidResponse(
            f"output {tensor.name} has datatype {tensor.datatype:.20}, which this client does not know"
        )
    held = NUMPY[tensor.datatype]
    if tensor.values is not None:
        flat = np.array(tensor.values, held)
    else:
        raw = tensor.raw if tensor.raw is not None else b""
        if len(raw) % held.itemsize:
            raise InvalidResponse(f"output {tensor.name} has {len(raw)} bytes, its datatype is {tensor.datatype}")
        flat = np.frombuffer(raw, held).copy()  # a copy: aligned, and without a reference to the message
    if _size_bytes(tensor, dtype) != flat.nbytes:
        raise InvalidResponse(f"output {tensor.name} has {flat.size} elements, its shape is {list(tensor.shape)}")
    return flat.reshape(tensor.shape)


def _size_bytes(tensor: Tensor, dtype: str) -> int:
    try:
        return byte_size(dtype, tensor.shape)
    except InputError as error:
        raise InvalidResponse(f"output {tensor.name}: {error}") from None


def _elements(tensor: Tensor) -> list[bytes]:
    count = _size_bytes(tensor, "uint8")
    if tensor.values is not None:
        elements = [one if isinstance(one, bytes) else str(one).encode() for one in tensor.values]
        if len(elements) != count:
            raise InvalidResponse(
                f"output {tensor.name} has {len(elements)} elements, its shape is {list(tensor.shape)}"
            )
        return elements
    try:
        return [bytes(one) for one in decode_elements(tensor.raw or b"", count)]
    except InputError as error:
        raise InvalidResponse(f"output {tensor.name}: {error}") from None


class StreamDecoder:
    """Decodes the responses of one stream."""

    def __init__(self, model: DescribedModel) -> None:
        self._model = model
        self._grown: dict[str, list[Any]] = {}
        self.version = ""

    def feed(self, data: bytes) -> Iterator[StreamedOutput]:
        """Yield the outputs of one response; Refused or InvalidResponse for an error."""
        try:
            error_text, response = parse_stream_response(data)
        except InputError as error:  # in a client, the server's error
            raise InvalidResponse(f"the answer cannot be read: {error}") from None
        parameters = response.parameters
        if error_text:
            pushback = parameters.get(RETRY_MS)
            status = parameters.get(STATUS) or ("RESOURCE_EXHAUSTED" if pushback else "UNKNOWN")
            raise Refused(Refusal(str(status), error_text, float(pushback) if type(pushback) is int else None))
        self.version = response.version
        for tensor in response.outputs:
            port = self._model.outputs.get(tensor.name)
            value, grows = value_of(tensor, port), self._grows(port)
            if grows:
                self._grown.setdefault(tensor.name, []).append(value)
            yield StreamedOutput(tensor.name, value, not grows)
        if parameters.get(FINAL):
            for name, parts in self._grown.items():
                if all(isinstance(one, str) for one in parts):
                    yield StreamedOutput(name, "".join(parts), True, True)

    def _grows(self, port: DescribedPort | None) -> bool:
        """Return True if responses carry parts of this output; without that metadata, text outputs do."""
        if port is None or not self._model.streams:
            return False
        return port.pieces or (not self._model.reports_streaming and (port.type is None or port.type.kind == "text"))
