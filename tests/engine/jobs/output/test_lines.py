import datetime as dt
import decimal
import io
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.json
import pytest

from tests.engine.jobs.output.answers import EVERY, block, columns
from weftline.engine.jobs.output.json_lines import lines
from weftline.engine.jobs.output.values import to_columns
from weftline.engine.jobs.rows import BlockResult


def written(array, name="x"):
    schema = pa.schema([(name, array.type)])
    text = b"".join(lines(schema, pa.record_batch([array], schema=schema)))
    return [json.loads(line)[name] for line in text.splitlines()]


def answered(type, values):
    what = columns({"x": type})
    batch = to_columns(what, BlockResult({"x": values}), block(len(values)))
    text = b"".join(lines(what.schema, batch))
    return [json.loads(line)["x"] for line in text.splitlines()]


def test_a_row_is_a_line_with_every_key_in_order():
    schema = pa.schema([("b", pa.string()), ("a", pa.int64())])
    batch = pa.record_batch([["é\n", None], [None, 2]], schema=schema)
    assert b"".join(lines(schema, batch)).decode() == '{"b":"é\\n","a":null}\n{"b":null,"a":2}\n'


def test_json_outputs_are_json_and_no_texts():
    assert answered("json", [{"a": [1, None]}, None, "text", 2**70]) == [{"a": [1, None]}, None, "text", 2**70]
    assert answered("list[json]", [[{"a": 1}, None], None]) == [[{"a": 1}, None], None]
    assert answered("list[list[any]]", [[[1], []]]) == [[[1], []]]
    assert answered("text", ['{"a": 1}']) == ['{"a": 1}']


@pytest.mark.parametrize("type", EVERY)
def test_every_port_type_is_a_line_each(type):
    assert len(answered(type, [*EVERY[type][0], None])) == 4


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("float32[4]", np.array([1, np.nan, np.inf, -np.inf], np.float32)),
        ("float16[A, B]", np.array([[1, np.nan, np.inf, -np.inf]], np.float16)),
        ("complex64[2]", np.array([complex(1, np.nan), complex(np.inf, -np.inf)], np.complex64)),
        ("json", {"a": [1.0, float("nan"), float("inf"), -float("inf")]}),
        ("list[json]", [1.0, float("nan"), {"a": [float("inf"), -float("inf"), None]}]),
        ("list[float32[]]", [np.float32(1), np.float32("nan"), np.float32("inf"), np.float32("-inf")]),
    ],
)
def test_numbers_that_json_lacks_are_those_of_pythons_json(type, value):
    shown = json.dumps(answered(type, [value, None]))
    assert [shown.count(one) for one in ("1.0", "NaN", "Infinity", "-Infinity", "null")] == [
        1, 1, 2, 1, 2 if type == "list[json]" else 1
    ]  # fmt: skip


def test_kept_columns_keep_nan_beside_null():
    types = {"a": pa.float64(), "b": pa.map_(pa.string(), pa.float32()), "c": pa.dictionary(pa.int8(), pa.float64())}
    types |= {"d": pa.struct([("x", pa.list_(pa.float16()))])}
    rows = {"a": [1.5, math.nan, None], "b": [[("k", math.inf)], None, []], "c": [math.nan, 1.0, None]}
    rows |= {"d": [{"x": [-math.inf]}, {"x": None}, None]}
    batch = pa.record_batch([pa.array(rows[name], type) for name, type in types.items()], list(types))
    first, second, third = [json.loads(line) for line in b"".join(lines(batch.schema, batch)).splitlines()]
    assert first["a"] == 1.5 and math.isnan(second["a"]) and third["a"] is None
    assert first["b"] == [["k", math.inf]] and math.isnan(first["c"]) and second["c"] == 1.0
    assert first["d"] == {"x": [-math.inf]} and second["d"] == {"x": None} and third["d"] is None


def test_pyarrow_and_pandas_read_what_json_lacks():
    pandas = pytest.importorskip("pandas")
    values = pa.array([1.5, math.nan, math.inf, -math.inf, None])
    batch = pa.record_batch([values, pa.array(range(5))], ["x", "n"])
    data = b"".join(lines(batch.schema, batch))
    read = pa.json.read_json(io.BytesIO(data)).column("x")
    assert read.to_pylist()[2:] == [math.inf, -math.inf, None] and read.null_count == 1
    assert pandas.read_json(io.BytesIO(data), lines=True)["x"].tolist()[2:4] == [math.inf, -math.inf]


def test_bytes_are_base64():
    assert answered("bytes", [b"\xff\0"]) == ["/wA="]


@pytest.mark.parametrize(
    ("values", "type", "expected"),
    [
        ([dt.datetime(2026, 3, 1, 12)], pa.timestamp("s"), "2026-03-01 12:00:00"),
        ([1], pa.timestamp("ns"), "1970-01-01 00:00:00.000000001"),
        ([0], pa.timestamp("us", "UTC"), "1970-01-01 00:00:00.000000Z"),
        ([dt.date(2026, 3, 1)], pa.date32(), "2026-03-01"),
        ([1500], pa.time64("ns"), "00:00:00.000001500"),
        ([7], pa.duration("ns"), 7),
        ([decimal.Decimal("1.10")], pa.decimal128(5, 2), "1.10"),
        ([[("a", 1)]], pa.map_(pa.string(), pa.int64()), [["a", 1]]),
        ([{"t": [0]}], pa.struct([("t", pa.list_(pa.timestamp("ns")))]), {"t": ["1970-01-01 00:00:00.000000000"]}),
        ([[0, 1]], pa.list_(pa.duration("s"), 2), [0, 1]),
        ([2**64 - 1], pa.uint64(), 2**64 - 1),
    ],
)
def test_kept_columns_of_other_types_are_texts_and_numbers(values, type, expected):
    assert written(pa.array(values, type)) == [expected]


def test_long_batches_come_in_pieces():
    schema = pa.schema([("x", pa.int64())])
    pieces = list(lines(schema, pa.record_batch([range(10_000)], schema=schema)))
    assert len(pieces) == 3
    assert b"".join(pieces) == b"".join(b'{"x":%d}\n' % number for number in range(10_000))
