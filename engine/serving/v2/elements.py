"""Elements of BYTES tensors: length prefixes, and decoding to port values.

    03 00 00 00 'a' 'b' 'c'  00 00 00 00  01 00 00 00 00      three elements: abc, empty, a NUL

Every length is checked against the remaining bytes first. Long elements are views. Short ones are copies: a view is an
object larger than they are, so a message of nothing but lengths would grow in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import msgspec
import numpy as np

from weftline.engine.protocol.packed import Packed
from weftline.errors import InputError
from weftline.nodes.detections import Detections
from weftline.nodes.strict_json import VALUES, VALUES_MAX, loads

PREFIX_BYTES = 4
"""Size of a length prefix."""

ELEMENT_BYTES_MAX = (1 << 32) - 1
"""Longest element, by its prefix."""

VIEW_BYTES_MIN = 4 << 10
"""Size from which an element is a view."""


class Written(msgspec.Struct, frozen=True):
    """An output as raw contents already: `count` elements, in a list or a single one."""

    raw: bytes
    count: int


Element = bytes | memoryview | str
"""A received element: text from JSON, bytes from everything else."""

JSON = "json"
"""Parameter of a tensor of type `any`: its elements are JSON, not text."""

NOT_AN_ELEMENT = "found an element that is neither text nor bytes"
_KEYS = {"name", "score", "box"}
_length = Struct("<I").unpack_from


# raw contents


def decode_elements(raw: bytes | bytearray | memoryview, count: int) -> list[bytes | memoryview]:
    """Return the `count` elements of raw contents: views of them, or bytes if short.

    InputError if a length runs past the end, or if the number of elements is another.
    """
    view, size = memoryview(raw), len(raw)
    if size < count * PREFIX_BYTES:
        raise InputError(f"found {size} bytes, expected {count} elements, each with a four-byte length before it")
    elements: list[bytes | memoryview] = []
    at = 0
    for place in range(count):
        begin = at + PREFIX_BYTES
        if begin <= size:
            at = begin + _length(raw, at)[0]
        if begin > size or at > size:
            raise InputError(f"element {place} of {count} runs past the end of the tensor's {size} bytes")
        elements.append(view[begin:at] if at - begin >= VIEW_BYTES_MIN else bytes(raw[begin:at]))
    if at != size:
        raise InputError(f"found {size - at} bytes after the {count} elements of the shape, expected none")
    return elements


def encode_elements(elements: Sequence[bytes | memoryview]) -> bytes:
    """Return the raw contents of a tensor; InputError for an element of 4 GiB or more."""
    if any(len(one) > ELEMENT_BYTES_MAX for one in elements):
        raise InputError("found an element of 4 GiB or more, which a BYTES tensor cannot carry")
    if len(elements) == 1:
        return b"".join((len(elements[0]).to_bytes(PREFIX_BYTES, "little"), elements[0]))
    return b"".join([part for one in elements for part in (len(one).to_bytes(PREFIX_BYTES, "little"), one)])


def element_bytes(elements: Sequence[object]) -> list[bytes]:
    """Return elements from JSON or typed contents as bytes; InputError for a number."""
    if not all(isinstance(one, bytes | str) for one in elements):
        raise InputError(NOT_AN_ELEMENT)
    try:
        return [one.encode() if isinstance(one, str) else bytes(one) for one in elements]  # type: ignore[call-overload]
    except UnicodeEncodeError:
        raise InputError("found half of a surrogate pair, expected text") from None


# values


def value_of(kind: str, element: object, type: str, values_max: int = VALUES_MAX) -> Any:
    """Decode an element for a kind of port; InputError if it is invalid.

    type:       port type as written, for the message.
    values_max: most values of a JSON document.
    """
    if isinstance(element, Packed | list):  # parsed by `JsonParser`
        return element
    if not isinstance(element, bytes | bytearray | memoryview | str):
        raise InputError(NOT_AN_ELEMENT)
    if kind in _DOCUMENTS:
        return _DOCUMENTS[kind](loads(element, values_max=values_max, rules=VALUES), type)
    return _KINDS[kind](element, type)  # type: ignore[arg-type]


def text_of(element: Element, type: str = "text") -> str:
    """Decode UTF-8; InputError for invalid text and for NUL, which truncates C strings."""
    try:
        if isinstance(element, str):
            element.encode()
            text = element
        else:
            text = str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"found bytes that are not UTF-8 at {error.start}, expected text") from None
    except UnicodeEncodeError as error:
        raise InputError(f"found half of a surrogate pair at {error.start}, expected text") from None
    if "\0" in text:
        raise InputError(f"found a NUL at {text.index(chr(0))}, expected text without")
    return text


def _bytes(element: Element, type: str) -> bytes | memoryview:
    return element if not isinstance(element, str) else element_bytes((element,))[0]


def _json(value: Any, type: str) -> Any:
    return value


def _list(value: Any, type: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"found JSON that is no list in an element of {type}, expected lists")
    return value


def _detections(value: Any, type: str) -> Detections:
    """Decode a list of {name, score, box: [x1, y1, x2, y2]}; InputError for anything else."""
    expected = InputError(
        "found something else than detections, expected a list of {name, score, box: [x1, y1, x2, y2]}"
    )
    if not isinstance(value, list):
        raise expected
    names: dict[str, int] = {}
    for one in value:
        if not isinstance(one, dict) or one.keys() != _KEYS or not isinstance(one["name"], str):
            raise expected
        box, score = one["box"], one["score"]
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, (*box, score))):
            raise expected
        names.setdefault(one["name"], len(names))
    return Detections(
        np.array([one["box"] for one in value], np.float32).reshape(-1, 4),
        np.array([one["score"] for one in value], np.float32),
        np.array([names[one["name"]] for one in value], np.int32),
        tuple(names),
    )


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < 3.4e38 or not math.isfinite(value)


_KINDS: dict[str, Callable[[Element, str], Any]] = {
    "text": text_of, "any": text_of, "bytes": _bytes, "image": _bytes, "audio": _bytes,
}  # fmt: skip
_DOCUMENTS: dict[str, Callable[[Any, str], Any]] = {"json": _json, "detections": _detections, "list": _list}
