"""ONNX file parser: ports and external files, without onnx or onnxruntime.

Only names, types and sizes of the graph's inputs and outputs are read; weights are skipped in place (the file is
mapped). External data is allowed in the model's folder only. Field numbers: onnx.proto3, IR 10.

The protobuf wire-format reader is made for untrusted files: nothing is copied, and no memory is allocated from a
length in the file, since every length is compared with the bytes that follow. Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from weftline.errors import ModelError
from weftline.nodes.model_limits import open_file

Value = int | memoryview
"""A varint as a number, a fixed-size or length-delimited field as its bytes, in place."""

_FIXED = {1: 8, 5: 4}


class WireError(ValueError):
    """The bytes are no valid protobuf message; the text gives the position."""


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Yield each field's number and value, in file order; WireError when the bytes stop making sense."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        field, wire = key >> 3, key & 7
        if field == 0:
            raise WireError(f"a field numbered 0 at byte {at}")
        if wire == 0:
            value, at = _varint(message, at)
            yield field, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in _FIXED:
            size = _FIXED[wire]
        else:
            raise WireError(f"wire type {wire} at byte {at}")
        if size > end - at:
            raise WireError(f"a field of {size} bytes where {end - at} are left")
        yield field, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(message):
            raise WireError("it ends in the middle of a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise WireError(f"a number of more than ten bytes at byte {at}")


def chunk(value: Value) -> memoryview:
    """Return a field that must be bytes; WireError when it is a number."""
    if isinstance(value, int):
        raise WireError("a number where a message belongs")
    return value


def text(value: Value) -> str:
    """Return a field that must be text; WireError when it is not UTF-8."""
    try:
        return bytes(chunk(value)).decode()
    except UnicodeDecodeError:
        raise WireError("a name that is not UTF-8") from None


def number(value: Value) -> int:
    """Return a field that must be a signed 64-bit number; WireError when it is bytes."""
    if not isinstance(value, int):
        raise WireError("bytes where a number belongs")
    return value - (1 << 64) if value >> 63 else value


DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 16: "bfloat16", 17: "float8_e4m3fn", 19: "float8_e5m2",
}  # fmt: skip
"""TensorProto.DataType by number, for the numbers that ports carry; the rarer kinds of float8 are not among them."""

_STRING = 8
_OTHER_DTYPES = {
    0: "an unknown type", 15: "complex128", 18: "float8_e4m3fnuz", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4",
    23: "float4_e2m1", 24: "float8_e8m0",
}  # fmt: skip

TENSOR, TEXTS, MAPS = "tensor", "texts", "maps"
"""Kinds of values that ports carry: numbers, strings, and a sequence of maps from text or int64 to numbers (ZipMap)."""

DEPTH_MAX = 16
"""Deepest nesting of graphs in graphs; If and Loop bodies rarely go beyond 3."""

PORTS_MAX = 1024
RANK_MAX = 16

_MODEL_GRAPH, _MODEL_TRAINING, _MODEL_FUNCTIONS = 7, 20, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_SPARSE = 1, 5, 11, 12, 15
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_EXTERNAL = 1, 2, 8, 13

_BITS = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16,
    17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2,
}  # fmt: skip
"""Bits of a number, by TensorProto.DataType."""

_FILE_NAME = re.compile(r"[^\x00-\x1f\\*?:]{1,512}")
"""Accepted names of external files. ONNX Runtime takes `*/_ORT_MEM_ADDR_/*` for an address in its own memory."""


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """A graph input or output.

    dtype: of numbers; None for other kinds.
    dims:  a size, a name, or None where unknown; None for an unknown rank.
    kind:  TENSOR, TEXTS or MAPS, else a phrase for a type that no port carries, such as 'a sparse tensor'.
    """

    name: str
    dtype: str | None
    dims: tuple[int | str | None, ...] | None
    kind: str = TENSOR


@dataclass(frozen=True, slots=True)
class External:
    """Place of a tensor in another file of the model's folder. length: as stated; size_bytes: by its type and dims."""

    location: str
    offset: int
    length: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """A model's signature: inputs (without initialisers), outputs, and tensors in external files."""

    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    external: tuple[External, ...]

    @property
    def external_bytes(self) -> int:
        """Return the memory that tensors in external files take; one that is read twice counts twice."""
        return sum(one.size_bytes for one in self.external)


def read_onnx(path: Path, shown: str) -> OnnxFile:
    """Return the signature of the model at `path`, named `shown` in errors. ModelError: not a valid ONNX file."""
    try:
        with open_file(path) as file:  # the map is closed with its last view, which an error may hold on to
            found = _read_model(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError) as error:
        reason = "it is empty or cannot be read" if not isinstance(error, WireError) else str(error)
        raise ModelError(f"{shown} is no ONNX model, or a truncated one: {reason}") from None
    for name in dict.fromkeys(one.location for one in found.external):
        check_external(path.parent, name, shown)
    _check_places(path.parent, found.external, shown)
    return found


def onnx_bytes(path: Path, shown: str) -> int:
    """Return the memory that a model's weights take, those in external files too; 0 where it cannot be read."""
    try:
        return path.stat().st_size + read_onnx(path, shown).external_bytes
    except (OSError, ModelError):
        return 0  # reported by `ports`


def check_external(folder: Path, name: str, shown: str) -> None:
    """Raise ModelError unless `name` is a file inside `folder`, which is where the model lies."""
    parts = PurePosixPath(name)
    foreign = (
        parts.is_absolute() or ".." in parts.parts or PureWindowsPath(name).drive or not _FILE_NAME.fullmatch(name)
    )
    if foreign or not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"{shown} wants external data at {name!r:.120}, outside its own folder; it was not opened")
    if not (folder / name).is_file():
        fix = "put it beside the model"
        raise ModelError(f"{shown} wants external data in {name!r:.120}, which is missing\n    fix: {fix}")


def _check_places(folder: Path, external: Sequence[External], shown: str) -> None:
    """Raise ModelError unless tensors lie within their files, have their sizes, and share no bytes but all of them."""
    ends: dict[str, tuple[int, int]] = {}
    for one in sorted(external, key=lambda one: (one.location, one.offset, one.length)):
        where = f"{shown}: a tensor in {one.location!r:.120}, {one.length} bytes from byte {one.offset} on,"
        size = (folder / one.location).stat().st_size
        if one.offset + one.length > size:
            raise ModelError(f"{where} ends outside that file of {size} bytes\n    fix: fetch the whole file")
        if one.length != one.size_bytes:
            raise ModelError(f"{where} takes {one.size_bytes} bytes by its type and shape")
        place = (one.offset, one.offset + one.length)
        before = ends.get(one.location, (0, 0))
        if one.length and place != before and one.offset < before[1]:
            raise ModelError(f"{where} overlaps another one")
        ends[one.location] = place if place[1] > before[1] else before


def _read_model(message: memoryview) -> OnnxFile:
    graph: memoryview | None = None
    external: list[External] = []
    for field, value in fields(message):
        if field == _MODEL_GRAPH:
            if graph is not None:  # protobuf would merge them, and a part would be unchecked
                raise WireError("it has two graph fields, expected one")
            graph = chunk(value)
        elif field == _MODEL_TRAINING:
            for inner, nested in fields(chunk(value)):
                if inner in (1, 2):
                    external.extend(_external_of_graph(chunk(nested), 1))
        elif field == _MODEL_FUNCTIONS:
            for inner, nested in fields(chunk(value)):
                if inner == 7:
                    external.extend(_external_of_node(chunk(nested), 1))
    if graph is None:
        raise WireError("it has no graph")
    return _read_graph(graph, external)


def _read_graph(graph: memoryview, external: list[External]) -> OnnxFile:
    inputs: list[ValueInfo] = []
    outputs: list[ValueInfo] = []
    known: set[str] = set()
    for field, value in fields(graph):
        if field in (_GRAPH_INPUT, _GRAPH_OUTPUT):
            (inputs if field == _GRAPH_INPUT else outputs).append(_value_info(chunk(value)))
        elif field == _GRAPH_INITIALIZER:
            known.add(next((text(part) for inner, part in fields(chunk(value)) if inner == _TENSOR_NAME), ""))
    if len(inputs) > PORTS_MAX or len(outputs) > PORTS_MAX or not outputs:
        raise WireError(f"{len(inputs)} inputs and {len(outputs)} outputs; from 1 to {PORTS_MAX} outputs are sensible")
    external.extend(_external_of_graph(graph, 0))
    return OnnxFile(tuple(i for i in inputs if i.name not in known), tuple(outputs), tuple(external))


def _value_info(message: memoryview) -> ValueInfo:
    name, kind, dtype, dims = "", "a value without a type", None, None
    for field, value in fields(message):
        if field == 1:
            name = text(value)
        elif field == 2:
            for form, inner in fields(chunk(value)):
                if form == _TYPE_TENSOR:
                    kind, dtype, dims = _tensor_type(chunk(inner))
                elif form in _TYPES:
                    kind, dtype, dims = _other_type(form, chunk(inner)), None, None
    if not name:
        raise WireError("an input or output without a name")
    return ValueInfo(name, dtype, dims, kind)


_TYPE_TENSOR, _TYPE_SEQUENCE, _TYPE_MAP = 1, 4, 5
_TYPES = {
    _TYPE_SEQUENCE: "a sequence",
    _TYPE_MAP: "a map",
    7: "an opaque value",
    8: "a sparse tensor",
    9: "an optional",
}
"""Fields of TypeProto besides the tensor, with the values that they mean."""


def _other_type(form: int, message: memoryview) -> str:
    """Return the kind of a value that is no tensor."""
    if form != _TYPE_SEQUENCE:
        return _TYPES[form]
    for field, value in fields(message):
        for inner, element in fields(chunk(value)) if field == 1 else ():
            if inner == _TYPE_MAP:
                return MAPS if _is_map_of_numbers(chunk(element)) else "a sequence of maps"
            if inner == _TYPE_TENSOR:
                return "a sequence of tensors"
    return _TYPES[form]


def _is_map_of_numbers(message: memoryview) -> bool:
    """Return True for a map from text or int64 to a number, as ZipMap gives them."""
    key, dtype = 0, None
    for field, value in fields(message):
        if field == 1:
            key = number(value)
        elif field == 2:
            tensors = [_tensor_type(chunk(inner)) for form, inner in fields(chunk(value)) if form == _TYPE_TENSOR]
            dtype = tensors[-1][1] if tensors else None
    return key in (_STRING, 7) and dtype in ("float32", "float64", "int64")


def _tensor_type(message: memoryview) -> tuple[str, str | None, tuple[int | str | None, ...] | None]:
    """Return kind, dtype and dims of a tensor."""
    element, dims = 0, None
    for field, value in fields(message):
        if field == 1:
            element = number(value)
        elif field == 2:
            dims = tuple(_dim(chunk(part)) for inner, part in fields(chunk(value)) if inner == 1)
            if len(dims) > RANK_MAX:
                raise WireError(f"a tensor of {len(dims)} dimensions")
    if element == _STRING:
        return TEXTS, None, dims
    if element not in DTYPES:
        return f"a tensor of {_OTHER_DTYPES.get(element, f'type {element}')}", None, dims
    return TENSOR, DTYPES[element], dims


def _dim(message: memoryview) -> int | str | None:
    dim: int | str | None = None
    for field, value in fields(message):
        if field == 1:
            size = number(value)
            dim = size if size >= 0 else None  # -1 is an old notation of 'any'
        elif field == 2:
            dim = text(value) or None
    return dim


def _external_of_graph(graph: memoryview, depth: int) -> Iterator[External]:
    """Yield the external files of a graph, its nodes' constants and its inner graphs."""
    if depth > DEPTH_MAX:
        raise WireError(f"graphs nested deeper than {DEPTH_MAX}")
    for field, value in fields(graph):
        if field == _GRAPH_NODE:
            yield from _external_of_node(chunk(value), depth)
        elif field == _GRAPH_INITIALIZER:
            yield from _external_of_tensor(chunk(value))
        elif field == _GRAPH_SPARSE:
            yield from _external_of_sparse(chunk(value))


def _external_of_node(node: memoryview, depth: int) -> Iterator[External]:
    for field, attribute in fields(node):
        if field != 5:
            continue
        for kind, value in fields(chunk(attribute)):
            if kind in (5, 10):  # t, tensors
                yield from _external_of_tensor(chunk(value))
            elif kind in (6, 11):  # g, graphs
                yield from _external_of_graph(chunk(value), depth + 1)
            elif kind in (22, 23):  # sparse_tensor, sparse_tensors
                yield from _external_of_sparse(chunk(value))


def _external_of_sparse(sparse: memoryview) -> Iterator[External]:
    for field, value in fields(sparse):
        if field in (1, 2):
            yield from _external_of_tensor(chunk(value))


def _external_of_tensor(tensor: memoryview) -> Iterator[External]:
    entries: dict[str, str] = {}
    dims: list[int] = []
    kind = 0
    for field, value in fields(tensor):
        if field == _TENSOR_EXTERNAL:
            parts = dict(fields(chunk(value)))
            key = text(parts.get(1, memoryview(b"")))
            if key in entries:
                raise WireError(f"external data with two values of {key!r:.40}")
            entries[key] = text(parts.get(2, memoryview(b"")))
        elif field == _TENSOR_DIMS and len(dims) <= RANK_MAX:
            dims += [number(value)] if isinstance(value, int) else _packed(value)
        elif field == _TENSOR_TYPE:
            kind = number(value)
    if not entries:
        return
    if len(dims) > RANK_MAX:
        raise WireError(f"a tensor of more than {RANK_MAX} dimensions")
    if kind not in _BITS or any(size < 0 for size in dims):
        raise WireError("external data of a tensor without a type of numbers, or with a negative size")
    size_bytes = -(-math.prod(dims) * _BITS[kind] // 8)
    offset, length = (_count(entries, key, default) for key, default in (("offset", 0), ("length", size_bytes)))
    yield External(entries.get("location", ""), offset, length, size_bytes)


def _packed(values: memoryview) -> list[int]:
    """Return the numbers of a packed field, up to one more than RANK_MAX."""
    at, found = 0, []
    while at < len(values):
        value, at = _varint(values, at)
        found.append(number(value))
        if len(found) > RANK_MAX:
            break
    return found


def _count(entries: Mapping[str, str], key: str, default: int) -> int:
    """Return a number of bytes in the entries of external data."""
    found = entries.get(key)
    if found is None:
        return default
    if not re.fullmatch("[0-9]{1,18}", found):
        raise WireError(f"external data whose {key} is {found!r:.40}, expected a number of bytes")
    return int(found)
