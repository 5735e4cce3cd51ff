"""Binary tensor extension of v2 REST: a JSON header followed by raw tensor bytes.

    POST .../infer
    Inference-Header-Content-Length: 123          length of the JSON; without it all of the body is JSON
    {"inputs": [{"name", "datatype", "shape", "parameters": {"binary_data_size": 4096}}], "outputs": [...]}<bytes>

A tensor comes as `data` (nested or flat lists), in the bytes behind the JSON, or in registered shared memory. Outputs
go out as bytes where `binary_data` or `binary_data_output` asks for it, else as flat lists; BYTES must be UTF-8 there.
(Triton, "Binary Tensor Data Extension".) Numbers that JSON lacks are NaN, Infinity and -Infinity in both directions, as
in Triton and Python's json module.

Pure: bytes in, values out. Tensors of a request are views of the received body.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.plain_inputs import BODY_VALUES, request_of_object
from weftline.engine.serving.model_info import PortInfo
from weftline.engine.serving.v2.datatypes import BYTES, NUMPY
from weftline.engine.serving.v2.elements import decode_elements
from weftline.engine.serving.v2.messages import (
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    WantedOutput,
    region_of,
)
from weftline.errors import InputError
from weftline.nodes.json_value import json_text
from weftline.nodes.strict_json import INLINE_BYTES, VALUES, loads

HEADER = "inference-header-content-length"
RUN, GENERATE = "run", "generate"
"""Kinds of plain bodies: an object of inputs, and one with parameters beside them."""

SIZE, ONE, ALL = "binary_data_size", "binary_data", "binary_data_output"


@dataclass(frozen=True, slots=True)
class BinaryOutputs:
    """Selection of the outputs sent as bytes: `named` by output, `rest` for all others.

    plain: the request is a plain one (`plain_inputs.py`), and so is its answer.
    """

    named: Mapping[str, bool] = field(default_factory=dict)
    rest: bool = False
    plain: bool = False

    def binary(self, name: str) -> bool:
        return self.named.get(name, self.rest)


def read_request(
    body: bytes | bytearray | memoryview,
    header_length: str | None,
    model: str,
    version: str,
    limits: ServeLimits,
    ports: Sequence[PortInfo] = (),
    plain: str = "",
) -> tuple[InferRequest, BinaryOutputs]:
    """Parse a body into its request and the form of its outputs; InputError if it is invalid.

    ports: the model's inputs, for a body that is a plain request: an object of them, without v2's keys.
    plain: RUN or GENERATE, for a body that is one in any case.
    """
    if plain:
        asking = request_of_object(bytes(body), ports, limits, model, version, plain == GENERATE)
        return asking, BinaryOutputs(plain=True)
    whole = memoryview(body)
    length = header_bytes(header_length, len(whole))
    what = "the JSON header" if header_length is not None else "the body"
    head = loads(whole[:length], what, limits.elements_max + BODY_VALUES, VALUES)
    if not isinstance(head, dict):
        raise InputError("the body: expected a JSON object with inputs")
    other = [key for key in head if key not in ("id", "parameters", "outputs")] if "inputs" not in head else []
    if other and header_length is None and ports:
        return read_request(body, None, model, version, limits, ports, RUN)
    if other:
        form = '{"inputs": [{"name": ..., "datatype": ..., "shape": ..., "data": ...}]}'
        raise InputError(f"the body: found {other[0]!r:.80} and no inputs; expected {form}")
    behind = _Behind(whole[length:])
    inputs = tuple(_tensor(one, behind, limits) for one in _objects(head, "inputs", limits.tensors_max))
    behind.check_used_up()
    entries = _objects(head, "outputs", limits.tensors_max)
    parameters = _parameters(head, "the request")
    outputs = tuple(_output(one) for one in entries)
    rest = _is(parameters.get(ALL), ALL)
    named = {one.name: _is(one.parameters[ONE], ONE) for one in outputs if ONE in one.parameters}
    asked = {name: value for name, value in parameters.items() if name != ALL}
    return InferRequest(model, inputs, outputs, version, _text(head, "id", ""), asked), BinaryOutputs(named, rest)


def response_body(
    response: InferResponse, wanted: BinaryOutputs, written: Mapping[str, bytes] | None = None
) -> tuple[bytes, int | None]:
    """Return a body and the length of its JSON (None: all of it). Bytes of tensors are copied once.

    written: elements of large outputs, as JSON lists.
    """
    binary: list[bytes | memoryview] = []
    outputs: list[bytes] = []
    for one in response.outputs:
        tensor: dict[str, Any] = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        parameters: dict[str, Any] = dict(one.parameters)
        elements = None
        if one.region is not None:
            pass  # Triton's C++ client takes any parameters for those of binary data
        elif wanted.binary(one.name):
            raw = _raw(one)
            parameters[SIZE] = len(raw)
            binary.append(raw)
        elif written is None or (elements := written.get(one.name)) is None:
            tensor["data"] = elements_of(one.name, one.datatype, math.prod(one.shape), _raw(one))
        text = json_text(tensor | ({"parameters": parameters} if parameters else {}))
        outputs += [b",", text] if elements is None else [b",", text[:-1], b',"data":', elements, b"}"]
    head: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    head |= {"id": response.id} if response.id else {}
    head |= {"parameters": dict(response.parameters)} if response.parameters else {}
    json = [json_text(head)[:-1], b',"outputs":[', *outputs[1:], b"]}"]
    return b"".join([*json, *binary]), sum(map(len, json)) if binary else None


class _Behind:
    """The bytes behind the header, consumed in the order of the inputs."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, size: object, name: str) -> memoryview:
        if type(size) is not int or not 0 <= size <= len(self._data) - self._at:
            left = len(self._data) - self._at
            raise InputError(f"input {name}: {SIZE}: expected a size within the {left} bytes that are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def check_used_up(self) -> None:
        if self._at != len(self._data):
            raise InputError(f"found {len(self._data) - self._at} bytes behind the last input; each says its {SIZE}")


def header_bytes(given: str | None, whole: int) -> int:
    """Return the length of a body's JSON by its header; InputError for an impossible one."""
    if given is None:
        return whole
    if not (given.isascii() and given.isdigit() and len(given) <= 12) or int(given) > whole:
        raise InputError(f"{HEADER}: expected the length of the JSON at the body's start, at most {whole}")
    return int(given)


def _objects(head: Mapping[str, Any], key: str, most: int) -> list[dict[str, Any]]:
    found = head.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise InputError(f"{key}: expected a list of objects")
    if len(found) > most:
        raise InputError(f"{key}: found {len(found)}, expected at most {most}")
    return found


def _tensor(given: dict[str, Any], behind: _Behind, limits: ServeLimits) -> Tensor:
    name = _text(given, "name")
    what = f"input {name:.80}"
    parameters = _parameters(given, what)
    region = region_of(parameters, what)
    shape, datatype, data = _shape(given, what), _text(given, "datatype"), given.get("data")
    ways = (region is not None) + (SIZE in parameters) + (data is not None)
    if ways != 1:
        raise InputError(f"{what}: expected its elements once: in data, behind the JSON, or in shared memory")
    if region is not None:
        return Tensor(name, datatype, shape, region=region, parameters=parameters)
    if SIZE in parameters:
        return Tensor(name, datatype, shape, raw=behind.take(parameters[SIZE], what), parameters=parameters)
    values: list[object] = []
    for value in _flat(data):
        values.append(value)
        if len(values) > limits.elements_max:
            raise InputError(f"{what}: found more than {limits.elements_max} elements in JSON, limits.elements_max")
    return Tensor(name, datatype, shape, values=tuple(values), parameters=parameters)


def _flat(data: object) -> Iterator[object]:
    if not isinstance(data, list):
        yield data
        return
    for one in data:
        if isinstance(one, list):
            yield from _flat(one)
        else:
            yield one


def _output(given: dict[str, Any]) -> WantedOutput:
    name = _text(given, "name")
    parameters = _parameters(given, f"output {name:.80}")
    return WantedOutput(name, region_of(parameters, f"output {name:.80}"), parameters)


def _shape(given: dict[str, Any], what: str) -> tuple[int, ...]:
    shape = given.get("shape")
    if not isinstance(shape, list) or not all(type(one) is int for one in shape):
        raise InputError(f"{what}: shape: expected a list of whole numbers")
    return tuple(shape)


def _text(given: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = given.get(key, default)
    if not isinstance(value, str):
        raise InputError(f"{key}: expected a text")
    return value


def _parameters(given: Mapping[str, Any], what: str) -> dict[str, Parameter]:
    found = given.get("parameters", {})
    if not isinstance(found, dict):
        raise InputError(f"{what}: parameters: expected an object")
    for name, value in found.items():
        if not isinstance(value, bool | int | float | str):
            raise InputError(f"{what}: parameters: {name!r:.80}: expected true, false, a number or a text")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{what}: parameters: {name!r:.80}: found {value}, expected a finite number")
    return found


def _is(value: object, key: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{key}: expected true or false")
    return bool(value)


def _raw(one: Tensor) -> bytes | memoryview:
    if one.raw is None:
        raise ValueError(f"output {one.name} has no bytes")
    return memoryview(one.raw).cast("B") if not isinstance(one.raw, bytes) else one.raw


def large_outputs(response: InferResponse, wanted: BinaryOutputs) -> list[Tensor]:
    """Return the outputs that are written as JSON and are large."""
    return [
        one for one in response.outputs
        if one.region is None and not wanted.binary(one.name) and one.raw is not None and len(one.raw) > INLINE_BYTES
    ]  # fmt: skip


def elements_of(name: str, datatype: str, count: int, raw: bytes | memoryview) -> list[Any]:
    """Return the elements of an output as JSON values; InputError if JSON cannot express them. name: of the output."""
    if datatype == BYTES:
        try:
            return [str(element, "utf-8") for element in decode_elements(raw, count)]
        except UnicodeDecodeError:
            raise InputError(f"output {name} is not UTF-8: ask for it with {ONE}") from None
    if datatype == "BF16":
        raise InputError(f"output {name} is BF16, which JSON cannot express: ask for it with {ONE}")
    numbers: list[Any] = np.frombuffer(raw, NUMPY[datatype]).tolist()
    return numbers
