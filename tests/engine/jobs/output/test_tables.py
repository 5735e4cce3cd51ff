import io

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.jobs.output.test_writers import simple, written
from weftline.engine.jobs.output.layout import FORMATS
from weftline.engine.jobs.output.tables import amend_part, merge_rows
from weftline.errors import OutputFailed


def test_rows_are_merged_in_the_order_of_their_places():
    old, new = pa.table({"x": ["b", "d"]}), pa.table({"x": ["e", "a", "c"]})
    assert merge_rows(old, [1, 7], new, [9, 0, 3]).column("x").to_pylist() == ["a", "b", "c", "d", "e"]
    assert merge_rows(old, [1, 7], new.slice(0, 0), []).equals(old)


def test_row_numbers_that_do_not_fit_the_rows_are_refused():
    table = pa.table({"x": ["a", "b"]})
    with pytest.raises(ValueError, match="3 and 2 row numbers for 2 and 2 rows"):
        merge_rows(table, [0, 1, 2], table, [3, 4])
    with pytest.raises(ValueError, match="same number"):
        merge_rows(table, [0, 1], table, [1, 2])


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25)
@given(failed=st.sets(st.integers(0, 29)), still=st.sets(st.integers(0, 29)))
def test_an_amended_part_is_the_one_that_would_have_been(format, failed, still):
    batch = simple(30)
    still &= failed
    first = [place for place in range(30) if place not in failed]
    later = [place for place in range(30) if place in failed and place not in still]
    rows = [place for place in range(30) if place not in still]
    old = written(format, batch.schema, [batch.take(pa.array(first, pa.int64()))])
    pieces = [batch.take(pa.array(later[:4], pa.int64())), batch.take(pa.array(later[4:], pa.int64()))]
    out = io.BytesIO()
    shift = [place + 10_000 for place in first], [place + 10_000 for place in later]
    amend_part(io.BytesIO(old), shift[0], pieces, shift[1], format, batch.schema, out)
    assert out.getvalue() == written(format, batch.schema, [batch.take(pa.array(rows, pa.int64()))])


@pytest.mark.parametrize("format", FORMATS)
def test_a_part_with_another_number_of_rows_is_refused(format):
    batch = simple(5)
    with pytest.raises(OutputFailed, match="has 5 rows, expected 4"):
        amend_part(
            io.BytesIO(written(format, batch.schema, [batch])), range(4), [], [], format, batch.schema, io.BytesIO()
        )
