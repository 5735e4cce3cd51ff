"""Protobuf encoding of v2 messages, without message objects and with tensors as views.

    request bytes --split_message--> raw contents: views of the bytes                     -> Tensor.raw
                           `-------> the id
                           `-------> the head, small: names, shapes, parameters, typed contents

Requests of one client usually differ in the id and the raw contents alone, so what follows from the head can be kept
(`plan.py`). A response is its head and, for each raw output, its key, its length and its bytes; one join copies all of
them once. `protobuf_wire.py` has the wire format; equal to google.protobuf's, it merges what occurs twice.

Typed contents, tensor elements in protobuf lists, are converted to raw bytes:

    bool_contents    BOOL                      uint_contents    UINT8 UINT16 UINT32
    int_contents     INT8 INT16 INT32          uint64_contents  UINT64
    int64_contents   INT64                     fp32_contents    FP32
    bytes_contents   BYTES                     fp64_contents    FP64

FP16 and BF16 have none. A tensor uses the list of its datatype and leaves the others empty.

Bytes that are not a valid message are an InputError; the meaning of a message is checked in `request.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.v2 import protobuf_wire as wire
from weftline.engine.serving.v2.datatypes import BYTES, DTYPES
from weftline.engine.serving.v2.messages import (
    InferRequest,
    InferResponse,
    Parameter,
    Region,
    Tensor,
    WantedOutput,
    check_name,
    check_version,
    parameters_of,
    region_of,
)
from weftline.engine.serving.v2.protobuf_wire import I32, I64, LEN, VARINT, FieldReader
from weftline.errors import InputError
from weftline.nodes.exact_numbers import converted, inexact

RAW_INPUTS, RAW_OUTPUTS = 7, 6
"""Field numbers of raw_input_contents and raw_output_contents; a response has no list of wanted outputs."""

ELEMENTS_MAX = 1 << 31
"""Most typed elements of a response's tensor; its size is bounded by the client's message limit."""

FIELDS_MAX = 4096
"""Most top-level fields of a message: far above any request, and a bound for the time in `split_message`."""

HEAD_FIELDS_MAX = 64 * FIELDS_MAX
"""Most fields of a head, nested ones included, besides typed elements: a bound for the time to read it."""

CONTENTS: dict[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip
"""List of typed contents of each datatype."""

LISTS: dict[int, str] = {
    1: "bool_contents", 2: "int_contents", 3: "int64_contents", 4: "uint_contents", 5: "uint64_contents",
    6: "fp32_contents", 7: "fp64_contents", 8: "bytes_contents",
}  # fmt: skip
"""Lists of typed contents by field number."""

_BYTES_LIST = 8
_FLOATS: dict[int, tuple[int, np.dtype]] = {6: (I32, np.dtype(np.float32)), 7: (I64, np.dtype(np.float64))}

# Keys of fields, number << 3 | wire type.
_MODEL, _VERSION, _ID, _PARAMETERS, _TENSORS, _OUTPUTS = (number << 3 | LEN for number in range(1, 7))
_NAME, _DATATYPE, _SHAPE, _SHAPE_ONE, _CONTENTS = (
    1 << 3 | LEN,
    2 << 3 | LEN,
    3 << 3 | LEN,
    3 << 3 | VARINT,
    5 << 3 | LEN,
)
_ENTRY_KEY, _ENTRY_VALUE = 1 << 3 | LEN, 2 << 3 | LEN
_BOOL, _INT64, _STRING, _DOUBLE, _UINT64 = 1 << 3 | VARINT, 2 << 3 | VARINT, 3 << 3 | LEN, 4 << 3 | I64, 5 << 3 | VARINT
_ERROR, _STREAM_RESPONSE = 1 << 3 | LEN, 2 << 3 | LEN

DEFAULT_LIMITS = ServeLimits()

Raw = bytes | memoryview


# requests and responses


def parse_request(data: bytes, limits: ServeLimits = DEFAULT_LIMITS) -> InferRequest:
    """Parse a ModelInferRequest; InputError if it is invalid, or its model name is.

    Raw contents are views of `data`, which they keep alive.
    """
    head, _, id, raws = split_message(data, RAW_INPUTS)
    return parse_request_head(head, id, raws, limits)


def parse_request_head(
    head: Raw, id: str, raws: list[memoryview], limits: ServeLimits = DEFAULT_LIMITS
) -> InferRequest:
    """Parse a ModelInferRequest that was split."""
    message = read_head(head, "a ModelInferRequest", RAW_INPUTS, limits.elements_max)
    for what, count in (("inputs", len(message.tensors)), ("outputs", len(message.outputs))):
        if count > limits.tensors_max:
            raise InputError(f"found {count} {what}, expected at most {limits.tensors_max}")
    inputs = _to_tensors(message.tensors, raws, "input")
    outputs = [
        WantedOutput(name, region_of(parameters, "an output") if parameters else None, parameters)
        for name, values in message.outputs
        for parameters in (_set_values(values),)
    ]
    model, version = check_name(message.model), check_version(message.version)
    return InferRequest(model, inputs, tuple(outputs), version, id, _set_values(message.parameters))


def request_bytes(request: InferRequest) -> bytes:
    """Encode a request as a ModelInferRequest; every tensor has `raw`, or a region."""
    outputs = [
        wire.field(6, wire.text_field(1, one.name) + _parameter_fields(2, _with_region(one.parameters, one.region)))
        for one in request.outputs
    ]
    raws = [one.raw for one in request.inputs if one.region is None]
    return b"".join(
        [
            wire.text_field(1, request.model),
            wire.text_field(2, request.version),
            wire.text_field(3, request.id),
            _parameter_fields(4, request.parameters),
            *map(_tensor_field, request.inputs),
            *outputs,
            *_raw_parts(RAW_INPUTS, raws),
        ]
    )


def parse_response(data: bytes | memoryview) -> InferResponse:
    """Parse a ModelInferResponse, for clients; InputError if it is invalid."""
    head, _, id, raws = split_message(data, RAW_OUTPUTS)
    message = read_head(head, "a ModelInferResponse", RAW_OUTPUTS, ELEMENTS_MAX)
    regions = [region_of(_set_values(one.parameters), "an output") for one in message.tensors]
    if len(raws) == len(regions):  # servers may send empty contents for an output in a region, or none
        raws = [raw for raw, region in zip(raws, regions, strict=True) if region is None]
    tensors = _to_tensors(message.tensors, raws, "output")
    return InferResponse(message.model, message.version, id, tensors, _set_values(message.parameters))


def parse_stream_response(data: bytes) -> tuple[str, InferResponse]:
    """Parse a ModelStreamInferResponse: its error message, '' without one, and its response."""
    reader, error, responses = FieldReader(data, FIELDS_MAX), "", []
    try:
        for key, _, start, stop in reader.fields(0, len(data)):
            if key == _ERROR:
                error = reader.text(start, stop)
            elif key == _STREAM_RESPONSE:
                responses.append(memoryview(data)[start:stop])
    except InputError as problem:
        raise InputError(f"found bytes that are not a ModelStreamInferResponse: {problem}") from None
    return error, parse_response(responses[0] if len(responses) == 1 else b"".join(responses))


def response_bytes(response: InferResponse) -> bytes:
    """Encode a response as a ModelInferResponse; the only copy of its tensors."""
    return b"".join(response_parts(response))


def stream_response_bytes(response: InferResponse, error: str = "") -> bytes:
    """Encode a response and an error message as a ModelStreamInferResponse."""
    parts = response_parts(response)
    return b"".join([wire.text_field(1, error), wire.field_prefix(2, sum(map(len, parts))), *parts])


def response_parts(response: InferResponse) -> list[bytes | memoryview]:
    """Return the parts of an encoded ModelInferResponse; those of tensors are their own memory."""
    parts: list[bytes | memoryview] = [
        _model_fields(response.model, response.version),
        wire.text_field(3, response.id) + _parameter_fields(4, response.parameters),
    ]
    parts += map(_tensor_field, response.outputs)
    # Clients find raw contents by the output's position, so an output in a region has empty ones.
    for one in response.outputs:
        raw = one.raw if one.raw is not None else b""
        parts.append(_raw_prefix(RAW_OUTPUTS, len(raw)))
        if len(raw):
            parts.append(raw)
    return parts


# reading


def split_message(data: Raw, raw_number: int) -> tuple[Raw, str, str, list[memoryview]]:
    """Return a request's or response's head, model name, id and raw contents, which are views of `data`.

    The head is the message without id and raw contents. Only the wire format of the top level is checked.
    """
    reader, end, raw_key = FieldReader(data, FIELDS_MAX), len(data), raw_number << 3 | LEN
    view = memoryview(data)
    kept: list[memoryview] = []
    raws: list[memoryview] = []
    model = id = ""
    kept_from = 0
    try:
        for key, begin, start, stop in reader.fields(0, end):
            if key == raw_key:
                raws.append(view[start:stop])
            elif key == _ID:
                id = reader.text(start, stop)
            else:
                if key == _MODEL:
                    model = reader.text(start, stop)
                continue
            if kept_from < begin:
                kept.append(view[kept_from:begin])
            kept_from = stop
    except InputError as error:
        what = "a ModelInferRequest" if raw_number == RAW_INPUTS else "a ModelInferResponse"
        raise InputError(f"found bytes that are not {what}: {error}") from None
    if not kept_from:
        return data, model, id, raws
    if kept_from < end:
        kept.append(view[kept_from:])
    return b"".join(kept), model, id, raws


KNOWN_MAX, KNOWN_BYTES_MAX = 256, 1024
"""Most requests that are kept, one of each size, and the most bytes of each."""


class RequestSplitter:
    """`split_message` of requests, most of which differ from an earlier one in the contents of one tensor alone.

    Such a request has as many bytes as the earlier one, and the same ones up to the contents, which are at its end: so
    its fields are the same, too.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, bytes, str]] = {}  # by size: the bytes before the contents, head and model

    def split(self, data: Raw) -> tuple[Raw, str, str, list[memoryview]]:
        """Return a request's head, model name, id and raw contents, which are views of `data`."""
        known = self._known.get(len(data))
        if known is not None:
            before, head, model = known
            if data[: len(before)] == before:
                return head, model, "", [memoryview(data)[len(before) :]]
        split = split_message(data, RAW_INPUTS)
        if not split[2] and len(split[3]) == 1:
            self._keep(data, bytes(split[0]), split[1], len(split[3][0]))
        return split

    def _keep(self, data: Raw, head: bytes, model: str, contents_bytes: int) -> None:
        """Keep a request without an id whose contents are at its end."""
        before = head + _raw_prefix(RAW_INPUTS, contents_bytes)
        if len(before) + contents_bytes != len(data) or data[: len(before)] != before:
            return
        if len(before) <= KNOWN_BYTES_MAX:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[len(data)] = before, head, model


@dataclass(slots=True)
class TensorHead:
    """A tensor's fields as received. contents: elements of typed contents by list, in its numpy type, or bytes."""

    name: str = ""
    datatype: str = ""
    shape: list[int] = field(default_factory=list)
    parameters: dict[str, Parameter | None] = field(default_factory=dict)
    contents: dict[str, np.ndarray | list[bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class MessageHead:
    """The fields of a head as received. A parameter without a value is None."""

    model: str = ""
    version: str = ""
    parameters: dict[str, Parameter | None] = field(default_factory=dict)
    tensors: list[TensorHead] = field(default_factory=list)
    outputs: list[tuple[str, dict[str, Parameter | None]]] = field(default_factory=list)


def read_head(data: Raw, what: str, raw_number: int, elements_max: int) -> MessageHead:
    """Read the head of a request or response; InputError for invalid bytes and too many typed elements.

    elements_max: most typed elements of all tensors.
    """
    reader, head = FieldReader(data, HEAD_FIELDS_MAX + elements_max), MessageHead()
    left = elements_max
    try:
        for key, _, start, stop in reader.fields(0, len(data)):
            if key == _MODEL:
                head.model = reader.text(start, stop)
            elif key == _VERSION:
                head.version = reader.text(start, stop)
            elif key == _PARAMETERS:
                _read_entry(reader, start, stop, 1, head.parameters)
            elif key == _TENSORS:
                tensor = _read_tensor(reader, start, stop, left)
                left -= sum(map(len, tensor.contents.values()))
                head.tensors.append(tensor)
            elif key == _OUTPUTS and raw_number != RAW_OUTPUTS:
                head.outputs.append(_read_output(reader, start, stop))
    except InputError as error:
        raise InputError(f"found bytes that are not {what}: {error}") from None
    return head


def _read_output(reader: FieldReader, at: int, end: int) -> tuple[str, dict[str, Parameter | None]]:
    name, parameters = "", dict[str, Parameter | None]()
    for key, _, start, stop in reader.fields(at, end, 1):
        if key == _NAME:
            name = reader.text(start, stop)
        elif key == 2 << 3 | LEN:
            _read_entry(reader, start, stop, 2, parameters)
    return name, parameters


def _read_tensor(reader: FieldReader, at: int, end: int, elements_max: int) -> TensorHead:
    tensor = TensorHead()
    lists: dict[int, bytearray | list[bytes]] = {}
    left = elements_max
    for key, _, start, stop in reader.fields(at, end, 1):
        if key == _NAME:
            tensor.name = reader.text(start, stop)
        elif key == _DATATYPE:
            tensor.datatype = reader.text(start, stop)
        elif key == _SHAPE_ONE:
            tensor.shape.append(wire.signed(start))
        elif key == _SHAPE:
            while start < stop:
                dim, start = wire.varint(reader.data, start, stop)
                tensor.shape.append(wire.signed(dim))
                reader.left -= 1
                if reader.left < 0:
                    raise InputError("found a message of too many fields")
        elif key == _PARAMETERS:
            _read_entry(reader, start, stop, 2, tensor.parameters)
        elif key == _CONTENTS:
            left -= _read_contents(reader, start, stop, lists, left, elements_max)
    tensor.contents = {LISTS[number]: _elements(number, found) for number, found in sorted(lists.items()) if found}
    return tensor


def _read_entry(reader: FieldReader, at: int, end: int, depth: int, parameters: dict[str, Parameter | None]) -> None:
    """Read an entry of a `parameters` map; the last one of a key counts.

    upb drops an entry with an unknown field, other than one in its value.
    """
    name, value, known = "", None, True
    after = at
    for key, begin, start, stop in reader.fields(at, end, depth):
        if key == _ENTRY_KEY:
            name = reader.text(start, stop)
        elif key == _ENTRY_VALUE:
            value = _read_value(reader, start, stop, depth + 1, value)
        else:
            known = False
        known &= begin == after  # else a group was skipped
        after = stop
    if known and after == end:
        parameters[name] = value


def _read_value(reader: FieldReader, at: int, end: int, depth: int, value: Parameter | None) -> Parameter | None:
    """Return the value of an InferParameter, of which the last one set counts; `value` is that of an earlier part."""
    for key, _, start, stop in reader.fields(at, end, depth):
        if key == _BOOL:
            value = start != 0
        elif key == _INT64:
            value = wire.signed(start)
        elif key == _STRING:
            value = reader.text(start, stop)
        elif key == _DOUBLE:
            value = wire.double_at(reader.data, start)
        elif key == _UINT64:
            value = start
    return value


def _read_contents(
    reader: FieldReader, at: int, end: int, lists: dict[int, bytearray | list[bytes]], left: int, elements_max: int
) -> int:
    """Append the elements of InferTensorContents to `lists`: varints as uint64, floats as they are; return how many.

    Elements are counted before memory is allocated for them.
    """
    count = 0
    for key, _, start, stop in reader.fields(at, end, 2):
        number, kind = key >> 3, key & 7
        part = reader.data[start:stop] if kind != VARINT else b""
        if number == _BYTES_LIST and kind == LEN:
            new = 1
        elif number in _FLOATS and kind in (LEN, _FLOATS[number][0]):
            new, cut = divmod(len(part), _FLOATS[number][1].itemsize)
            if cut:
                raise InputError("found a list that ends in the middle of a number")
        elif 1 <= number <= 5 and kind in (VARINT, LEN):
            new = 1 if kind == VARINT else wire.varint_count(part)
        else:
            continue
        count += new
        if count > left:
            raise InputError(
                f"found more than {elements_max} typed elements, expected at most {elements_max}; send raw contents"
            )
        if number == _BYTES_LIST:
            lists.setdefault(number, []).append(bytes(part))  # type: ignore[arg-type]
            continue
        found = lists.setdefault(number, bytearray())
        if number in _FLOATS:
            found += part  # type: ignore[operator]
        elif kind == VARINT:
            found += start.to_bytes(8, "little")  # type: ignore[operator]
        else:
            found += wire.packed_varints(part).tobytes()  # type: ignore[operator]
    return count


def _elements(number: int, found: bytearray | list[bytes]) -> np.ndarray | list[bytes]:
    """Return the elements of a list of typed contents in its type; 32-bit ones drop the bits beyond, as protobuf."""
    if isinstance(found, list):
        return found
    if number in _FLOATS:
        return np.frombuffer(found, _FLOATS[number][1])
    wide: np.ndarray = np.frombuffer(found, np.uint64)
    match number:
        case 1:
            return wide.astype(np.bool_)
        case 2:
            return wide.astype(np.uint32).view(np.int32)
        case 3:
            return wide.view(np.int64)
        case 4:
            return wide.astype(np.uint32)
        case _:
            return wide


# tensors


def _to_tensors(heads: list[TensorHead], raws: list[memoryview], what: str) -> tuple[Tensor, ...]:
    """Return a message's tensors, each with its raw contents, typed contents or region."""
    tensors, place = [], 0
    for one in heads:
        parameters = _set_values(one.parameters)
        region = region_of(parameters, what) if parameters else None
        raw: bytes | memoryview | None = None
        if raws and region is None and place < len(raws):
            raw = raws[place]
            place += 1
        elif raws and region is None:
            raise InputError(f"found {len(raws)} raw contents, expected one for each {what} outside shared memory")
        shape = tuple(one.shape)
        if not one.contents:
            raw = b"" if raw is None and region is None else raw  # a tensor without elements has neither
            tensors.append(Tensor(one.name, one.datatype, shape, raw, None, region, parameters))
        elif raw is not None or region is not None:
            raise InputError(f"{what} {one.name!r:.80}: found typed contents, expected raw contents or a region alone")
        else:
            tensors.append(_typed_tensor(one, shape, parameters))
    if place != len(raws):
        raise InputError(f"found {len(raws)} raw contents for {place} tensors, expected one for each {what}")
    return tuple(tensors)


def _typed_tensor(head: TensorHead, shape: tuple[int, ...], parameters: Mapping[str, Parameter]) -> Tensor:
    """Return a tensor with typed contents: numbers as raw bytes, BYTES as `values`.

    InputError if they are in a list of another datatype, or out of range.
    """
    name, datatype = head.name, head.datatype
    what = f"input {name!r:.80}"
    expected = CONTENTS.get(datatype)
    if expected is None:
        raise InputError(f"{what}: typed contents of {datatype!r:.40}, which has none; send raw contents")
    if list(head.contents) != [expected]:
        raise InputError(f"{what}: found {', '.join(head.contents)}, expected {expected} for {datatype}")
    elements = head.contents[expected]
    if isinstance(elements, list):
        return Tensor(name, datatype, shape, None, tuple(elements), None, parameters)
    array, wrong = converted(elements, DTYPES[datatype])
    if wrong is not None:
        raise InputError(f"{what}: found {inexact(datatype)}")
    return Tensor(name, datatype, shape, array.view(np.uint8).data, None, None, parameters)


def _set_values(parameters: Mapping[str, Parameter | None]) -> dict[str, Parameter]:
    """Return the parameters that have a value."""
    return {key: value for key, value in parameters.items() if value is not None} if parameters else {}


# writing


def _tensor_field(tensor: Tensor) -> bytes:
    if tensor.parameters or tensor.region is not None:
        parameters = _with_region(tensor.parameters, tensor.region)
        fields = _tensor_fields(tensor.name, tensor.datatype, tensor.shape) + _parameter_fields(4, parameters)
        return wire.field(5, fields)
    return _plain_tensor_field(tensor.name, tensor.datatype, tensor.shape)


@lru_cache(maxsize=1024)
def _plain_tensor_field(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    return wire.field(5, _tensor_fields(name, datatype, shape))


def _tensor_fields(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    dims = b"".join([wire.encode_varint(int(dim) & wire.MASK) for dim in shape])
    packed = wire.field(3, dims) if dims else b""
    return wire.text_field(1, name) + wire.text_field(2, datatype) + packed


@lru_cache(maxsize=256)
def _model_fields(model: str, version: str) -> bytes:
    return wire.text_field(1, model) + wire.text_field(2, version)


_raw_prefix = lru_cache(maxsize=1024)(wire.field_prefix)


def _raw_parts(number: int, raws: Iterable[Raw | None]) -> list[Raw]:
    return [part for raw in raws if raw is not None for part in (wire.field_prefix(number, len(raw)), raw)]


def _with_region(parameters: Mapping[str, Parameter], region: Region | None) -> Mapping[str, Parameter]:
    return parameters if region is None else {**parameters, **parameters_of(region)}


def _parameter_fields(number: int, parameters: Mapping[str, Parameter]) -> bytes:
    """Encode a `parameters` map, in upb's deterministic order: by the keys' bytes, a prefix after what it begins."""
    if not parameters:
        return b""
    return b"".join(
        [
            wire.field(number, wire.field(1, key.encode()) + wire.field(2, _value_field(key, parameters[key])))
            for key in sorted(parameters, key=lambda key: [*key.encode(), 256])
        ]
    )


def _value_field(key: str, value: Parameter) -> bytes:
    if isinstance(value, bool):
        return wire.varint_field(1, value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InputError(f"parameter {key!r:.80}: found an integer beyond 64 bits")
        return wire.varint_field(2 if value < 1 << 63 else 5, value)
    if isinstance(value, str):
        return wire.field(3, value.encode())
    return wire.double_field(4, value)
