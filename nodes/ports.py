"""Typed ports: what a node takes and gives, written the way people write it.

A port type is a word (`text`, `json`, `bytes`, `image`, `audio`, `detections`, `any`), a tensor such as
`float32[C, 32, 32]`, or a list of one of them, such as `list[image]`. It describes ONE item: the batch axis is never
part of it. A name stands for a size that is the same wherever it occurs in one step's ports; `?` is a size nobody needs
to know; `tensor` alone is any tensor.

What travels for each kind, as a node sees it:

    tensor       numpy array of the dtype and dims stated
    text         str
    json         None, bool, int, float, str, list or dict
    bytes        bytes
    image        uint8[H, W, 3] numpy array, RGB
    audio        float32[samples] numpy array, mono, 16 kHz, -1 to 1
    detections   nodes.detections.Detections
    list[T]      list of values of type T, such as list[image]; what a `map:` step takes and gives
    any          whatever the wired output gives; an input that takes every type, as a template's do

Tensors, pictures and recordings of ports that a node takes on its GPU (`Node.device_ports`) are DeviceTensors there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weftline.shm.spec import ITEM_BYTES

KINDS = ("tensor", "text", "json", "bytes", "image", "audio", "detections", "any")
AUDIO_HZ = 16_000
"""Sample rate of every `audio` value, in samples a second: what Whisper was trained on."""

LIST_DEPTH_MAX = 4
"""Deepest nesting of lists in a type."""

Dim = int | str
"""A size, a name for a size, or '?' for any size."""

_TENSOR = re.compile(r"^([a-z0-9_]+)\s*\[(.*)\]$", re.DOTALL)
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


@dataclass(frozen=True, slots=True)
class PortType:
    """The type of one item on a port.

    kind:  one of KINDS, or 'list'.
    dtype: for a tensor, its dtype, or None for any.
    dims:  for a tensor, its sizes, or None for any rank.
    item:  for a list, the type of its elements.
    """

    kind: str
    dtype: str | None = None
    dims: tuple[Dim, ...] | None = None
    item: PortType | None = None

    def __str__(self) -> str:
        if self.kind == "list":
            return f"list[{self.item}]"
        if self.kind != "tensor":
            return self.kind
        if self.dtype is None:
            return "tensor"
        return self.dtype if self.dims is None else f"{self.dtype}[{', '.join(map(str, self.dims))}]"

    @classmethod
    def parse(cls, text: str) -> PortType:
        """Return the type written in `text`, such as 'image' or 'float32[C, 32, 32]'; ValueError says what is wrong."""
        text = text.strip()
        if text in KINDS:
            return cls(text)
        if text in ITEM_BYTES:
            return cls("tensor", text)
        match = _TENSOR.match(text)
        if match and match[1] == "list":
            if text.count("list[") > LIST_DEPTH_MAX:
                raise ValueError(f"{text!r:.60}: lists are at most {LIST_DEPTH_MAX} deep")
            return list_of(cls.parse(match[2]))
        if not match:
            known = f"types are {', '.join(KINDS)}, a tensor like float32[3, H, W], or a list like list[image]"
            raise ValueError(f"{text!r:.60} is no port type; {known}")
        dtype, inside = match.groups()
        if dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {dtype!r:.40} in {text!r:.60}; known: {', '.join(ITEM_BYTES)}")
        dims = tuple(_parse_dim(part.strip(), text) for part in inside.split(",")) if inside.strip() else ()
        return cls("tensor", dtype, dims)


def list_of(type: PortType) -> PortType:
    """Return the type of a list whose elements are of `type`."""
    return PortType("list", item=type)


def _parse_dim(part: str, text: str) -> Dim:
    if part.isascii() and part.isdigit():
        return int(part)
    if part == "?" or _NAME.match(part):
        return part
    raise ValueError(f"{part!r:.40} in {text!r:.60} is no dimension; a dimension is a number, a name, or ?")


@dataclass(frozen=True, slots=True)
class Port:
    """A named, typed input or output of a node.

    optional: an input that may be left unconnected.
    pieces:   an output that is streamed piece by piece before its whole value is known, or an input that takes pieces.
    about:    one line for people.
    """

    name: str
    type: PortType
    optional: bool = False
    pieces: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True)
class Ports:
    """All inputs and outputs of one step, in the order they are shown."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def input(self, name: str) -> Port | None:
        return next((port for port in self.inputs if port.name == name), None)

    def output(self, name: str) -> Port | None:
        return next((port for port in self.outputs if port.name == name), None)


def port(name: str, type: str, *, optional: bool = False, pieces: bool = False, about: str = "") -> Port:
    """Return a Port whose type is written as text: `port("image", "uint8[H, W, 3]")`."""
    return Port(name, PortType.parse(type), optional, pieces, about)
