"""v2 datatypes, and the v2 representations of each port type.

    BOOL UINT8 ... UINT64 INT8 ... INT64 FP32 FP64    the same in numpy
    FP16                                              float16
    BF16                                              bfloat16: its bits as uint16 in numpy
    BYTES                                             elements of any length (`elements.py`)

v2 lacks three of our dtypes. float8_e4m3fn and float8_e5m2 are sent as UINT8, their bits; complex64 as FP32 with a last
dimension of 2 for the real and the imaginary part. Everything is little-endian and row-major.

Port type        as BYTES                     as numbers
text             UTF-8, no NUL                -
json             a JSON document              one number, of any datatype
bytes            the bytes                    -
image            an encoded picture           UINT8 [H, W, 3]
audio            an encoded recording         FP32 [samples], mono, 16 kHz
detections       JSON: name, score, box each  -
tensor           -                            its dtype and dims
list[T]          one element for each         T's numbers with one dimension more, in front
list[list[T]]    a JSON document for each     -
any              text; with parameter `json` JSON  any
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from weftline.errors import InputError
from weftline.nodes.exact_numbers import from_bfloat16, numbers
from weftline.nodes.ports import Dim, PortType
from weftline.shm.spec import ITEM_BYTES, STAND_INS

BYTES = "BYTES"

DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "BF16": "bfloat16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
"""Our dtype of each v2 datatype except BYTES."""

NUMPY: dict[str, np.dtype] = {name: np.dtype(STAND_INS.get(dtype, dtype)) for name, dtype in DTYPES.items()}
"""numpy dtype of each v2 datatype except BYTES."""

SIZES: dict[str, int] = {name: ITEM_BYTES[dtype] for name, dtype in DTYPES.items()}
"""Element size in bytes of each v2 datatype except BYTES."""

_SENT_AS: dict[str, str] = {dtype: name for name, dtype in DTYPES.items()} | {
    "float8_e4m3fn": "UINT8", "float8_e5m2": "UINT8", "complex64": "FP32",
}  # fmt: skip

MEDIA = frozenset({"image", "audio", "bytes"})
"""Kinds without a JSON form. In particular, no text of a client may be read as the name of a file."""

if sys.byteorder != "little":
    raise ImportError("weftline serves little-endian machines only: v2's tensors are little-endian")


def datatype_of(dtype: str) -> str:
    """Return the v2 datatype of our `dtype`; KeyError for an unknown one."""
    return _SENT_AS[dtype]


def trailing_dims(dtype: str | None) -> tuple[int, ...]:
    """Return the dimensions that v2 appends to a tensor of our `dtype`: (2,) for complex64."""
    return (2,) if dtype == "complex64" else ()


# elements


def array_of(datatype: str, values: Sequence[object]) -> np.ndarray:
    """Return elements as a flat array; InputError if one does not fit the datatype.

    BOOL accepts booleans, integers accept integers, floats accept integers, floats, NaN and infinities, each if the
    datatype holds it by the rule of `exact_numbers`.
    """
    allowed, expected = _ELEMENTS["b" if datatype == "BOOL" else NUMPY[datatype].kind if datatype != "BF16" else "f"]
    if not set(map(type, values)) <= allowed:
        raise InputError(f"found elements that {datatype} cannot hold, expected {expected}")
    try:
        return numbers(values, DTYPES[datatype], datatype)
    except InputError as error:
        raise InputError(f"found {error}") from None


_ELEMENTS: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset({bool}), "true and false"),
    "i": (frozenset({int}), "integers"),
    "u": (frozenset({int}), "integers"),
    "f": (frozenset({int, float}), "numbers"),
}
"""Types of JSON elements by the kind of their numpy dtype."""


def number_of(datatype: str, element: np.ndarray) -> bool | int | float:
    """Return one element as a Python number."""
    number: bool | int | float = (from_bfloat16(element) if datatype == "BF16" else element).item()
    return number


# port types


@dataclass(frozen=True, slots=True)
class Numbers:
    """Representation of a value as numbers.

    datatype: v2 datatype; None: any.
    dims:     of one value, in v2; None: any.
    listed:   the first of the dims counts the elements of a list.
    dtype:    our dtype; None: that of the datatype.
    scalar:   a single number, which becomes a Python number.
    """

    datatype: str | None
    dims: tuple[Dim, ...] | None
    listed: bool = False
    dtype: str | None = None
    scalar: bool = False

    def __str__(self) -> str:
        dims = "any shape" if self.dims is None else f"[{', '.join(map(str, self.dims))}]"
        return "one number" if self.scalar else f"{self.datatype or 'any datatype'} {dims}"


@dataclass(frozen=True, slots=True)
class ValueForm:
    """The v2 representations of a port type.

    element: kind of one element of a BYTES tensor, or 'list' for a JSON document of one; '' without BYTES.
    listed:  the elements of a BYTES tensor make one list.
    numbers: as numbers; None: not possible.
    """

    element: str
    listed: bool
    numbers: Numbers | None

    def __str__(self) -> str:
        encoded = f"{BYTES} {'[n]' if self.listed else '[1]'}" if self.element else ""
        return " or ".join(filter(None, (encoded, str(self.numbers) if self.numbers else "")))


@lru_cache(maxsize=4096)
def form_of(type: str) -> ValueForm:
    """Return the v2 representations of a port type, given as written in a pipeline file."""
    return _form(PortType.parse(type))


def _form(type: PortType) -> ValueForm:
    if type.kind == "tensor":
        return ValueForm("", False, _numbers(type))
    if type.kind != "list":
        return ValueForm(type.kind, False, _numbers(type))
    item = type.item or PortType("any")
    numbers = None if item.kind in ("list", "any", "json") else _numbers(item)
    if numbers is not None:
        dims = None if numbers.dims is None else ("?", *numbers.dims)
        numbers = Numbers(numbers.datatype, dims, True, numbers.dtype)
    element = "" if item.kind == "tensor" or (item.kind == "list" and innermost(item).kind in MEDIA) else item.kind
    return ValueForm(element, True, numbers)


def innermost(type: PortType) -> PortType:
    """Return the element type of nested lists."""
    while type.kind == "list":
        type = type.item or PortType("any")
    return type


def _numbers(type: PortType) -> Numbers | None:
    if type.kind == "tensor":
        dims = None if type.dims is None else (*type.dims, *trailing_dims(type.dtype))
        return Numbers(type.dtype and datatype_of(type.dtype), dims, dtype=type.dtype)
    return _OF_KIND.get(type.kind)


_OF_KIND = {
    "image": Numbers("UINT8", ("H", "W", 3), dtype="uint8"),
    "audio": Numbers("FP32", ("samples",), dtype="float32"),
    "json": Numbers(None, (), scalar=True),
    "any": Numbers(None, None),
}
