import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.output.tables import Groups, row_bytes, seamless

SCHEMA = pa.schema([("n", pa.int64()), ("t", pa.string())])


def cut(lengths, sizes, rows_max, bytes_max):
    """Return how long the groups are when rows with texts of these lengths come in batches of these sizes."""
    table = pa.table({"n": range(len(lengths)), "t": ["x" * length for length in lengths]}, schema=SCHEMA)
    groups, found, start = Groups(SCHEMA, rows_max, bytes_max), [], 0
    for size in [*sizes, len(table)]:
        for batch in table.slice(start, size).combine_chunks().to_batches():
            found += groups.add(batch)
        start += size
    found += groups.rest()
    assert [one.column("n").num_chunks for one in found] == [1] * len(found)
    assert pa.concat_tables([table.slice(0, 0), *found]).equals(table)
    return [len(one) for one in found]


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 50), max_size=40),
    st.lists(st.integers(0, 9), max_size=9),
    st.integers(1, 9),
    st.integers(1, 200),
)
def test_groups_are_the_same_however_rows_come(lengths, sizes, rows_max, bytes_max):
    assert cut(lengths, sizes, rows_max, bytes_max) == cut(lengths, [], rows_max, bytes_max)


def test_a_group_ends_when_it_is_long_or_large_enough():
    assert cut([0] * 7, [], 3, 1000) == [3, 3, 1]
    assert cut([100, 0, 0, 100, 100, 0], [], 9, 116) == [1, 3, 1, 1]  # a row is its text and 16 bytes
    assert cut([], [], 3, 10) == []
    assert cut([0] * 9, [1, 1], 9, 40) == [3, 3, 3]
    assert cut([0] * 9, [1, 3, 2], 4, 1000) == [4, 4, 1]


def ugly(array):
    """Return an equal array with an offset, and in whose nulls something lies."""
    padded = pa.concat_arrays([array, array])
    return padded.slice(len(array))


def garbage(values, junk, type):
    """Return values with junk under the second one, which is null."""
    whole = pa.array([values[0], junk, values[2]], type)
    return pa.Array.from_buffers(type, 3, [pa.py_buffer(bytes([0b11111101])), *whole.buffers()[1:]])


CASES = [
    ([1, None, 3], 99, pa.int64()),
    (["a", None, "c"], "junk", pa.string()),
    ([b"a", None, b"c"], b"junk", pa.binary()),
    ([True, None, False], True, pa.bool_()),
]


@pytest.mark.parametrize(("values", "junk", "type"), CASES, ids=str)
def test_what_lies_under_nulls_and_before_the_first_row_is_left_behind(values, junk, type):
    clean = seamless(pa.table({"x": pa.array(values, type)}))
    for dirty in (garbage(values, junk, type), ugly(garbage(values, junk, type)), ugly(pa.array(values, type))):
        found = seamless(pa.table({"x": dirty}))
        assert found.equals(clean)
        assert bytes_of(found) == bytes_of(clean)
        np.testing.assert_array_equal(row_bytes(dirty), row_bytes(pa.array(values, type)))


def bytes_of(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None], pa.int8()), [8, 8]),
        (pa.array(["abc", None, ""]), [11, 8, 8]),
        (pa.array([[b"ab", b""], [], None]), [26, 8, 8]),
        (pa.array([{"a": b"abcd", "b": 1.0}, None]), [20, 8]),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), [16, 8]),
        (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())), [25, 8]),
        (pa.nulls(2), [8, 8]),
        (pa.array(["x", "y"]).dictionary_encode(), [64, 64]),
    ],
)
def test_the_size_of_a_row_is_that_of_what_it_holds(array, expected):
    assert row_bytes(array).tolist() == expected
    assert row_bytes(ugly(array) if not pa.types.is_dictionary(array.type) else array).tolist() == expected
