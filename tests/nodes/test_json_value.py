"""Values that functions and callers commonly hold become JSON; what cannot is named by its path."""

import datetime
import json
import math
import uuid
from collections import Counter, OrderedDict, deque, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
import torch

from weftline.engine.protocol.values import pack, unpack
from weftline.errors import InputError, StepError
from weftline.nodes.detections import Detections
from weftline.nodes.json_value import ARRAY_ITEMS_MAX, DEPTH_MAX, NotJson, encode_json, json_text, to_json
from weftline.nodes.media import to_value
from weftline.nodes.ports import PortType
from weftline.nodes.values import is_json


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 2


class Word(StrEnum):
    YES = "yes"


@dataclass
class Box:
    name: str
    corners: Any
    more: list[Any] = field(default_factory=list)


class Found(pydantic.BaseModel):
    box: tuple[int, int]
    at: datetime.date


class Point(msgspec.Struct):
    x: float


Pair = namedtuple("Pair", "a b")
JSON = PortType("json")
DAY = datetime.date(2026, 1, 2)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array(0.5, np.float16), 0.5),
        (np.array([[1, 2]], np.int32), [[1, 2]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([1, None, np.float32(2)], object), [1, None, 2.0]),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([1.5, 2.0], dtype=torch.bfloat16, requires_grad=True), [1.5, 2.0]),
        (Colour.RED, "red"),
        (Level.HIGH, 2),
        (Word.YES, "yes"),
        (Box("a", np.zeros(2, np.float32)), {"name": "a", "corners": [0.0, 0.0], "more": []}),
        (Found(box=(1, 2), at=DAY), {"box": [1, 2], "at": "2026-01-02"}),
        (Point(1.5), {"x": 1.5}),
        (Pair(1, (2, np.int8(3))), [1, [2, 3]]),
        (deque([1, 2]), [1, 2]),
        (range(3), [0, 1, 2]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (DAY, "2026-01-02"),
        (datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), "2026-01-02T03:00:00Z"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.50"), "1.50"),
        (Path("a/b.png"), "a/b.png"),
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": np.int64(1)}), {"a": 1}),
        (Counter(["x", "x"]), {"x": 2}),
        ({np.int64(7): "a", Colour.RED: "b", 3: "c"}, {"7": "a", "red": "b", "3": "c"}),
        (Detections(np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int32), ("cup",)),
         [{"name": "cup", "score": 1.0, "box": [0.0] * 4}]),
        ({"deep": [{"score": np.float32(0.25)}]}, {"deep": [{"score": 0.25}]}),
    ],
)  # fmt: skip
def test_what_people_hold_becomes_json_on_a_port_and_from_a_caller(value: Any, wanted: Any) -> None:
    travelled = unpack(pack(value, JSON, "x").inline(), {})
    assert travelled == wanted and type(travelled) is type(wanted)
    if not isinstance(value, Path):  # which names a file to read
        assert unpack(pack(to_value(JSON, value), JSON, "x").inline(), {}) == wanted


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "a", [1, [2]], (1, 2), {"a": {"b": []}}, []])
def test_a_plain_value_is_returned_itself(value: Any) -> None:
    assert to_json(value) is value and is_json(value)


def test_only_what_must_change_is_copied() -> None:
    kept = {"a": [1, 2]}
    made = to_json([kept, np.int8(1)])
    assert made == [kept, 1] and made[0] is kept and not is_json([kept, np.int8(1)])


def test_a_number_that_overflows_a_double_is_refused() -> None:
    with pytest.raises(NotJson, match="float64 does not hold"):
        to_json(np.array([np.finfo(np.longdouble).max]))


def test_json_text_has_nan_beside_null_and_other_types() -> None:
    value = {"a": [None, float("nan"), -math.inf], 1: datetime.date(2026, 1, 2), "n": 1 << 70}
    assert json_text(value) == b'{"a":[null,NaN,-Infinity],"1":"2026-01-02","n":1180591620717411303424}'
    assert json_text([1.5, "ü"]) == '[1.5,"ü"]'.encode()
    assert json.loads(json_text({"x": np.float32("inf")}, lambda one: one.item())) == {"x": math.inf}


def test_nan_is_passed_on() -> None:
    assert math.isnan(to_json({"x": np.float32("nan")})["x"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"boxes": [1, 2, 3, {"score": torch.device("cpu")}]}, "output.boxes[3].score: a torch.device is not JSON"),
        ([b"x"], "output[0]: a bytes is not JSON\n    fix: declare an output of type \"bytes\""),
        ({"a b": object()}, "output['a b']: an object is not JSON"),
        ((one for one in "ab"), "output: a generator is not JSON\n    fix: return a list: list(x)"),
        ({"k": {}.keys()}, "output.k: a dict_keys is not JSON\n    fix: return a list: list(x)"),
        ({"x": Box}, "output.x: the class Box is not JSON"),
        ({"b": Box("a", 1j)}, "output.b.corners: a complex is not JSON"),
        ({"x": np.zeros(2, complex)}, "output.x: an array of complex128 is not JSON"),
        ({(1, 2): 1}, "output: a key is a tuple, expected text"),
        ({"a": {1: "x", "1": "y"}}, "output.a: two keys are the same as text"),
        ({"s": {1, "a"}}, "output.s: a set whose elements have no order is not JSON"),
        ({"n": [1, 1 << 70]}, "output.n[1]: an integer of more than 64 bits"),
        ({"t": ["\ud800"]}, "output.t[0]: text with half of a surrogate pair"),
        ({"\ud800": 1}, "output['?']: text with half of a surrogate pair"),
    ],
)  # fmt: skip
def test_what_cannot_be_json_is_named_by_its_path(value: Any, said: str) -> None:
    with pytest.raises(StepError) as caught:
        pack(value, JSON, "output")
    assert str(caught.value).startswith(said)
    assert "\n    fix: " in str(caught.value)


def test_a_callers_value_that_cannot_be_json_is_named_by_its_path() -> None:
    with pytest.raises(InputError, match=r"^boxes\[1\]: a torch.device is not JSON"):
        to_value(JSON, {"boxes": [1, torch.device("cpu")]})


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_large_array_is_refused_with_the_port_to_declare(make: Any) -> None:
    assert len(to_json({"x": make(ARRAY_ITEMS_MAX)})["x"]) == ARRAY_ITEMS_MAX
    with pytest.raises(NotJson) as caught:
        to_json({"x": make((ARRAY_ITEMS_MAX + 1, 1))})
    said = caught.value.at("output")
    assert said.startswith("output.x: an array float") and f"at most {ARRAY_ITEMS_MAX} numbers" in said
    assert f"[{ARRAY_ITEMS_MAX + 1}, 1]" in said.partition("fix: ")[2]


def test_nesting_has_a_limit_and_a_circle_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    deep: Any = 1
    for _ in range(DEPTH_MAX):
        deep = [deep]
    assert encode_json(to_json(deep))
    for wrong in (circle, [deep], {"a": [deep]}):
        with pytest.raises(NotJson, match=f"nested deeper than {DEPTH_MAX}"):
            to_json(wrong)
