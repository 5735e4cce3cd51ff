"""Convert Python values to JSON values: None, bool, int, float, str, lists, and dicts with text keys.

`to_json` converts common Python values:

    NumPy scalars, torch tensors of no dimension  -> number, bool or text
    small NumPy arrays and torch tensors          -> nested lists, at most ARRAY_ITEMS_MAX numbers
    dataclasses, pydantic models, msgspec Structs -> a dict of their fields
    Detections                                    -> its list of objects
    tuples, named tuples, deques, ranges          -> lists
    sets                                          -> sorted lists, so that every run gives the same
    enums                                         -> their value
    datetime, date, time, timedelta               -> ISO 8601 text
    UUID, Decimal, paths                          -> text
    keys that are integers or enums               -> text

Anything else is refused with its path inside the value. A value that is plain already is returned itself, not copied.
NaN and infinite numbers are passed on; `finite: true` of a step refuses them.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np

from weftline.nodes.detections import Detections
from weftline.nodes.exact_numbers import converted, inexact
from weftline.shm.device.tensor import DeviceTensor

DEPTH_MAX = 64
"""Deepest nesting of a JSON value: beyond it encoders recurse without need."""

SURROGATE, SURROGATE_FIX = "text with half of a surrogate pair", "replace it; in Python, errors='replace' does"
TOO_DEEP = f"nested deeper than {DEPTH_MAX}"
LONG = "an integer of more than 64 bits"

ARRAY_ITEMS_MAX = 16_384
"""Most numbers of one array inside a JSON value, 128 x 128: as text each takes some 20 bytes, in a tensor 4."""

_PLAIN = frozenset({type(None), bool, int, float, str})
_TEXT = frozenset({str})
_TO_BUILTINS = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
_ITSELF = "return its fields as a dict, or its text: str(x)"
_BYTES_FIX = 'declare an output of type "bytes", or encode it: base64.b64encode(x).decode()'
_TENSOR_FIX = 'declare an output of a tensor type, such as {{"x": "{dtype}{dims}"}}'
_PATH_CHARS_MAX = 120


class NotJson(ValueError):
    """A value that is not JSON, with its path inside the whole, such as '.boxes[3].score'.

    line: of a text that is not JSON, from 1; 0: unknown.
    """

    def __init__(self, found: str, fix: str = "", path: str = "", line: int = 0) -> None:
        super().__init__(f"{found}\n    fix: {fix}" if fix else found)
        self.found, self.fix, self.path, self.line = found, fix, path, line

    def under(self, key: int | str) -> NotJson:
        """Return the problem with `key` in front of its path."""
        step = f"[{key}]" if isinstance(key, int) else f".{key}" if key.isidentifier() else f"[{key!r:.40}]"
        path = step + self.path
        return NotJson(self.found, self.fix, path if len(path) <= _PATH_CHARS_MAX else f"{path[:_PATH_CHARS_MAX]}...")

    def at(self, what: str) -> str:
        """Return the whole message: 'output.boxes[3].score: a torch.device is not JSON', and the fix."""
        where = f"{what}{self.path}" if what else self.path.removeprefix(".")
        return f"{where}: {self}" if where else str(self)


def to_json(value: Any) -> Any:
    """Convert `value` to a JSON value; a JSON value is returned itself. NotJson: path of the part that is not JSON."""
    return value if type(value) in _PLAIN else _converted(value, 0)


def encode_json(value: Any) -> bytes:
    """Return a JSON value as MessagePack; NotJson names a number or a text that cannot be encoded."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise unencodable(value) or NotJson(f"not JSON ({error})") from None


def json_text(value: Any, other: Callable[[Any], Any] | None = None) -> bytes:
    """Return a value as compact JSON text in UTF-8.

    Numbers that JSON lacks are NaN, Infinity and -Infinity, as Python's json module writes and reads them.

    other: converts a value of a type that msgspec does not encode. UnicodeEncodeError: text with a lone surrogate.
    """
    text = msgspec.json.encode(value, enc_hook=other)
    if b"null" not in text:
        return text
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=other)  # msgspec writes null for numbers JSON lacks
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def _converted(value: Any, depth: int) -> Any:
    kind = type(value)
    if depth >= DEPTH_MAX and kind not in _PLAIN:
        raise NotJson(TOO_DEEP, "flatten it")
    if kind is list or kind is tuple:
        return value if _PLAIN.issuperset(map(type, value)) else _list(value, depth)
    if kind is dict:
        plain = _PLAIN.issuperset(map(type, value.values())) and _TEXT.issuperset(map(type, value))
        return value if plain else _dict(value, depth)
    simpler = _simpler(value)
    return simpler if type(simpler) in _PLAIN else _converted(simpler, depth)


def _list(values: Sequence[Any], depth: int) -> Sequence[Any]:
    made: list[Any] | None = None
    for place, value in enumerate(values):
        one = value if type(value) in _PLAIN else _member(value, depth, place)
        if one is not value and made is None:
            made = list(values[:place])
        if made is not None:
            made.append(one)
    return values if made is None else made


def _member(value: Any, depth: int, place: int | str) -> Any:
    try:
        return _converted(value, depth + 1)
    except NotJson as error:
        raise error.under(place) from None


def _dict(values: dict[Any, Any], depth: int) -> dict[str, Any]:
    made, changed = {}, False
    for key, value in values.items():
        name = key if type(key) is str else _key(key)
        one = value if type(value) in _PLAIN else _member(value, depth, name)
        changed = changed or one is not value or name is not key
        made[name] = one
    if len(made) < len(values):
        raise NotJson("two keys are the same as text", "use keys that are text")
    return made if changed else values


def _key(key: Any) -> str:
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return str(key)
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return str(int(key))
    raise NotJson(f"a key is {_named(key)}, expected text", "use keys that are text or integers")


def _simpler(value: Any) -> Any:
    """Return a value of a plain type, or of a simpler one: a list or a dict. NotJson when there is none."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray | np.generic):
        return _array(value)
    if isinstance(value, str | int | float):  # of a class derived from them
        return str(value) if isinstance(value, str) else int(value) if isinstance(value, int) else float(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise NotJson(f"{_named(value)} is not JSON", _BYTES_FIX)
    if isinstance(value, Detections):
        return value.to_json()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, _TO_BUILTINS):
        written = None if type(value) in _TO_BUILTINS else getattr(value, "isoformat", None)
        return msgspec.to_builtins(value) if written is None else written()  # those of pandas have nanoseconds
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return _sorted(value)
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(value, type):
        raise NotJson(f"the class {value.__qualname__} is not JSON", "make an object of it, or return its name")
    return _fields(value)


def _fields(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {name: getattr(value, field) for name, field in names}
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump()
    if isinstance(value, DeviceTensor):
        value = value.torch()
    if hasattr(value, "detach") and hasattr(value, "tolist"):
        return _tensor(value)
    if isinstance(value, Iterable):
        raise NotJson(f"{_named(value)} is not JSON", "return a list: list(x)" if _is_lazy(value) else _ITSELF)
    raise NotJson(f"{_named(value)} is not JSON", _ITSELF)


def _is_lazy(value: Any) -> bool:
    return hasattr(value, "__next__") or type(value).__name__.startswith("dict_")


def _array(value: Any) -> Any:
    kind, dtype = value.dtype.kind, value.dtype
    if value.size > ARRAY_ITEMS_MAX:
        raise _too_large(str(dtype), value.shape)
    if kind == "M":
        return np.datetime_as_string(value).tolist()
    if kind == "f" and dtype.itemsize > 8:
        doubles, wrong = converted(value, "float64")
        if wrong is not None:
            raise NotJson(inexact("float64"), "return them as text: str(x)")
        return doubles.tolist()
    if kind in "biufUO" or dtype.name == "bfloat16":
        return value.tolist()
    if kind == "S":
        raise NotJson(f"an array of bytes ({dtype}) is not JSON", _BYTES_FIX)
    raise NotJson(f"{'an array' if value.ndim else 'a number'} of {dtype} is not JSON", _ITSELF)


def _tensor(value: Any) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.numel() > ARRAY_ITEMS_MAX:
        raise _too_large(dtype, tuple(value.shape))
    if value.is_complex():
        raise NotJson(f"a tensor of {dtype} is not JSON", _ITSELF)
    return value.tolist()


def _too_large(dtype: str, shape: tuple[int, ...]) -> NotJson:
    dims = f"[{', '.join(map(str, shape))}]"
    found = f"an array {dtype}{dims} inside json, which holds arrays of at most {ARRAY_ITEMS_MAX} numbers"
    return NotJson(found, _TENSOR_FIX.format(dtype=dtype, dims=dims))


def _sorted(values: Iterable[Any]) -> list[Any]:
    try:
        return sorted(to_json(list(values)))
    except TypeError:
        raise NotJson("a set whose elements have no order is not JSON", "return a list, in an order of yours") from None


def _named(value: Any) -> str:
    """Return a value's type for people: 'a set', 'a torch.device', 'a PIL.Image.Image'."""
    kind = type(value)
    own = kind.__module__ == "builtins" or kind.__module__.startswith(("weftline_user_", "__main__"))
    name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def unencodable(value: Any, large_integers: bool = False, depth: int = 0) -> NotJson | None:
    """Find the first part of a JSON value that MessagePack cannot encode, is nested too deep, or is a NotJson itself.

    large_integers: integers beyond 64 bits are none.
    """
    if isinstance(value, NotJson):
        return value
    if not isinstance(value, dict | list | tuple):
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            return None if large_integers else NotJson(LONG, "write it as text, or as a float")
        except UnicodeEncodeError:
            return NotJson(SURROGATE, SURROGATE_FIX)
        return None
    if depth == DEPTH_MAX:
        return NotJson(TOO_DEEP, "flatten it")
    pairs: Iterable[tuple[int | str, Any]] = enumerate(value)
    if isinstance(value, dict):
        pairs = ((key, part) for key, one in value.items() for part in (key, one))
    for key, one in pairs:
        if (found := unencodable(one, large_integers, depth + 1)) is not None:
            return found.under(key.encode(errors="replace").decode() if isinstance(key, str) else key)
    return None
