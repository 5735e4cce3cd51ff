"""JSON operations for the JSON process: bytes in, bytes out.

A job and its bytes are sent to another process (`json_process.py`). The result is MessagePack, the engine's format of
json values. Parsing and the objects that it creates delay no other request.

    Elements    elements of a BYTES tensor      -> a list with each as a port's value travels
    Document    a JSON document                 -> its value
    RestBody    the body of a v2 REST request   -> an InferRequest whose tensors are raw
    CheckJson   an encoded json value           -> nothing
    Write       encoded json or detections      -> the elements of a BYTES tensor
    Numbers     elements of a tensor            -> the JSON list of them
    Nested      bytes of an array               -> nested JSON lists
    Generated   encoded outputs of an llm       -> a response of OpenAI or Anthropic, or the events that end a stream
    Answered    the same of one prompt          -> a GeneratedAnswer

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from weftline.engine.protocol.packed import Packed
from weftline.engine.protocol.values import live, pack
from weftline.engine.serving.anthropic.responses import MessageAnswer
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.binary_tensors import BinaryOutputs, elements_of, read_request
from weftline.engine.serving.model_info import PortInfo
from weftline.engine.serving.openai.completions import Completion
from weftline.engine.serving.openai.ports import AnswerPorts
from weftline.engine.serving.openai.responses_api.answer import GeneratedAnswer, generated_answer
from weftline.engine.serving.v2.datatypes import BYTES, DTYPES, array_of
from weftline.engine.serving.v2.elements import decode_elements, element_bytes, encode_elements, value_of
from weftline.engine.serving.v2.messages import InferRequest, Parameter, Region, Tensor, WantedOutput
from weftline.engine.serving.v2.response import nested
from weftline.errors import InputError
from weftline.nodes.detections import Detections
from weftline.nodes.json_value import json_text
from weftline.nodes.ports import PortType
from weftline.nodes.strict_json import check_count, loads
from weftline.nodes.values import is_json
from weftline.shm.spec import byte_size


class Elements(msgspec.Struct, frozen=True, tag=True):
    """Parse the `count` elements of a BYTES tensor. kind: one of PARSED, the kind of `port_type`'s elements."""

    kind: str
    port_type: str
    count: int
    values_max: int


class Document(msgspec.Struct, frozen=True, tag=True):
    """Parse one document; `what` begins the error message."""

    what: str
    values_max: int


class RestBody(msgspec.Struct, frozen=True, tag=True):
    """Parse a v2 REST body, or a plain one; see `read_request`."""

    header_length: str | None
    model: str
    version: str
    limits: ServeLimits
    ports: tuple[PortInfo, ...] = ()
    plain: str = ""


class CheckJson(msgspec.Struct, frozen=True, tag=True):
    """Check that bytes are an encoded json value; their sender may be hostile."""


class Write(msgspec.Struct, frozen=True, tag=True):
    """Write the values of a list of encoded values as JSON text. whole: as one list, else each as an element.

    kind: of the values, json or detections.
    """

    whole: bool
    kind: str = "json"


class Numbers(msgspec.Struct, frozen=True, tag=True):
    """Write the elements of a tensor, numbers or texts, as a JSON list; see `elements_of`. name: of the output."""

    name: str
    datatype: str
    count: int


class Nested(msgspec.Struct, frozen=True, tag=True):
    """Write an array, of numpy's dtype `dtype`, as nested JSON lists."""

    dtype: str
    shape: tuple[int, ...]


Generation = Completion | MessageAnswer
"""Form of a response with generated text."""


class Generated(msgspec.Struct, frozen=True, tag=True):
    """Write a response from a list of the outputs of each prompt: encoded values by output, each as `packed`.

    sent: characters of each output that a stream has sent; None: the response is whole.
    """

    completion: Generation
    sent: dict[str, int] | None = None


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Read the answer in the outputs of one prompt, given as for Generated; see `generated_answer`."""

    ports: AnswerPorts
    logprobs: bool


Job = Elements | Document | RestBody | CheckJson | Write | Numbers | Nested | Generated | Answered

PARSED = frozenset({"json", "detections", "list"})
"""Kinds of elements that are JSON documents."""

_unpack = msgspec.msgpack.decode
_pack = msgspec.msgpack.encode


def run(job: Job, data: bytes | memoryview) -> bytes:
    """Run a job and return its result; InputError for invalid bytes."""
    if isinstance(job, Elements):
        elements = decode_elements(data, job.count)
        check_count(elements, "json", job.values_max)
        return _pack([_element(job, one) for one in elements])
    if isinstance(job, Document):
        return _pack(loads(data, job.what, job.values_max))
    if isinstance(job, RestBody):
        request, wanted = read_request(
            bytes(data), job.header_length, job.model, job.version, job.limits, job.ports, job.plain
        )
        return _pack(_Read(tuple(map(_sent, request.inputs)), request.outputs, request.id, request.parameters, wanted))
    if isinstance(job, Write):
        return _written(job, data)
    if isinstance(job, Numbers):
        return json_text(elements_of(job.name, job.datatype, job.count, data))
    if isinstance(job, Nested):
        return json_text(nested(np.frombuffer(data, job.dtype).reshape(job.shape)))
    if isinstance(job, Answered):
        return _pack(generated_answer(_answers(data)[0], job.ports, job.logprobs))
    if isinstance(job, Generated):
        answers = _answers(data)
        if job.sent is None:
            return job.completion.whole(answers)
        return _pack(job.completion.ending(answers[0], job.sent))
    return _check(data)


def _answers(data: bytes | memoryview) -> list[dict[str, Any]]:
    """Decode the outputs of each prompt; InputError if one holds no json value."""
    try:
        return [{name: _value(one) for name, one in outputs.items()} for outputs in _outputs(data)]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InputError("an output's worker sent bytes that hold no json value") from None


def generated(answers: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the data of a Generated job: outputs of each prompt, of which some are Packed."""
    return _pack([{name: _sent_value(one) for name, one in outputs.items()} for outputs in answers])


def events(answer: bytes) -> list[bytes]:
    """Decode the result of a Generated job for a stream."""
    return _documents(answer)


def answered(answer: bytes) -> GeneratedAnswer:
    """Decode the result of an Answered job."""
    return msgspec.msgpack.decode(answer, type=GeneratedAnswer)


def rest_body(job: RestBody, answer: bytes) -> tuple[InferRequest, BinaryOutputs]:
    """Decode the result of a RestBody job."""
    read = _read(answer)
    inputs = tuple(
        Tensor(one.name, one.datatype, one.shape, one.raw, None, one.region, one.parameters) for one in read.inputs
    )
    return InferRequest(job.model, inputs, read.outputs, job.version, read.id, read.parameters), read.wanted


def documents(answer: bytes) -> list[bytes]:
    """Decode the result of an Elements job."""
    return _documents(answer)


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    """A Tensor without `values`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | None
    region: Region | None
    parameters: Mapping[str, Parameter]


class _Read(msgspec.Struct, frozen=True, array_like=True):
    """An InferRequest parsed from a JSON body, and the form of each output."""

    inputs: tuple[_Sent, ...]
    outputs: tuple[WantedOutput, ...]
    id: str
    parameters: Mapping[str, Parameter]
    wanted: BinaryOutputs


class _Output(msgspec.Struct, frozen=True, array_like=True):
    """An output: encoded values of one kind, one or a list of them; or a plain value."""

    kind: str
    data: list[bytes]
    plain: Any


def _sent_value(value: Any) -> _Output:
    if not isinstance(value, Packed):
        return _Output("", [], value)
    parts = list(value.leaves())
    return _Output("list" if value.items is not None else "one", [one.data for one in parts], None)


def _value(output: _Output) -> Any:
    if not output.kind:
        return output.plain
    values = [_unpack(one) for one in output.data]
    return values if output.kind == "list" else values[0]


_outputs = msgspec.msgpack.Decoder(list[dict[str, _Output]]).decode
_read = msgspec.msgpack.Decoder(_Read).decode
_documents = msgspec.msgpack.Decoder(list[bytes]).decode


def _element(job: Elements, element: bytes | memoryview) -> bytes:
    value = value_of(job.kind, element, job.port_type, job.values_max)
    return _pack(value) if job.kind != "detections" else pack(value, PortType("detections"), "detections").data


def _sent(tensor: Tensor) -> _Sent:
    """Return a tensor with its elements as raw contents."""
    values, raw = tensor.values, None if tensor.raw is None else bytes(tensor.raw)
    try:
        if values is not None and tensor.datatype == BYTES:
            raw = encode_elements(element_bytes(values))
        elif values is not None and tensor.datatype in DTYPES:
            _expect_count(tensor, values)
            raw = array_of(tensor.datatype, values).tobytes()
    except InputError as error:
        raise InputError(f"input {tensor.name:.80}: {error}") from None
    return _Sent(tensor.name, tensor.datatype, tensor.shape, raw, tensor.region, tensor.parameters)


def _expect_count(tensor: Tensor, values: Sequence[object]) -> None:
    """Raise InputError unless the number of elements matches the shape. Later checks count bytes only."""
    count = byte_size("uint8", tensor.shape)
    if len(values) != count:
        raise InputError(f"found {len(values)} elements, expected {count} for shape {list(tensor.shape)}")


def _written(job: Write, data: bytes | memoryview) -> bytes:
    try:
        values = [_json_of(job.kind, one) for one in _documents(data)]
    except (msgspec.MsgspecError, ValueError, IndexError, RecursionError):
        raise InputError(f"found bytes that are no {job.kind} value") from None
    return encode_elements([json_text(values)] if job.whole else [json_text(one) for one in values])


def _json_of(kind: str, data: bytes) -> Any:
    value = live(Packed(kind, data=data), {})
    return value.to_json() if isinstance(value, Detections) else value


def _check(data: bytes | memoryview) -> bytes:
    try:
        right = is_json(_unpack(data))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        right = False
    if not right:
        raise InputError("found bytes that are no json value")
    return b""
