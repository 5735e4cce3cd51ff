"""Protobuf encoding of v2 messages, with large tensors as views.

    request bytes --split--> field 7, raw contents: views of the bytes      -> Tensor.raw
                    `------> the rest, small: parsed by upb                 -> names, shapes, parameters, typed contents

    response: the small part by upb, then each raw output after its key and length; one join copies all of them once

Typed contents, tensor elements in protobuf lists, are converted to raw bytes:

    bool_contents    BOOL                      uint_contents    UINT8 UINT16 UINT32
    int_contents     INT8 INT16 INT32          uint64_contents  UINT64
    int64_contents   INT64                     fp32_contents    FP32
    bytes_contents   BYTES                     fp64_contents    FP64

FP16 and BF16 have none. A tensor uses the list of its datatype and leaves the others empty.

The message classes are tritonclient's. Bytes that are not a valid message are an InputError; the meaning of a message
is checked in `request.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.v2.datatypes import BYTES, NUMPY, SIZES
from weftline.engine.serving.v2.messages import (
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    WantedOutput,
    check_name,
    check_version,
    parameters_of,
    region_of,
)
from weftline.errors import InputError

# Made at run time, unknown to type checkers.
_Request: Any = service_pb2.ModelInferRequest
_Response: Any = service_pb2.ModelInferResponse
_StreamResponse: Any = service_pb2.ModelStreamInferResponse

RAW_INPUTS, RAW_OUTPUTS, STREAM_RESPONSE = 7, 6, 2
"""Field numbers: raw_input_contents, raw_output_contents, and infer_response in a stream's response."""

SPLIT_BYTES_MIN = 16 << 10
"""Message size from which raw contents are split off: upb's copy of them then costs more than `split_field`."""

ELEMENTS_MAX = 1 << 31
"""Most typed elements of a response's tensor; its size is bounded by the client's message limit."""

FIELDS_MAX = 4096
"""Most top-level fields of a message: far above any request, and a bound for the time in `split_field`."""

VARINT, I64, LEN, I32 = 0, 1, 2, 5
"""Protobuf wire types; 3 and 4 are groups, which no v2 message has."""

_FIXED = {I64: 8, I32: 4}

CONTENTS: dict[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip
"""List of typed contents of each datatype."""

_WIDE: dict[str, np.dtype] = {"int_contents": np.dtype(np.int32), "uint_contents": np.dtype(np.uint32)}

DEFAULT_LIMITS = ServeLimits()


# requests and responses


def parse_request(data: bytes, limits: ServeLimits = DEFAULT_LIMITS) -> InferRequest:
    """Parse a ModelInferRequest; InputError if it is invalid, or its model name is.

    Raw contents are views of `data`, which they keep alive; those of small messages are copies.
    """
    message, raws = _parse(_Request, data, RAW_INPUTS, "raw_input_contents", "a ModelInferRequest")
    for what, count in (("inputs", len(message.inputs)), ("outputs", len(message.outputs))):
        if count > limits.tensors_max:
            raise InputError(f"found {count} {what}, expected at most {limits.tensors_max}")
    inputs = _parse_tensors(message.inputs, raws, limits.elements_max, "input")
    outputs = [
        WantedOutput(one.name, region_of(parameters, "an output") if parameters else None, parameters)
        for one in message.outputs
        for parameters in (_parse_parameters(one.parameters),)
    ]
    model, version = check_name(message.model_name), check_version(message.model_version)
    return InferRequest(model, inputs, tuple(outputs), version, message.id, _parse_parameters(message.parameters))


def request_bytes(request: InferRequest) -> bytes:
    """Encode a request as a ModelInferRequest; every tensor has `raw`, or a region."""
    message = _Request(model_name=request.model, model_version=request.version, id=request.id)
    _set_parameters(message.parameters, request.parameters)
    _add_tensors(message.inputs, request.inputs)
    for wanted in request.outputs:
        one = message.outputs.add(name=wanted.name)
        _set_parameters(one.parameters, wanted.parameters)
        if wanted.region is not None:
            _set_parameters(one.parameters, parameters_of(wanted.region))
    raws = [one.raw for one in request.inputs if one.region is None]
    return b"".join([message.SerializeToString(), *_raw_parts(RAW_INPUTS, raws)])


def parse_response(data: bytes | memoryview) -> InferResponse:
    """Parse a ModelInferResponse, for clients; InputError if it is invalid."""
    message, raws = _parse(_Response, data, RAW_OUTPUTS, "raw_output_contents", "a ModelInferResponse")
    outputs = [_parse_parameters(one.parameters) for one in message.outputs]
    regions = [region_of(parameters, "an output") for parameters in outputs]
    if len(raws) == len(regions):  # servers may send empty contents for an output in a region, or none
        raws = [raw for raw, region in zip(raws, regions, strict=True) if region is None]
    tensors = _parse_tensors(message.outputs, raws, ELEMENTS_MAX, "output")
    parameters = _parse_parameters(message.parameters)
    return InferResponse(message.model_name, message.model_version, message.id, tensors, parameters)


def parse_stream_response(data: bytes) -> tuple[str, InferResponse]:
    """Parse a ModelStreamInferResponse: its error message, '' without one, and its response."""
    rest, responses = split_field(data, STREAM_RESPONSE)
    try:
        error = str(_StreamResponse.FromString(rest).error_message)
    except DecodeError:
        raise InputError("found bytes that are no ModelStreamInferResponse") from None
    return error, parse_response(responses[-1] if responses else b"")


def response_bytes(response: InferResponse) -> bytes:
    """Encode a response as a ModelInferResponse; the only copy of its tensors."""
    return b"".join(_response_parts(response))


def stream_response_bytes(response: InferResponse, error: str = "") -> bytes:
    """Encode a response and an error message as a ModelStreamInferResponse."""
    parts = _response_parts(response)
    head = _StreamResponse(error_message=error).SerializeToString() if error else b""
    return b"".join([head, field_prefix(STREAM_RESPONSE, sum(map(len, parts))), *parts])


def _parse(
    kind: Any, data: bytes | memoryview, number: int, field: str, what: str
) -> tuple[Any, list[bytes | memoryview]]:
    """Return a message and its raw contents."""
    try:
        if len(data) < SPLIT_BYTES_MIN:
            message = kind.FromString(bytes(data))
            return message, list(getattr(message, field))
        rest, raws = split_field(data, number)
        return kind.FromString(rest), list(raws)
    except (DecodeError, InputError) as error:
        why = f": {error}" if isinstance(error, InputError) else ""
        raise InputError(f"found bytes that are not {what}{why}") from None


def _response_parts(response: InferResponse) -> list[bytes | memoryview]:
    message = _Response(model_name=response.model, model_version=response.version, id=response.id)
    if response.parameters:
        _set_parameters(message.parameters, response.parameters)
    _add_tensors(message.outputs, response.outputs)
    # Clients find raw contents by the output's position, so an output in a region has empty ones.
    raws = [one.raw if one.raw is not None else b"" for one in response.outputs]
    return [message.SerializeToString(), *_raw_parts(RAW_OUTPUTS, raws)]


# tensors and parameters


def _parse_tensors(messages: Any, raws: list[bytes | memoryview], elements_max: int, what: str) -> tuple[Tensor, ...]:
    """Return a message's tensors, each with its raw contents, typed contents or region."""
    tensors, place = [], 0
    left = elements_max  # of typed contents, over all tensors: each element becomes an object
    for one in messages:
        parameters = _parse_parameters(one.parameters)
        region = region_of(parameters, what) if parameters else None
        raw: bytes | memoryview | None = None
        if raws and region is None and place < len(raws):
            raw = raws[place]
            place += 1
        elif raws and region is None:
            raise InputError(f"found {len(raws)} raw contents, expected one for each {what} outside shared memory")
        shape = tuple(one.shape)
        if not (one.HasField("contents") and one.contents.ListFields()):
            raw = b"" if raw is None and region is None else raw  # a tensor without elements has neither
            tensors.append(Tensor(one.name, one.datatype, shape, raw, None, region, parameters))
        elif raw is not None or region is not None:
            raise InputError(f"{what} {one.name!r:.80}: found typed contents, expected raw contents or a region alone")
        else:
            tensor = _typed_tensor(one, shape, parameters, left)
            left -= len(tensor.values or ()) or len(tensor.raw or b"") // SIZES.get(tensor.datatype, 1)
            tensors.append(tensor)
    if place != len(raws):
        raise InputError(f"found {len(raws)} raw contents for {place} tensors, expected one for each {what}")
    return tuple(tensors)


def _typed_tensor(message: Any, shape: tuple[int, ...], parameters: Mapping[str, Parameter], count_max: int) -> Tensor:
    """Return a tensor with typed contents: numbers as raw bytes, BYTES as `values`.

    InputError if they are in a list of another datatype, too many, or out of range.
    """
    name, datatype, contents = message.name, message.datatype, message.contents
    what = f"input {name!r:.80}"
    expected = CONTENTS.get(datatype)
    filled = [field.name for field, _ in contents.ListFields()]
    if expected is None:
        raise InputError(f"{what}: typed contents of {datatype!r:.40}, which has none; send raw contents")
    if filled != [expected]:
        raise InputError(f"{what}: found {', '.join(filled)}, expected {expected} for {datatype}")
    elements = getattr(contents, expected)
    if len(elements) > count_max:
        raise InputError(
            f"{what}: found {len(elements)} typed elements, expected at most {count_max}; send raw contents"
        )
    if datatype == BYTES:
        return Tensor(name, datatype, shape, None, tuple(elements), None, parameters)
    dtype = NUMPY[datatype]
    wide = np.fromiter(elements, _WIDE.get(expected, dtype), len(elements))
    array = wide.astype(dtype, copy=False)
    if array.dtype != wide.dtype and not np.array_equal(array, wide):
        raise InputError(f"{what}: found elements beyond the range of {datatype}")
    return Tensor(name, datatype, shape, array.view(np.uint8).data, None, None, parameters)


def _add_tensors(field: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        one = field.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.parameters:
            _set_parameters(one.parameters, tensor.parameters)
        if tensor.region is not None:
            _set_parameters(one.parameters, parameters_of(tensor.region))


def _parse_parameters(parameters: Any) -> dict[str, Parameter]:
    """Return a `parameters` map as plain values, without those that have no value."""
    if not parameters:
        return {}
    return {
        key: getattr(value, choice)
        for key, value in parameters.items()
        if (choice := value.WhichOneof("parameter_choice"))
    }


def _set_parameters(parameters: Any, values: Mapping[str, Parameter]) -> None:
    for key, value in values.items():
        one = parameters[key]
        if isinstance(value, bool):
            one.bool_param = value
        elif isinstance(value, int):
            setattr(one, "int64_param" if value < 1 << 63 else "uint64_param", value)
        elif isinstance(value, str):
            one.string_param = value
        else:
            one.double_param = value


# wire format (Protocol Buffers, "Encoding"): a message is a row of fields, each with a key and a value


def split_field(data: bytes | memoryview, number: int) -> tuple[bytes, list[memoryview]]:
    """Split off a length-delimited top-level field, as views of `data`.

    Returns the rest, which is a valid message, and the contents of the field. Reads every byte at most once. InputError
    for lengths past the end, varints over ten bytes, groups, unknown wire types, and more than FIELDS_MAX fields.
    """
    view, end = memoryview(data), len(data)
    wanted = number << 3 | LEN
    found: list[memoryview] = []
    rest: list[memoryview] = []
    at = kept = fields = 0
    while at < end:
        fields += 1
        if fields > FIELDS_MAX:
            raise InputError(f"found a message of more than {FIELDS_MAX} fields")
        begin = at
        key, at = _varint(data, at, end)
        wire = key & 7
        if not 0 < key >> 3 < 1 << 29:
            raise InputError("found a field number that protobuf does not have")
        if wire == LEN:
            size, at = _varint(data, at, end)
            if size > end - at:
                raise InputError("found a message that ends in the middle of a field")
            at += size
            if key == wanted:
                rest.append(view[kept:begin])
                found.append(view[at - size : at])
                kept = at
        elif wire == VARINT:
            _, at = _varint(data, at, end)
        elif wire in _FIXED:
            at += _FIXED[wire]
            if at > end:
                raise InputError("found a message that ends in the middle of a field")
        else:
            raise InputError(f"found a field of wire type {wire}, which no message here has")
    rest.append(view[kept:end])
    return b"".join(rest), found


def field_prefix(number: int, size: int) -> bytes:
    """Return the key and length that precede a length-delimited field of `size` bytes."""
    return _encode_varint(number << 3 | LEN) + _encode_varint(size)


def _raw_parts(number: int, raws: Iterable[bytes | memoryview | None]) -> list[bytes | memoryview]:
    return [part for raw in raws if raw is not None for part in (field_prefix(number, len(raw)), raw)]


def _varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at`, and the position after it."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
        shift += 7
        if shift == 70:
            break
    raise InputError("found a message that ends in the middle of a number, or a number over 64 bits")


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
