import io
from functools import partial

import datasets
import numpy as np
import pyarrow as pa
import pytest

from tests.engine.jobs.output.answers import EVERY, PICTURE, block, columns
from tests.engine.jobs.output.test_writers import everything, simple, written
from weftline.engine.jobs.output.layout import EXTRAS
from weftline.engine.jobs.output.tables import batches, hf_files, join_parts
from weftline.engine.jobs.output.values import MediaEncoder, to_columns
from weftline.engine.jobs.rows import BlockResult
from weftline.errors import OutputFailed


def joined(format, schema, parts):
    out = io.BytesIO()
    join_parts([partial(io.BytesIO, part) for part in parts], format, out, schema)
    return out.getvalue()


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("format", ["parquet", "jsonl", "arrow"])
def test_parts_together_are_what_one_part_would_have_been(format):
    schema, batch = everything()
    parts = [
        written(format, schema, [batch.slice(0, 2)]),
        written(format, schema, []),
        written(format, schema, [batch.slice(2)]),
    ]
    assert joined(format, schema, parts) == written(format, schema, [batch])
    long = simple(70_000)
    parts = [written(format, long.schema, [long.slice(start, 30_000)]) for start in (0, 30_000, 60_000)]
    assert joined(format, long.schema, parts) == written(format, long.schema, [long])


@pytest.mark.parametrize("format", ["parquet", "jsonl", "arrow"])
def test_no_parts_are_an_empty_file_with_columns(format):
    schema = simple(0).schema
    assert joined(format, schema, []) == written(format, schema, [])


def test_parts_are_open_one_at_a_time():
    batch, opened = simple(10), []

    def opener():
        assert all(one.closed for one in opened)
        opened.append(io.BytesIO(written("parquet", batch.schema, [batch])))
        return opened[-1]

    join_parts([opener] * 3, "parquet", io.BytesIO(), batch.schema)
    assert len(opened) == 3
    assert all(one.closed for one in opened)


def test_what_a_file_does_not_say_of_its_columns_the_schema_does():
    schema, batch = everything()
    bare = pa.RecordBatch.from_arrays(batch.columns, names=schema.names)
    (read,) = batches(io.BytesIO(written("parquet", bare.schema, [bare])), "parquet", schema)
    assert read.schema.equals(schema, check_metadata=True)


def test_a_part_of_other_columns_or_none_at_all_is_refused():
    batch = simple(3)
    other = pa.schema([("id", pa.string()), ("n", pa.string()), ("l", pa.list_(pa.float32()))])
    with pytest.raises(OutputFailed, match=r"found: id: string, n: int64.*\n    expected: id: string, n: string"):
        joined("parquet", other, [written("parquet", batch.schema, [batch])])
    for format in ("parquet", "arrow"):
        with pytest.raises(OutputFailed, match="cannot be read"):
            joined(format, batch.schema, [b"torn"])


def test_a_folder_of_parts_is_a_data_set(tmp_path):
    schema, batch = everything()
    names = ["part-00000.arrow", "part-00001.arrow", "part-00002.arrow"]
    for name, rows in zip(names, ([batch.slice(0, 2)], [], [batch.slice(2)])):
        (tmp_path / name).write_bytes(written("hf", schema, rows))
    files = hf_files(names, schema, "0123456789abcdef")
    assert tuple(files) == EXTRAS["hf"]
    assert files == hf_files(names, schema, "0123456789abcdef")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = datasets.load_from_disk(str(tmp_path))
    assert found.to_list() == batch.to_pylist()
    assert found.column_names == ["id", "q", "s", *(f"x{place}" for place in range(len(EVERY)))]


def test_inline_pictures_of_a_data_set_are_pictures(tmp_path):
    what = columns({"p": "image", "l": "list[image]"}, media="inline")
    with MediaEncoder() as encoder:
        batch = to_columns(what, BlockResult({"p": [PICTURE, None], "l": [[PICTURE], None]}), block(2), encoder)
    (tmp_path / "part-00000.arrow").write_bytes(written("hf", what.schema, [batch]))
    for name, data in hf_files(["part-00000.arrow"], what.schema, "f").items():
        (tmp_path / name).write_bytes(data)
    found = datasets.load_from_disk(str(tmp_path))
    np.testing.assert_array_equal(np.asarray(found[0]["p"]), PICTURE)
    np.testing.assert_array_equal(np.asarray(found[0]["l"][0]), PICTURE)
