import gc
import hashlib
import io
import json

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.jobs.output.answers import EVERY, PICTURE, block, columns
from weftline.engine.jobs.output.columns import TYPE_KEY
from weftline.engine.jobs.output.layout import FORMATS
from weftline.engine.jobs.output.tables import batches, check_columns, part_writer, write_part
from weftline.engine.jobs.output.values import MediaEncoder, to_columns
from weftline.engine.jobs.rows import BlockResult
from weftline.errors import InputError

TYPES = {f"x{place}": type for place, type in enumerate(EVERY)}
KEPT = pa.table({"q": pa.array([1, None, 3]), "s": pa.array(["a", "b", None])})
ROWS = BlockResult({name: [EVERY[type][0][0], None, EVERY[type][0][2]] for name, type in TYPES.items()})


def everything():
    """Return rows with a column of every port type, a null in each."""
    what = columns(TYPES, KEPT)
    return what.schema, to_columns(what, ROWS, block(3, KEPT))


def written(format, schema, rows):
    out = io.BytesIO()
    write_part(format, schema, rows, out)
    return out.getvalue()


def simple(rows):
    schema = pa.schema([("id", pa.string()), ("n", pa.int64()), ("l", pa.list_(pa.float32()))])
    ids = [f"row {row}" if row % 7 else None for row in range(rows)]
    numbers = [[0.5] * (row % 3) if row % 5 else None for row in range(rows)]
    return pa.record_batch([ids, range(rows), pa.array(numbers, pa.list_(pa.float32()))], schema=schema)


@pytest.mark.parametrize("format", ["parquet", "arrow", "hf"])
def test_every_type_comes_back_as_it_was(format):
    schema, batch = everything()
    (read,) = batches(io.BytesIO(written(format, schema, [batch])), format, schema)
    assert read.equals(batch)
    assert read.schema.field("x1").metadata[TYPE_KEY] == b"json"


def test_parquet_is_what_pyarrow_and_pandas_read():
    schema, batch = everything()
    data = written("parquet", schema, [batch])
    assert pq.read_table(io.BytesIO(data)).to_pylist() == batch.to_pylist()
    frame = pandas.read_parquet(io.BytesIO(data))
    assert frame["id"].tolist() == ["d#0", "d#1", "d#2"]
    assert frame["x0"].tolist()[::2] == ["a", ""]
    tensor = next(name for name, type in TYPES.items() if type == "int32[2, 3]")
    assert [list(row) for row in frame[tensor][0]] == [[0, 1, 2], [3, 4, 5]]
    found = next(name for name, type in TYPES.items() if type == "detections")
    assert frame[found][0][0]["label"] == "star"
    assert frame[found][1] is None or frame[found][1] is pandas.NA or np.isnan(frame[found][1])


def test_parquet_without_the_arrow_schema_reads_the_same_values():
    """Other readers know of Parquet's own types alone."""
    _, batch = everything()
    out = io.BytesIO()
    pq.write_table(pa.Table.from_batches([batch]), out, store_schema=False)
    assert pq.read_table(io.BytesIO(out.getvalue())).to_pylist() == batch.to_pylist()


def test_parquet_is_what_datasets_loads(tmp_path):
    schema, batch = everything()
    (tmp_path / "part-00000.parquet").write_bytes(written("parquet", schema, [batch]))
    found = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert found.to_list() == batch.to_pylist()


def test_inline_pictures_are_pictures_for_datasets(tmp_path):
    what = columns({"p": "image", "l": "list[image]"}, media="inline")
    with MediaEncoder() as encoder:
        batch = to_columns(what, BlockResult({"p": [PICTURE, None], "l": [[PICTURE], []]}), block(2), encoder)
    (tmp_path / "part-00000.parquet").write_bytes(written("parquet", what.schema, [batch]))
    found = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    np.testing.assert_array_equal(np.asarray(found[0]["p"]), PICTURE)
    np.testing.assert_array_equal(np.asarray(found[0]["l"][0]), PICTURE)
    assert found[1]["p"] is None


def test_jsonl_has_a_line_for_each_row():
    schema, batch = everything()
    rows = [json.loads(line) for line in written("jsonl", schema, [batch]).splitlines()]
    assert [list(row) for row in rows] == [schema.names] * 3
    assert rows[0]["x1"] == {"b": [1, 2.5, None], "a": 2**70}
    assert all(rows[1][name] is None for name in TYPES)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 40), max_size=6))
def test_the_same_rows_give_the_same_bytes_in_whatever_batches(format, sizes):
    batch = simple(120)
    cuts = np.minimum(np.cumsum([0, *sizes]), 120).tolist()
    pieces = [batch.slice(a, b - a) for a, b in zip(cuts, [*cuts[1:], 120])]
    copies = [pa.RecordBatch.from_pylist(one.to_pylist(), schema=batch.schema) for one in pieces]
    whole = hashlib.sha256(written(format, batch.schema, [batch])).hexdigest()
    assert hashlib.sha256(written(format, batch.schema, pieces)).hexdigest() == whole
    assert hashlib.sha256(written(format, batch.schema, copies)).hexdigest() == whole


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_do_not_depend_on_batches_past_the_end_of_a_group(format):
    schema = pa.schema([("n", pa.int64())])
    batch = pa.record_batch([np.arange(120_001)], schema=schema)
    pieces = [batch.slice(0, 49_999), batch.slice(49_999, 2), batch.slice(50_001)]
    data = written(format, schema, pieces)
    assert data == written(format, schema, [batch])
    if format == "parquet":
        about = pq.ParquetFile(io.BytesIO(data)).metadata
        assert [about.row_group(group).num_rows for group in range(about.num_row_groups)] == [50_000, 50_000, 20_001]


@pytest.mark.parametrize("format", ["parquet", "arrow", "hf"])
def test_no_rows_are_a_file_with_columns(format):
    batch = simple(0)
    data = written(format, batch.schema, [])
    assert data == written(format, batch.schema, [batch])
    assert list(batches(io.BytesIO(data), format, batch.schema)) in ([], [batch])


class Full(io.RawIOBase):
    """A file that takes some bytes, and then no more."""

    def __init__(self, room):
        self.room, self.tries = room, 0

    def writable(self):
        return True

    def write(self, data):
        if self.room < len(data):
            self.tries += 1
            raise OSError(28, "No space left on device")
        self.room -= len(data)
        return len(data)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("room", [0, 10, 300])
@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_raised_as_it_is_and_nothing_is_written_after_it(format, room):
    out, batch = Full(room), simple(1000)
    with pytest.raises(OSError, match="No space") as raised:
        write_part(format, batch.schema, [batch], out)
    assert raised.value.errno == 28
    del raised
    gc.collect()
    assert out.tries == 1


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("format", FORMATS)
def test_an_abandoned_file_gets_no_footer_and_stays_open(format):
    out, batch = io.BytesIO(), simple(10)
    writer = part_writer(format, batch.schema, out)
    writer.add(batch)
    size = len(out.getvalue())
    writer.abandon()
    del writer
    gc.collect()
    assert len(out.getvalue()) == size
    assert not out.closed


def test_all_columns_that_a_format_cannot_hold_are_refused_before_writing():
    union = pa.sparse_union([pa.field("a", pa.int32())])
    schema = pa.schema([("fine", pa.int32()), ("u", union), ("e", pa.struct([]))])
    with pytest.raises(InputError, match=r"column u: .*\ncolumn e: .*\n    fix: ") as raised:
        check_columns(schema, "parquet")
    assert "fine" not in str(raised.value)
    with pytest.raises(InputError, match="column m: map"):
        check_columns(pa.schema([("m", pa.map_(pa.string(), pa.int64()))]), "hf")
    for format in FORMATS:
        check_columns(everything()[0], format)
