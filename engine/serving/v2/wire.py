"""Protobuf encoding of v2 messages, with large tensors as views.

    request bytes --cut--> field 7, raw contents: views of the bytes       -> Tensor.raw
                    `----> the rest, small: upb parses it                  -> names, shapes, parameters, typed contents

    response: the small part by upb, then each raw output behind its key and length; one join copies them all once

The stubs are tritonclient's. Only doors and clients that speak gRPC import this module; what a message means is decided
elsewhere (`asking.py`). What cannot be read as a message is an InputError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.v2.datatypes import SIZES
from weftline.engine.serving.v2.fields import cut, prefix
from weftline.engine.serving.v2.names import check_name, check_version
from weftline.engine.serving.v2.nouns import InferRequest, InferResponse, Parameter, Tensor, WantedOutput
from weftline.engine.serving.v2.region_parameters import parameters_of, region_of
from weftline.engine.serving.v2.typed_contents import has_contents, tensor_of_contents
from weftline.errors import InputError

# Made at run time, so type checkers do not know them.
_Request: Any = service_pb2.ModelInferRequest
_Response: Any = service_pb2.ModelInferResponse
_StreamResponse: Any = service_pb2.ModelStreamInferResponse

RAW_INPUTS, RAW_OUTPUTS, STREAM_RESPONSE = 7, 6, 2
"""Field numbers: raw_input_contents, raw_output_contents, and infer_response in a stream's response."""

CUT_BYTES_MIN = 16 << 10
"""From this size on raw contents are cut out: parsing copies them, which costs more than the walk from here on."""

ELEMENTS_MAX = 1 << 31
"""Most typed elements of a response's tensor: a client asked for them, and its message limit has been met."""

USUAL = ServeLimits()


def parse_request(data: bytes, limits: ServeLimits = USUAL) -> InferRequest:
    """Return the request in a ModelInferRequest's bytes; InputError when they are none, or name no possible model.

    Raw contents are views of `data`, which they keep alive; of small messages they are bytes of their own.
    """
    message, raws = _parse(_Request, data, RAW_INPUTS, "raw_input_contents", "a ModelInferRequest")
    for what, count in (("inputs", len(message.inputs)), ("outputs", len(message.outputs))):
        if count > limits.tensors_max:
            raise InputError(f"found {count} {what}, expected at most {limits.tensors_max}")
    inputs = _tensors(message.inputs, raws, limits.elements_max, "input")
    outputs = [
        WantedOutput(one.name, region_of(told, "an output") if told else None, told)
        for one in message.outputs
        for told in (_told(one.parameters),)
    ]
    model, version = check_name(message.model_name), check_version(message.model_version)
    return InferRequest(model, inputs, tuple(outputs), version, message.id, _told(message.parameters))


def request_bytes(request: InferRequest) -> bytes:
    """Return a request as a ModelInferRequest; every tensor has `raw`, or a region."""
    message = _Request(model_name=request.model, model_version=request.version, id=request.id)
    _tell(message.parameters, request.parameters)
    _add(message.inputs, request.inputs)
    for wanted in request.outputs:
        one = message.outputs.add(name=wanted.name)
        _tell(one.parameters, wanted.parameters)
        if wanted.region is not None:
            _tell(one.parameters, parameters_of(wanted.region))
    raws = [one.raw for one in request.inputs if one.region is None]
    return b"".join([message.SerializeToString(), *_raw_parts(RAW_INPUTS, raws)])


def parse_response(data: bytes | memoryview) -> InferResponse:
    """Return the response in a ModelInferResponse's bytes, for clients; InputError when they are none."""
    message, raws = _parse(_Response, data, RAW_OUTPUTS, "raw_output_contents", "a ModelInferResponse")
    return _response(message, raws)


def parse_stream_response(data: bytes) -> tuple[str, InferResponse]:
    """Return what a ModelStreamInferResponse's bytes say is wrong ('' when nothing is), and the response in them."""
    view, responses = cut(data, STREAM_RESPONSE)
    try:
        wrong = str(_StreamResponse.FromString(view).error_message)
    except DecodeError:
        raise InputError("found bytes that are no ModelStreamInferResponse") from None
    return wrong, parse_response(responses[-1] if responses else b"")


def response_bytes(response: InferResponse) -> bytes:
    """Return a response as a ModelInferResponse; the one copy of its tensors, which may be given back afterwards."""
    return b"".join(_response_parts(response))


def stream_response_bytes(response: InferResponse, error: str = "") -> bytes:
    """Return a response as a ModelStreamInferResponse, with what went wrong if something did; copies like
    `response_bytes`."""
    parts = _response_parts(response)
    head = _StreamResponse(error_message=error).SerializeToString() if error else b""
    return b"".join([head, prefix(STREAM_RESPONSE, sum(map(len, parts))), *parts])


def _parse(
    kind: Any, data: bytes | memoryview, number: int, field: str, what: str
) -> tuple[Any, list[bytes | memoryview]]:
    """Return a message and its raw contents."""
    try:
        if len(data) < CUT_BYTES_MIN:
            message = kind.FromString(bytes(data))
            return message, list(getattr(message, field))
        rest, raws = cut(data, number)
        return kind.FromString(rest), list(raws)
    except (DecodeError, InputError) as error:
        why = f": {error}" if isinstance(error, InputError) else ""
        raise InputError(f"found bytes that are not {what}{why}") from None


def _tensors(sent: Any, raws: list[bytes | memoryview], elements_max: int, what: str) -> tuple[Tensor, ...]:
    """Return a message's tensors, each with its own raw contents, typed contents or region."""
    tensors, place = [], 0
    left = elements_max  # of typed contents, over all tensors: each element becomes an object
    for one in sent:
        told = _told(one.parameters)
        region = region_of(told, what) if told else None
        raw: bytes | memoryview | None = None
        if raws and region is None and place < len(raws):
            raw = raws[place]
            place += 1
        elif raws and region is None:
            raise InputError(f"found {len(raws)} raw contents, expected one for each {what} outside shared memory")
        shape = tuple(one.shape)
        if not has_contents(one):
            raw = b"" if raw is None and region is None else raw  # a tensor of no elements needs neither
            tensors.append(Tensor(one.name, one.datatype, shape, raw, None, region, told))
        elif raw is not None or region is not None:
            raise InputError(f"{what} {one.name!r:.80}: found typed contents, expected raw contents or a region alone")
        else:
            tensor = tensor_of_contents(one.name, one.datatype, shape, one.contents, told, left)
            left -= len(tensor.values or ()) or len(tensor.raw or b"") // SIZES.get(tensor.datatype, 1)
            tensors.append(tensor)
    if place != len(raws):
        raise InputError(f"found {len(raws)} raw contents for {place} tensors, expected one for each {what}")
    return tuple(tensors)


def _response(message: Any, raws: list[bytes | memoryview]) -> InferResponse:
    """Servers put an empty content in the place of an output that lies in a region, or leave it out."""
    told = [_told(one.parameters) for one in message.outputs]
    regions = [region_of(each, "an output") for each in told]
    if len(raws) == len(regions):
        raws = [raw for raw, region in zip(raws, regions, strict=True) if region is None]
    outputs = _tensors(message.outputs, raws, ELEMENTS_MAX, "output")
    parameters = _told(message.parameters)
    return InferResponse(message.model_name, message.model_version, message.id, outputs, parameters)


def _response_parts(response: InferResponse) -> list[bytes | memoryview]:
    message = _Response(model_name=response.model, model_version=response.version, id=response.id)
    if response.parameters:
        _tell(message.parameters, response.parameters)
    _add(message.outputs, response.outputs)
    # Clients count outputs to find raw contents, so one in a region has an empty one.
    raws = [one.raw if one.raw is not None else b"" for one in response.outputs]
    return [message.SerializeToString(), *_raw_parts(RAW_OUTPUTS, raws)]


def _add(field: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        one = field.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.parameters:
            _tell(one.parameters, tensor.parameters)
        if tensor.region is not None:
            _tell(one.parameters, parameters_of(tensor.region))


def _raw_parts(number: int, raws: Iterable[bytes | memoryview | None]) -> list[bytes | memoryview]:
    return [part for raw in raws if raw is not None for part in (prefix(number, len(raw)), raw)]


def _told(parameters: Any) -> dict[str, Parameter]:
    """Return a `parameters` map as plain values; one without a value says nothing and is left out."""
    if not parameters:
        return {}
    return {key: getattr(value, choice) for key, value in parameters.items() if (choice := value.WhichOneof(_CHOICE))}


_CHOICE = "parameter_choice"


def _tell(parameters: Any, values: Mapping[str, Parameter]) -> None:
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
