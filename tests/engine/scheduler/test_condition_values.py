"""Test the values conditions read, and the errors for values they cannot read."""

import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from weftline.engine.protocol.messages import ABSENT, Value
from weftline.engine.protocol.values import pack
from weftline.engine.scheduler.condition_values import peek
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType
from weftline.shm.block import Place


def tensor(dtype: str, code: str, value: Any, shape: tuple[int, ...] = ()) -> Value:
    return Value("tensor", dtype, shape, struct.pack(f"={code}", value))


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (Value("json", data=msgspec.msgpack.encode({"a": [1, None]})), {"a": [1, None]}),
        (Value("text", data="grün".encode()), "grün"),
        (tensor("bool", "?", True), True),
        (tensor("int64", "q", -3, (1, 1)), -3),
        (tensor("float16", "e", 0.5), 0.5),
        (ABSENT, None),
        (Value("list", items=(ABSENT, ABSENT)), [None, None]),
        (Value("list", items=(Value("text", data=b"a"), Value("bytes", data=b"b"))), ["a", None]),
        (Value("tensor", "int16", (2,), b"\x01\x00\x02\x00"), [1, 2]),
        (Value("tensor", "int16", (0,), b""), []),
        (Value("list", items=()), []),
    ],
)
def test_small_values_are_seen(value: Value, seen: Any) -> None:
    assert peek(value) == seen


def test_of_detections_the_labels_are_seen() -> None:
    found = Detections(np.zeros((2, 4), "float32"), np.zeros(2, "float32"), np.array([1, 0], "int32"), ("cat", "dog"))
    assert peek(pack(found, PortType("detections"), "found").inline()) == ["dog", "cat"]


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        (Value("json", place=Place(1, 0, 70_000, 0, 1)), "a condition reads a json of 70000 bytes; the most is"),
        (Value("tensor", "float32", (2, 2), bytes(16)), r"a condition cannot read float32\[2, 2\]"),
        (Value("tensor", "float32", (3,), bytes(8)), "8 bytes that hold no tensor"),
        (Value("bytes", data=b"x"), "a condition cannot read bytes"),
        (Value("json", data=b"\xc1"), "1 bytes that hold no json"),
        (Value("text", data=b"\xff"), "1 bytes that hold no text"),
        (Value("tensor", "float32", (), b"x"), "1 bytes that hold no tensor"),
        (Value("detections", data=msgspec.msgpack.encode([1, 2])), "3 bytes that hold no detections"),
        (
            Value("detections", data=msgspec.msgpack.encode([["cat"], b"", b"", bytes([5, 0, 0, 0])])),
            "hold no detections",
        ),
    ],
)
def test_what_cannot_be_seen_is_named(value: Value, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        peek(value)
