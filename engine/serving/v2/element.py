"""Decoding of one BYTES element to a port value: text, JSON, detections or bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftline.engine.protocol.packed import Packed
from weftline.engine.serving.v2 import strict_json
from weftline.errors import InputError
from weftline.nodes.detections import Detections

Element = bytes | memoryview | str
"""As it was sent: JSON has text, everything else bytes."""

NEITHER = "found an element that is neither text nor bytes"
_KEYS = {"name", "score", "box"}


def value_of(kind: str, element: object, type: str, values_max: int = strict_json.VALUES_MAX) -> Any:
    """Return an element as a value of a kind of port, or InputError.

    type:       the port's type as written, for the message.
    values_max: most values of an element that is a JSON document.
    """
    if isinstance(element, Packed | list):  # parsed already, by `JsonParser`
        return element
    if not isinstance(element, bytes | bytearray | memoryview | str):
        raise InputError(NEITHER)
    if kind in _DOCUMENTS:
        return _DOCUMENTS[kind](strict_json.loads(element, values_max=values_max), type)
    return _KINDS[kind](element, type)  # type: ignore[arg-type]


def element_bytes(elements: Sequence[object]) -> list[bytes]:
    """Return elements as the bytes that stand for them in raw contents; InputError for one that is a number."""
    if not all(isinstance(one, bytes | str) for one in elements):
        raise InputError(NEITHER)
    try:
        return [one.encode() if isinstance(one, str) else bytes(one) for one in elements]  # type: ignore[call-overload]
    except UnicodeEncodeError:
        raise InputError("found half of a surrogate pair, expected text") from None


def text_of(element: Element, type: str = "text") -> str:
    """Return UTF-8 as text; InputError for anything else, and for NUL, at which half of all libraries stop reading."""
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


def _bytes(element: Element, type: str) -> bytes:
    return text_of(element).encode() if isinstance(element, str) else bytes(element)


def _json(value: Any, type: str) -> Any:
    return value


def _list(value: Any, type: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"found JSON that is no list in an element of {type}, expected lists")
    return value


def _detections(value: Any, type: str) -> Detections:
    """Return the objects in a list of {name, score, box: [x1, y1, x2, y2]}; InputError for anything else."""
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
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3.4e38


_KINDS: dict[str, Callable[[Element, str], Any]] = {
    "text": text_of, "any": text_of, "bytes": _bytes, "image": _bytes, "audio": _bytes,
}  # fmt: skip
_DOCUMENTS: dict[str, Callable[[Any, str], Any]] = {"json": _json, "detections": _detections, "list": _list}
