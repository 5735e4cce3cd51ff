"""Port types: the types of a node's inputs and outputs, and their notation in pipeline files.

A port type is a word (`text`, `json`, `bytes`, `image`, `audio`, `detections`, `any`), a tensor such as
`float32[C, 32, 32]`, or a list of one of them, such as `list[image]`. It describes ONE item: the batch axis is never
part of it. A name stands for a size that is the same wherever it occurs in one step's ports; `?` is any size; `tensor`
alone is any tensor.

Python value of each kind:

    tensor       numpy array of the dtype and dims stated
    text         str
    json         None, bool, int, float, str, list or dict
    bytes        bytes
    image        uint8[H, W, 3] numpy array, RGB
    audio        float32[samples] numpy array, mono, 16 kHz, -1 to 1
    detections   nodes.detections.Detections
    list[T]      list of values of type T, such as list[image]; input and output of a `map:` step
    any          the type of the connected output; an input that accepts every type, such as a template's

Tensor, image and audio values of the ports in `Node.device_ports` are DeviceTensors on a GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from weftline.fields import DERIVED, LOAD
from weftline.shm.spec import ITEM_BYTES

KINDS = ("tensor", "text", "json", "bytes", "image", "audio", "detections", "any")
AUDIO_HZ = 16_000
"""Sample rate of every `audio` value, in samples per second; the rate that Whisper was trained on."""

LIST_DEPTH_MAX = 4
"""Deepest nesting of lists in a type."""

_OTHER_NAMES = {
    "str": "text", "string": "text", "int": "json", "float": "json", "bool": "json", "number": "json", "dict": "json",
    "object": "json", "list": "list[json]", "bytearray": "bytes", "blob": "bytes", "ndarray": "tensor",
    "array": "tensor", "picture": "image", "img": "image", "pil.image": "image", "pil.image.image": "image",
    "photo": "image", "sound": "audio", "recording": "audio", "wav": "audio", "boxes": "detections",
    "double": "float64", "half": "float16", "long": "int64", "f32": "float32", "fp32": "float32", "fp16": "float16",
    "bf16": "bfloat16", "float_": "float64", "integer": "json", "boolean": "json",
}  # fmt: skip
"""Port types by what other languages and libraries call them, in lower case."""

Dim = int | str
"""A size, a name for a size, or '?' for any size."""

_TENSOR = re.compile(r"^([a-z0-9_]+)\s*\[(.*)\]$", re.DOTALL)
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


@dataclass(frozen=True, slots=True)
class PortType:
    """The type of one item of a port.

    kind:  'tensor', 'text', 'json', 'bytes', 'image', 'audio', 'detections', 'any' or 'list'.
    dtype: dtype of a tensor, such as 'float32'; None for any.
    dims:  sizes of a tensor without the batch axis: numbers, names, or '?'; None for any rank.
    item:  element type of a list.
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
        """Parse a type such as 'image' or 'float32[C, 32, 32]'. ValueError: `text` is no port type."""
        return _parse(text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> PortType:
    text = text.strip()
    if text in KINDS:
        return PortType(text)
    if (meant := _meant(text)) != text:
        raise ValueError(f"{text!r:.60} is no port type; did you mean {meant}?")
    if text in ITEM_BYTES:
        return PortType("tensor", text)
    match = _TENSOR.match(text)
    if match and match[1] == "list":
        if text.count("list[") > LIST_DEPTH_MAX:
            raise ValueError(f"{text!r:.60}: lists are at most {LIST_DEPTH_MAX} deep")
        return list_of(_parse(match[2]))
    if not match:
        known = f"types are {', '.join(KINDS)}, a tensor like float32[3, H, W], or a list like list[image]"
        raise ValueError(f"{text!r:.60} is no port type; {known}")
    dtype, inside = match.groups()
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r:.40} in {text!r:.60}; known: {', '.join(ITEM_BYTES)}")
    dims = tuple(_parse_dim(part.strip(), text) for part in inside.split(",")) if inside.strip() else ()
    return PortType("tensor", dtype, dims)


def _meant(text: str) -> str:
    """Return the port type of a Python, numpy or PIL type name, in any case; `text` itself if there is none."""
    name, bracket, inside = text.partition("[")
    short = name.strip().lower().removeprefix("np.").removeprefix("numpy.").removeprefix("torch.")
    if short == "list" and bracket:
        return f"list[{_meant(inside.removesuffix(']').strip())}]"
    word = _OTHER_NAMES.get(short, short)
    known = word in ITEM_BYTES or (not bracket and (word in KINDS or word.startswith("list[")))
    if not known or word == name:
        return text
    return f"{word}{bracket}{inside}"


def list_of(type: PortType) -> PortType:
    """Return the list type with elements of `type`."""
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

    name:     name of the port, a key of the step's `inputs`.
    type:     type of one item.
    optional: an input that may be left unconnected.
    pieces:   an output that is streamed in chunks, or an input that accepts chunks.
    about:    one line of documentation.
    labels:   names of an output's classes, by index: of a vector's elements, or of a classifier's scores.
    listed:   the list type of a json output whose values are lists: its type where a reader takes a list.
    """

    name: Annotated[str, LOAD]
    type: Annotated[PortType, LOAD]
    optional: Annotated[bool, DERIVED] = False
    pieces: Annotated[bool, DERIVED] = False
    about: Annotated[str, DERIVED] = ""
    labels: Annotated[tuple[str, ...], DERIVED] = ()
    listed: Annotated[PortType | None, DERIVED] = None


@dataclass(frozen=True, slots=True)
class Ports:
    """All input and output ports of one step, in display order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def input(self, name: str) -> Port | None:
        """Return the input port of that name, or None."""
        return next((port for port in self.inputs if port.name == name), None)

    def output(self, name: str) -> Port | None:
        """Return the output port of that name, or None."""
        return next((port for port in self.outputs if port.name == name), None)


def port(
    name: str,
    type: str,
    *,
    optional: bool = False,
    pieces: bool = False,
    about: str = "",
    labels: tuple[str, ...] = (),
) -> Port:
    """Return a Port with its type parsed from text: `port("image", "uint8[H, W, 3]")`.

    optional, pieces, about, labels: as in `Port`.

    ValueError: `type` is no port type.
    """
    return Port(name, PortType.parse(type), optional, pieces, about, labels)
