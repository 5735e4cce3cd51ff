"""v2 representations of each port type, for requests and metadata.

port             as BYTES                     as numbers
text             UTF-8, no NUL                -
json             a JSON document              one number, of any datatype
bytes            the bytes                    -
image            an encoded picture           UINT8 [H, W, 3]
audio            an encoded recording         FP32 [samples], mono, 16 kHz
detections       JSON: name, score, box each  -
tensor           -                            its dtype and dims (`datatypes.py`)
list[T]          one element for each         T's numbers with one dimension more, in front
list[list[T]]    a JSON document for each     -
any              text                         any
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from weftline.engine.serving.v2.datatypes import BYTES, datatype_of, trailing_dims
from weftline.nodes.ports import Dim, PortType

SCALAR_KINDS = frozenset({"text", "json", "bytes", "image", "audio", "detections", "any"})
"""Kinds of which one element of a BYTES tensor is one value."""

MEDIA = frozenset({"image", "audio", "bytes"})
"""Kinds that a JSON document cannot hold. Above all no text from a client may stand where a file could be named."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A value as numbers.

    datatype: v2's name; None: any.
    dims:     of one value, in v2; None: any.
    listed:   the first of the dims counts the elements of a list.
    dtype:    our dtype; None: whatever the datatype stands for.
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
    """How values of a port may be sent.

    element: what one element of a BYTES tensor is: a kind of SCALAR_KINDS, or 'list' for a JSON document of one; ''
             when the port takes no BYTES.
    listed:  the elements of a BYTES tensor make one list.
    numbers: as numbers; None: not at all.
    """

    element: str
    listed: bool
    numbers: Numbers | None

    def __str__(self) -> str:
        encoded = f"{BYTES} {'[n]' if self.listed else '[1]'}" if self.element else ""
        return " or ".join(filter(None, (encoded, str(self.numbers) if self.numbers else "")))


@lru_cache(maxsize=4096)
def form_of(type: str) -> ValueForm:
    """Return the form of a port whose type is written as `type`."""
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
    """Return what the lists of a type hold in the end."""
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
