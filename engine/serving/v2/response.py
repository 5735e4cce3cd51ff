"""Conversion of backend responses to v2 responses: single, batched and streamed.

    text                      BYTES [1], UTF-8             tensor     its datatype and shape
    json, detections, any     BYTES [1], compact JSON      image      UINT8 [H, W, 3]
    bytes                     BYTES [1]                    audio      FP32 [samples]
    list[tensor, image, audio] of one shape                one dimension more in front
    list[text, bytes, json, detections, list, any]         BYTES [n], each element as above
    list of arrays of several shapes                       BYTES [1], compact JSON: nested lists
    absent                                                 shape [0], with the parameter {"absent": true}
    with parameter `classification`                        BYTES [k], see `classification.py`

The value of an `any` output decides: text and bytes are BYTES [1], arrays are tensors, everything else is JSON.

A large json value comes as Written, from `JsonParser.write`.

Nothing is copied here: `raw` of a dense tensor is a view of a borrowed array, so an Answer is released only after the
response has been encoded. Exceptions: batches of more than one are concatenated, and arrays that are not row-major are
copied. An output for a region is written there at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Answer
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.engine.serving.regions import Regions
from weftline.engine.serving.v2.classification import class_count, classes_tensor
from weftline.engine.serving.v2.datatypes import BYTES, Numbers, datatype_of, form_of, trailing_dims
from weftline.engine.serving.v2.elements import JSON, Written, encode_elements
from weftline.engine.serving.v2.messages import InferRequest, InferResponse, Parameter, Region, Tensor, WantedOutput
from weftline.errors import InputError
from weftline.nodes.detections import Detections
from weftline.nodes.json_value import json_text
from weftline.shm.view import dtype_name

ABSENT: dict[str, Parameter] = {"absent": True}
"""Parameter of an output without a value, as of a skipped step."""

JSON_ELEMENTS_MAX = 1 << 20
"""Most numbers of arrays of several shapes that are written as JSON."""


def to_response(
    request: InferRequest, info: ModelInfo, answers: Sequence[Answer], batch: int | None, regions: Regions | None = None
) -> InferResponse:
    """Convert the answers of a request; encode the result before any of them is released.

    answers: one for each of `ParsedRequest.asks`, in their order.
    batch:   `ParsedRequest.batch`.

    InputError if outputs of a batch differ in shape, or if one does not fit into its region.
    """
    wanted = request.outputs or [WantedOutput(port.name) for port in info.outputs]
    tensors = []
    for one in wanted:
        port = _port(info, one.name)
        items = [_wanted(one, port, answer.outputs.get(one.name), len(answers)) for answer in answers]
        tensor = items[0] if batch is None else _concatenated(port, items)
        tensors.append(tensor if one.region is None else _write_to_region(tensor, one.region, regions))
    return InferResponse(info.name, str(answers[0].version), request.id, tuple(tensors))


def to_chunk_response(
    request: InferRequest, info: ModelInfo, chunk: StreamedOutput, version: int, regions: Regions | None = None
) -> InferResponse:
    """Convert one chunk of a stream; only whole outputs are written to regions."""
    port = _port(info, chunk.output)
    wanted = next((one for one in request.outputs if one.name == chunk.output), WantedOutput(chunk.output))
    tensor = _wanted(wanted, port, chunk.value)
    if wanted.region is not None and chunk.last:
        tensor = _write_to_region(tensor, wanted.region, regions)
    return InferResponse(info.name, str(version), request.id, (tensor,))


def empty_response(request: InferRequest, info: ModelInfo, output: str) -> InferResponse:
    """Return the last response of a stream whose pieces are sent: '' for text, a tensor without elements for others."""
    port = _port(info, output)
    numbers = form_of(port.type).numbers if port.port_type.kind in ("tensor", "audio") else None
    empty = Tensor(output, BYTES, (1,), encode_elements((b"",)))
    if numbers is not None:
        empty = _no_elements(output, numbers)
    return InferResponse(info.name, str(info.version), request.id, (empty,))


def _port(info: ModelInfo, name: str) -> PortInfo:
    port = info.output(name)
    if port is None:
        raise InputError(f"no output is called {name!r:.80}")
    return port


def _wanted(wanted: WantedOutput, port: PortInfo, value: Any, items: int = 1) -> Tensor:
    """Convert one output of one of `items`, or its greatest classes where the request selects them."""
    count = class_count(wanted) if wanted.parameters else 0
    return _tensor(port, value) if count == 0 or value is None else classes_tensor(port, value, count, items)


def _tensor(port: PortInfo, value: Any) -> Tensor:
    """Convert one output of one item."""
    name, kind = port.name, port.type
    if value.__class__ is np.ndarray:
        return dense_tensor(name, value, kind)
    if value.__class__ is Written:
        return Tensor(name, BYTES, (value.count,), value.raw, parameters={JSON: True} if kind == "any" else {})
    if kind == "text" and isinstance(value, str):
        return Tensor(name, BYTES, (1,), encode_elements((value.encode(),)))
    if value is None and (port.optional or kind != "json"):
        numbers = form_of(kind).numbers if kind not in ("json", "any") else None
        return Tensor(name, (numbers and numbers.datatype) or BYTES, (0,), b"", parameters=ABSENT)
    if isinstance(value, list | tuple) and form_of(kind).listed:
        return _list(name, value, kind)
    is_json = kind == "any" and not isinstance(value, str | bytes | bytearray | memoryview)
    return Tensor(
        name, BYTES, (1,), encode_elements((_element(value, kind),)), parameters={JSON: True} if is_json else {}
    )


def dense_tensor(name: str, array: np.ndarray, type: str) -> Tensor:
    """Return an array as the tensor of a port type, as a view where it is row-major."""
    numbers = form_of(type).numbers
    dtype = (numbers and numbers.dtype) or dtype_name(array.dtype)
    if array.dtype == np.complex64:
        array = np.ascontiguousarray(array).view(np.float32).reshape(*array.shape, *trailing_dims("complex64"))
    try:
        raw = array.data.cast("B")
    except TypeError:  # not row-major, or empty
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return Tensor(name, datatype_of(dtype), array.shape, raw)


def _list(name: str, values: Sequence[Any], type: str) -> Tensor:
    """Convert a list to one tensor, with one dimension more in front."""
    form = form_of(type)
    if form.numbers is None:
        return Tensor(name, BYTES, (len(values),), encode_elements([_element(value, form.element) for value in values]))
    if not values:
        return _no_elements(name, form.numbers)
    if all(one.__class__ is np.ndarray for one in values) and len({(one.shape, one.dtype) for one in values}) == 1:
        if len(values) == 1:
            return dense_tensor(name, values[0][np.newaxis], type)
        return dense_tensor(name, np.stack(values), type)
    if sum(one.size for one in values if isinstance(one, np.ndarray)) > JSON_ELEMENTS_MAX:
        raise InputError(
            f"output {name}: a list of arrays of several shapes, too large for JSON\n    fix: select other outputs"
        )
    return Tensor(name, BYTES, (1,), encode_elements((json_element(values),)))


def _no_elements(name: str, numbers: Numbers) -> Tensor:
    """Return a tensor whose first dimension is 0."""
    rest = (dim if isinstance(dim, int) else 0 for dim in (numbers.dims or ())[1:])
    return Tensor(name, numbers.datatype or "FP32", (0, *rest), b"")


def _element(value: Any, kind: str) -> bytes:
    """Encode a value as one BYTES element: text and bytes unchanged, except for a json port."""
    if kind != "json":
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
    return json_element(value)


def json_element(value: Any) -> bytes:
    """Encode a value as compact JSON; numbers that JSON lacks are NaN, Infinity and -Infinity."""
    if isinstance(value, list | tuple):
        value = [one.to_json() if isinstance(one, Detections) else one for one in value]
    elif isinstance(value, Detections):
        value = value.to_json()
    try:
        return json_text(value, _plain)
    except (OverflowError, ValueError, RecursionError):  # such as integers beyond 64 bits
        return json.dumps(value, separators=(",", ":"), ensure_ascii=True, default=_plain).encode()


def nested(array: np.ndarray) -> Any:
    """Return the numbers of an array as nested lists; a complex number is [real, imaginary]."""
    if array.dtype.kind == "c":
        array = np.ascontiguousarray(array).view(np.float32).reshape(*array.shape, 2)
    return array.tolist()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"no json for a value of type {type(value).__name__}")


def _concatenated(port: PortInfo, tensors: list[Tensor]) -> Tensor:
    """Concatenate one output of all items of a batch, with the batch size in front."""
    first, count = tensors[0], len(tensors)
    if len({(one.datatype, one.shape, *one.parameters) for one in tensors}) > 1:
        raise InputError(
            f"output {port.name} differs in shape from item to item of the batch\n    fix: send the items one at a time"
        )
    if first.parameters == ABSENT:
        return first
    raw = first.raw if count == 1 else b"".join([one.raw for one in tensors if one.raw is not None])
    return Tensor(port.name, first.datatype, (count, *first.shape), raw, parameters=first.parameters)


def _write_to_region(tensor: Tensor, region: Region, regions: Regions | None) -> Tensor:
    """Write a tensor into its region, and return it without its bytes."""
    if regions is None:
        raise InputError(f"output {tensor.name}: found a shared-memory region, and this server shares no memory")
    data = tensor.raw if tensor.raw is not None else b""
    if len(data) > region.size_bytes:
        raise InputError(
            f"output {tensor.name} takes {len(data)} bytes, its place in the region has {region.size_bytes}"
        )
    if len(data):
        regions.write(region.name, region.offset, data)
    written = Region(region.name, region.offset, len(data))
    return Tensor(tensor.name, tensor.datatype, tensor.shape, None, None, written, tensor.parameters)
