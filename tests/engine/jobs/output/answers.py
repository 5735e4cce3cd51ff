"""Blocks and answers made by hand, and a value of every port type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from weftline.engine.jobs.output.columns import Columns, columns_of
from weftline.engine.jobs.output.values import to_columns
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType

FAILED = RowError("read", "StepError", "no")

FOUND = Detections(
    np.array([[1, 2, 3, 4], [5, 6, 7, 8.5]], np.float32),
    np.array([0.5, 0.25], np.float32),
    np.array([1, 0], np.int32),
    ("circle", "star"),
)
NOTHING = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32), ("circle", "star"))
PICTURE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
SOUND = np.linspace(-1.5, 1.5, 1600, dtype=np.float32)

EVERY: dict[str, tuple[list[Any], list[Any]]] = {
    "text": (["a", "é\n\0\r", ""], ["a", "é\n\0\r", ""]),
    "json": (
        [{"b": [1, 2.5, None], "a": 2**70}, "x", []],
        ['{"b":[1,2.5,null],"a":1180591620717411303424}', '"x"', "[]"],
    ),
    "bytes": ([b"\0\xff", bytearray(b"x"), memoryview(b"")], [b"\0\xff", b"x", b""]),
    "any": ([FOUND, np.arange(3), {"a": b"ab"}], None),
    "float32[]": ([np.float32(1.5), np.array(2.5, np.float32), 3], [1.5, 2.5, 3.0]),
    "bool[]": ([np.bool_(True), np.array(False), True], [True, False, True]),
    "uint8[]": ([1, np.uint8(255), 0], [1, 255, 0]),
    "uint64[]": ([2**64 - 1, 0, 1], [2**64 - 1, 0, 1]),
    "float16[2]": ([np.array([1, 2], np.float16)] * 3, [[1.0, 2.0]] * 3),
    "int64[N]": ([np.arange(2), np.arange(0), np.array([7])], [[0, 1], [], [7]]),
    "int32[2, 3]": ([np.arange(6, dtype=np.int32).reshape(2, 3)] * 3, [[[0, 1, 2], [3, 4, 5]]] * 3),
    "float32[N, 2]": (
        [np.arange(2, dtype=np.float32).reshape(1, 2), np.zeros((0, 2), np.float32), np.ones((2, 2), np.float32)],
        [
            {"shape": [1, 2], "data": [0.0, 1.0]},
            {"shape": [0, 2], "data": []},
            {"shape": [2, 2], "data": [1.0, 1.0, 1.0, 1.0]},
        ],
    ),
    "float64": ([np.float64(1), np.ones(1), np.ones((1, 1))], [
        {"shape": [], "data": [1.0]}, {"shape": [1], "data": [1.0]}, {"shape": [1, 1], "data": [1.0]},
    ]),
    "tensor": ([np.array([1, 2], ">i2"), np.float32(1), np.zeros((0, 1), np.uint8)], [
        {"dtype": "int16", "shape": [2], "data": b"\1\0\2\0"},
        {"dtype": "float32", "shape": [], "data": b"\0\0\x80?"},
        {"dtype": "uint8", "shape": [0, 1], "data": b""},
    ]),
    "bfloat16[2]": ([np.array([0x3FC0, 0xC000], np.uint16)] * 3, [[1.5, -2.0]] * 3),
    "float8_e4m3fn[2]": ([np.array([0x38, 0x7E], np.uint8)] * 3, [[1.0, 448.0]] * 3),
    "float8_e5m2[2]": ([np.array([0x3C, 0x7B], np.uint8)] * 3, [[1.0, 57344.0]] * 3),
    "complex64[]": ([1 + 2j, np.complex64(3j), 0], [[1.0, 2.0], [0.0, 3.0], [0.0, 0.0]]),
    "complex64[1, 2]": ([np.array([[1 + 2j, 3]], np.complex64)] * 3, [[[[1.0, 2.0], [3.0, 0.0]]]] * 3),
    "complex64[N, 1]": ([np.array([[1j]], np.complex64)] * 3, [{"shape": [1, 1], "data": [[0.0, 1.0]]}] * 3),
    "detections": ([FOUND, NOTHING, FOUND.to_json()], [
        [
            {"box": [1.0, 2.0, 3.0, 4.0], "score": 0.5, "class": 1, "label": "star"},
            {"box": [5.0, 6.0, 7.0, 8.5], "score": 0.25, "class": 0, "label": "circle"},
        ],
        [],
        [
            {"box": [1.0, 2.0, 3.0, 4.0], "score": 0.5, "class": None, "label": "star"},
            {"box": [5.0, 6.0, 7.0, 8.5], "score": 0.25, "class": None, "label": "circle"},
        ],
    ]),
    "list[text]": ([["a", None], [], ("b",)], [["a", None], [], ["b"]]),
    "list[json]": ([[{"a": 1}], [], [[]]], [['{"a":1}'], [], ["[]"]]),
    "list[list[float32[N]]]": ([[[np.ones(2, np.float32)], []], [], [[]]], [[[[1.0, 1.0]], []], [], [[]]]),
    "list[detections]": ([[FOUND, NOTHING], [], [NOTHING]], None),
}  # fmt: skip
"""Three values of each port type, and what they are when a table is read; None: not compared."""


def columns(types: Mapping[str, str], kept: pa.Table | None = None, media: str = "files") -> Columns:
    schema = kept.schema if kept is not None else pa.schema([])
    return columns_of({name: PortType.parse(type) for name, type in types.items()}, schema, media=media)


def block(rows: int, kept: pa.Table | None = None, part: int = 0, place: int = 0, **more: Any) -> RowBlock:
    table = kept if kept is not None else pa.table({})
    return RowBlock(part, place, [f"d#{place + row}" for row in range(rows)], {}, table, **more)


def one_column(type: str, values: Sequence[Any]) -> pa.Array:
    """Return the array that values of an output become."""
    return to_columns(columns({"x": type}), BlockResult({"x": values}), block(len(values))).column("x")
