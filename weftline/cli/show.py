"""Formatting of output values: JSON for programs, text for people.

`as_json` gives plain json values; what is too large for that is refused with a hint, never cut. `as_text` gives lines
for a terminal; what is too large is described. Text from models is made safe for terminals: control characters, which
could move the cursor or retitle the window, are shown as escapes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftline.errors import LimitReached
from weftline.nodes.detections import Detections
from weftline.nodes.exact_numbers import from_bfloat16
from weftline.nodes.ports import AUDIO_HZ, PortType
from weftline.shm.spec import STAND_INS

JSON_ITEMS_MAX = 65_536
"""Most numbers of a tensor printed as json: the scores of any classifier, no picture."""

JSON_BYTES_MAX = 1 << 20
"""Most bytes of a value printed as base64, 1 MiB."""

TEXT_ITEMS_MAX = 16
"""Most numbers of a tensor, and elements of a list, shown to people one by one."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def as_json(name: str, value: Any, type: PortType) -> Any:
    """Return output `name` as a json value; LimitReached when it is too large for that.

    Detections are a list of {name, score, box}; arrays {dtype, shape, data} with nested lists; bytes {base64}; what is
    absent is null. NaN and infinities stay floats: `json.dumps` writes NaN, Infinity and -Infinity.
    """
    if isinstance(value, Detections):
        return value.to_json()
    if isinstance(value, np.ndarray | np.generic):
        return _tensor_json(name, np.asarray(value), type)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": _base64(name, bytes(value))}
    if type.item is not None and isinstance(value, list | tuple):
        return [as_json(name, one, type.item) for one in value]
    return value


def _tensor_json(name: str, array: np.ndarray, type: PortType) -> dict[str, Any]:
    if array.size > JSON_ITEMS_MAX:
        what = f"{array.dtype}{list(array.shape)}, more than the {JSON_ITEMS_MAX} numbers that are printed as json"
        raise LimitReached(f"output {name}: {what}\n    fix: add --save DIR, which writes it to a file")
    dtype, numbers = _true_numbers(array, type)
    return {"dtype": dtype, "shape": list(array.shape), "data": _without_complex(numbers.tolist())}


def _base64(name: str, data: bytes) -> str:
    if len(data) > JSON_BYTES_MAX:
        what = f"{len(data)} bytes, more than the {JSON_BYTES_MAX} that are printed as base64"
        raise LimitReached(f"output {name}: {what}\n    fix: add --save DIR, which writes them to a file")
    return base64.b64encode(data).decode("ascii")


def _without_complex(value: Any) -> Any:
    """Return nested lists in which complex numbers are their real and imaginary parts."""
    if isinstance(value, complex):
        return [value.real, value.imag]
    return [_without_complex(one) for one in value] if isinstance(value, list) else value


def as_text(name: str, value: Any, type: PortType) -> str:
    """Return output `name` as lines for a terminal, its name first."""
    if isinstance(value, Detections):
        return "\n".join([f"{name}: {printable(value.describe())}", *_boxes(value)])
    if isinstance(value, np.ndarray | np.generic):
        return f"{name}: {_tensor_text(np.asarray(value), type)}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{name}: {len(value)} bytes (--save DIR writes them)"
    if type.item is not None and type.item.kind not in ("text", "json") and isinstance(value, list | tuple):
        return "\n".join([f"{name}: a list of {len(value)}", *_elements(value, type.item)])
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
    lines = printable(text).splitlines()
    if len(lines) < 2:
        return f"{name}: {''.join(lines)}"
    return "\n".join([f"{name}:", *(f"  {line}" for line in lines)])


def _elements(values: Sequence[Any], type: PortType) -> list[str]:
    """Return indented lines for the first elements of a list."""
    shown = [as_text(str(place), one, type) for place, one in enumerate(values[:TEXT_ITEMS_MAX])]
    shown += [f"... and {len(values) - len(shown)} more"] if len(values) > len(shown) else []
    return [f"  {line}" for one in shown for line in one.splitlines()]


def printable(text: str) -> str:
    """Return text with control and direction characters as escapes; line feeds and tabs stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def _boxes(found: Detections) -> list[str]:
    widest = max(map(len, found.labels), default=0)
    return [
        f"  {printable(one['name']):<{widest}}  {one['score']:.2f}  [{', '.join(f'{edge:.0f}' for edge in one['box'])}]"
        for one in found.to_json()
    ]


def _tensor_text(array: np.ndarray, type: PortType) -> str:
    if type.kind == "image":
        return f"picture of {array.shape[1]} x {array.shape[0]} pixels (--save DIR writes it)"
    if type.kind == "audio":
        return f"sound of {len(array) / AUDIO_HZ:.1f} s (--save DIR writes it)"
    dtype, numbers = _true_numbers(array, type)
    what = f"{dtype}[{', '.join(map(str, array.shape))}]"
    if array.size <= TEXT_ITEMS_MAX:
        return f"{what} {numbers.tolist()}"
    if numbers.dtype.kind not in "iuf":
        return what
    return f"{what}, {numbers.min():.4g} to {numbers.max():.4g}, mean {numbers.mean(dtype=np.float64):.4g}"


def _true_numbers(array: np.ndarray, type: PortType) -> tuple[str, np.ndarray]:
    """Return the dtype's name and the numbers; bfloat16, which numpy holds as uint16, as what it means."""
    if type.dtype == "bfloat16" and array.dtype.name == STAND_INS["bfloat16"]:
        return "bfloat16", from_bfloat16(array)
    return array.dtype.name, array
