from __future__ import annotations

import io

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from weftline.engine.jobs.output.manifest import ErrorRow, Unreadable, encode_rows, read_rows

TEXT = st.text(st.characters())  # lone surrogates among them, as in names of files


@settings(max_examples=40, deadline=None)
@given(st.lists(st.builds(ErrorRow, row_number=st.integers(0, 2**60), id=TEXT, step=TEXT, error=TEXT, reason=TEXT,
                          part=st.integers(0, 9)), unique_by=lambda row: row.row_number))  # fmt: skip
def test_error_rows_come_back_in_order(rows: list[ErrorRow]) -> None:
    data = encode_rows(rows)
    assert data.count(b"\n") == len(rows)
    assert list(read_rows(io.BytesIO(data))) == sorted(rows, key=lambda row: row.row_number)


def test_a_line_of_another_kind_is_named() -> None:
    good = encode_rows([ErrorRow(row_number=1, id="a", step="", error="", reason="", part=0)])
    with pytest.raises(Unreadable, match="line 2: Object missing required field"):
        list(read_rows(io.BytesIO(good + b"{}\n")))
