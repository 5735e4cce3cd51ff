from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from weftline.engine.jobs.output.manifest import Unreadable, decode, encode

TEXT = st.text(st.characters())  # lone surrogates among them, as in names of files


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXT, lambda one: st.lists(one) | st.dictionaries(TEXT, one)
    )
)
def test_plain_data_comes_back(value: object) -> None:
    assert decode(encode(value), object) == value


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": 1', b"\xff", b"[" * 100_000, b"nonsense"])
def test_what_is_torn_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(data, dict)


def test_a_name_that_is_no_unicode_comes_back() -> None:
    assert encode(["\udcff"]) == b'["\\udcff"]\n'
    assert decode(encode(["\udcff"]), list) == ["\udcff"]
