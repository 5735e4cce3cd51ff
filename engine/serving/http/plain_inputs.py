"""Plain requests: inputs as people write them, converted to the tensors of a v2 request.

    {"question": "...", "settings": {"top_k": 3}}                a JSON object with a member for each input
    question=...  photo=<file>                                   the parts of a form; repeated parts make a list
    <bytes>                                                      the body itself, for a model with one input

Port type        in JSON                                      as a part or a body
text             a text                                       UTF-8
json             any value                                    a JSON document
image, audio,    {"b64": "..."}, or a text                    the encoded bytes; a part that is no file may be a
bytes            data:image/png;base64,...                    data URL
detections       a list of {name, score, box}                 the same, as a JSON document
tensor           nested lists of numbers                      a .npy file, or the lists as a JSON document
list[T]          a list                                       a part for each element, or one of type application/json
any              any value                                    UTF-8

A plain request is one item: it has no batch dimension. null is a value of `json` and `any` ports; any other input that
is null is left out. No value is ever a path or a URL that is fetched. Pure: bytes in, tensors out.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.model_info import PortInfo
from weftline.engine.serving.v2.datatypes import BYTES, MEDIA, innermost
from weftline.engine.serving.v2.elements import JSON
from weftline.engine.serving.v2.messages import InferRequest, Parameter, Tensor
from weftline.engine.serving.v2.response import dense_tensor
from weftline.errors import InputError
from weftline.nodes.json_value import NotJson, json_text
from weftline.nodes.media import MediaLimits, converted_elements, to_tensor, to_value
from weftline.nodes.ports import PortType
from weftline.nodes.strict_json import (
    INLINE_BYTES,
    VALUES,
    check_count,
    kind_of,
    members,
    parse,
    repeats_key,
)

B64 = "b64"
"""Key of an object that contains encoded bytes in base64."""

BODY_VALUES = 1 << 16
"""Most values of a body beside the elements of its inputs."""

FIELDS_BYTES_MAX = 64 << 10
"""Largest URL-encoded form, and largest data URL in a part: they are decoded in the event loop."""

_NPY = b"\x93NUMPY"
_NOT_MEDIA = f'expected {{"{B64}": "..."}} or a data URL, data:image/png;base64,...'

T = TypeVar("T")


@dataclass(slots=True)
class Part:
    """One part of a form.

    type:    its content type, lower case, without parameters; '' without one.
    is_file: it has a file name.
    """

    name: str = ""
    type: str = ""
    is_file: bool = False
    data: bytes | bytearray | memoryview = field(default_factory=bytearray)


def request_of_object(
    body: bytes, ports: Sequence[PortInfo], limits: ServeLimits, model: str, version: str, generate: bool = False
) -> InferRequest:
    """Convert a JSON object; InputError with all that is wrong.

    generate: it is one of Triton's generate route: members that are no inputs are `id`, `parameters`, or parameters.
    """
    check_count((body,), "the body", limits.elements_max + BODY_VALUES)
    try:
        found = members(body)
        if repeats_key(body, [found]):
            found = members(body, fast=False)
    except NotJson as error:
        raise InputError(error.at("the body")) from None
    id, parameters = "", dict[str, Any]()
    if generate:
        names = {port.name for port in ports}
        others = {name: _loads(found.pop(name), f"the body: {name!r:.80}") for name in [*found] if name not in names}
        id, parameters = others.pop("id", ""), others.pop("parameters", {})
        if not isinstance(id, str) or not isinstance(parameters, dict):
            raise InputError("the body: expected a text as id, and an object as parameters")
        parameters = parameters | others
        if wrong := [name for name, one in parameters.items() if not isinstance(one, bool | int | float | str)]:
            raise InputError(f"the body: {wrong[0]!r:.80}: neither an input ({described(ports)}) nor a parameter")
    inputs = _converted(found, ports, lambda port, raw: _of_json(port, bytes(raw)))
    return InferRequest(model, inputs, (), version, id, parameters)


def inputs_of_parts(parts: Iterable[Part], ports: Sequence[PortInfo]) -> tuple[Tensor, ...]:
    """Convert the parts of a form; InputError with all that is wrong."""
    found: dict[str, list[Part]] = {}
    for one in parts:
        found.setdefault(one.name, []).append(one)
    documents = [one for port in ports for one in found.get(port.name, ()) if _is_read_here(port, one)]
    if sum(len(one.data) for one in documents) > INLINE_BYTES:
        what, fix = "JSON of texts, lists and tensors", "send tensors as .npy files, or the request as JSON"
        raise InputError(f"the form: {what} has at most {INLINE_BYTES} bytes in all\n    fix: {fix}")
    return _converted(found, ports, _of_parts)


def inputs_of_fields(body: bytes, ports: Sequence[PortInfo], limits: ServeLimits) -> tuple[Tensor, ...]:
    """Convert a URL-encoded form."""
    if len(body) > FIELDS_BYTES_MAX:
        fix = "send a JSON object, or multipart/form-data"
        raise InputError(f"the form: a URL-encoded one has at most {FIELDS_BYTES_MAX} bytes\n    fix: {fix}")
    try:
        pairs = parse_qsl(body.decode(), True, True, errors="strict", max_num_fields=limits.tensors_max)
    except ValueError:
        raise InputError(f"the form: expected at most {limits.tensors_max} URL-encoded fields, NAME=VALUE") from None
    return inputs_of_parts([Part(name, data=value.encode()) for name, value in pairs], ports)


def inputs_of_raw(body: bytes | bytearray | memoryview, type: str, ports: Sequence[PortInfo]) -> tuple[Tensor, ...]:
    """Convert a body that is the value of the only input, or of the only one that is required."""
    required = [port for port in ports if not port.optional] or ports
    if len(required) != 1:
        raise InputError(f"the body is one value, and the inputs are {described(ports)}; send a JSON object or a form")
    return inputs_of_parts([Part(required[0].name, type, True, body)], ports)


def begins_with_field(body: bytes | bytearray | memoryview, ports: Sequence[PortInfo]) -> bool:
    """Return True if a body begins like a URL-encoded form with one of these inputs."""
    return any(bytes(body[: len(port.name) + 1]) == f"{port.name}=".encode() for port in ports)


def described(ports: Sequence[PortInfo]) -> str:
    """Return the inputs with their types, for messages."""
    return ", ".join(f"{one.name} ({one.type}{', may be left out' if one.optional else ''})" for one in ports) or "none"


def _converted(
    found: Mapping[str, T], ports: Sequence[PortInfo], convert: Callable[[PortInfo, T], Tensor | None]
) -> tuple[Tensor, ...]:
    by_name = {port.name: port for port in ports}
    wrong, tensors = [], []
    if unknown := [name for name in found if name not in by_name]:
        wrong.append(f"unknown inputs: {', '.join(f'{name!r:.80}' for name in unknown[:8])}")
    for name, value in found.items():
        if (port := by_name.get(name)) is None:
            continue
        try:
            tensor = convert(port, value)
        except InputError as error:
            wrong.append(f"input {name}: {error}")
        else:
            tensors += [tensor] if tensor is not None else []
    present = {one.name for one in tensors}
    failed = any(one.startswith("input ") for one in wrong)
    missing = [port.name for port in ports if not port.optional and port.name not in (found if failed else present)]
    if missing:
        wrong.append(f"missing inputs: {', '.join(missing)}")
    if wrong:
        hint = f"; the inputs are {described(ports)}" if unknown or missing else ""
        raise InputError(f"{'; '.join(wrong)}{hint}")
    return tuple(tensors)


# values in JSON


def _of_json(port: PortInfo, raw: bytes) -> Tensor | None:
    """Convert the JSON text of one value; None for one that is left out."""
    type = port.port_type
    if raw == b"null" and (port.optional or type.kind not in ("json", "any")):
        return None
    if type.kind == "tensor":
        return _numbers(port, _loads(raw))
    if type.kind == "list":
        return _list_of_json(port, type.item or PortType("any"), raw)
    return _element_tensor(port, [_element(type, raw)], (1,))


def _loads(raw: bytes | bytearray | memoryview, what: str = "") -> Any:
    """Parse JSON whose values have been counted, or that is small."""
    try:
        return parse(raw, VALUES)
    except NotJson as error:
        raise InputError(error.at(what)) from None


def _element(type: PortType, raw: bytes) -> bytes | str:
    """Return one element of a BYTES tensor from its JSON text; json documents stay as they are."""
    if type.kind == "text" or (type.kind == "any" and raw[:1] == b'"'):
        value = _loads(raw)
        if not isinstance(value, str):
            raise InputError(f"found {kind_of(value)}, expected a text")
        return value
    if type.kind in MEDIA:
        return _bytes_of(_loads(raw))
    return raw


def _list_of_json(port: PortInfo, item: PortType, raw: bytes) -> Tensor:
    if item.kind == "tensor":
        return _numbers(port, _loads(raw))
    try:
        elements = [bytes(one) for one in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    except (msgspec.MsgspecError, ValueError):
        value = _loads(raw)
        if not isinstance(value, list):
            raise InputError(f"found {kind_of(value)}, expected a list") from None
        elements = [json_text(one) for one in value]
    if item.kind == "list" and innermost(item).kind in MEDIA:
        raise InputError(f"{port.type} has no JSON form\n    fix: use gRPC")
    made = converted_elements(elements, lambda one: _element(item, one))
    return _element_tensor(port, made, (len(made),))


def _element_tensor(port: PortInfo, elements: Sequence[bytes | str], shape: tuple[int, ...]) -> Tensor:
    is_json = port.type in ("any", "list[any]") and any(isinstance(one, bytes) for one in elements)
    if is_json:  # then every element is a document
        elements = [json_text(one) if isinstance(one, str) else one for one in elements]
    parameters: dict[str, Parameter] = {JSON: True} if is_json else {}
    return Tensor(port.name, BYTES, shape, values=tuple(elements), parameters=parameters)


def _numbers(port: PortInfo, value: Any) -> Tensor:
    """Convert nested lists; the elements of a list of tensors have one shape."""
    type = port.port_type
    inner = innermost(type)
    if inner.dtype == "complex64":
        raise InputError("complex numbers have no JSON form\n    fix: send a .npy file, or a v2 request")
    dims = None if inner.dims is None else (("?", *inner.dims) if type.kind == "list" else inner.dims)
    array = to_tensor(PortType("tensor", inner.dtype, dims), value, MediaLimits().bytes_max)
    return dense_tensor(port.name, array, port.type)


def _bytes_of(value: Any) -> bytes:
    """Return the bytes of {"b64": ...} or of a data URL."""
    if isinstance(value, dict) and isinstance(value.get(B64), str) and value.keys() <= {B64, "content_type"}:
        return _decoded(value[B64])
    if isinstance(value, str) and value[:5].lower() == "data:":
        head, comma, data = value.partition(",")
        if comma and head.lower().endswith(";base64"):
            return _decoded(data)
        raise InputError(f"found a data URL without base64, {_NOT_MEDIA}")
    raise InputError(f"found {kind_of(value)}, {_NOT_MEDIA}")


def _decoded(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except ValueError:
        raise InputError("found text that is not base64 (RFC 4648, with padding)") from None


# parts


def _is_read_here(port: PortInfo, part: Part) -> bool:
    """Return True if a part is JSON that is parsed at once."""
    is_document = part.type == "application/json" and port.port_type.kind in ("list", "text")
    return is_document or (innermost(port.port_type).kind == "tensor" and bytes(part.data[: len(_NPY)]) != _NPY)


def _of_parts(port: PortInfo, parts: Sequence[Part]) -> Tensor | None:
    type = port.port_type
    if type.kind == "list":
        item = type.item or PortType("any")
        if len(parts) == 1 and parts[0].type == "application/json":
            return _of_json(port, bytes(parts[0].data).strip())
        if item.kind == "tensor":
            return _numbers(port, [_array(item, one) for one in parts])
        return _element_tensor(port, [_element_of_part(item, one) for one in parts], (len(parts),))
    if len(parts) != 1:
        raise InputError(f"found {len(parts)} parts, expected one")
    if type.kind == "tensor":
        return dense_tensor(port.name, _array(type, parts[0]), port.type)
    return _element_tensor(port, [_element_of_part(type, parts[0])], (1,))


def _element_of_part(type: PortType, part: Part) -> bytes | str:
    if type.kind in ("text", "any") and part.type != "application/json":
        try:
            return str(part.data, "utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"found bytes that are not UTF-8 at {error.start}, expected text") from None
    if type.kind in MEDIA and not part.is_file and bytes(part.data[:5]).lower() == b"data:":
        if len(part.data) > FIELDS_BYTES_MAX:
            raise InputError(f"a data URL in a form has at most {FIELDS_BYTES_MAX} bytes\n    fix: send it as a file")
        return _bytes_of(str(part.data, "latin-1"))
    if type.kind == "text":
        return _element(type, bytes(part.data).strip())
    return part.data if type.kind in MEDIA else bytes(part.data)  # type: ignore[return-value]  # copied later


def _array(type: PortType, part: Part) -> Any:
    if bytes(part.data[: len(_NPY)]) == _NPY:
        return to_value(type, bytes(part.data), MediaLimits(bytes_max=len(part.data)))
    return to_tensor(type, _loads(part.data), MediaLimits().bytes_max)
