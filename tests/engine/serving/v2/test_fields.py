"""The outermost fields of a message, cut by hand and never believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.serving.v2.fields import FIELDS_MAX, cut, prefix
from weftline.errors import InputError


def test_the_wanted_field_is_cut_out_and_the_rest_stays_in_order() -> None:
    first, large, last = prefix(1, 3) + b"abc", prefix(7, 5) + b"12345", b"\x40\x01"
    rest, found = cut(first + large + last + large, 7)
    assert rest == first + last
    assert [bytes(one) for one in found] == [b"12345", b"12345"]


def test_what_was_cut_out_is_a_view_of_the_message() -> None:
    data = prefix(7, 1 << 20) + bytes(1 << 20)
    _, (found,) = cut(data, 7)
    assert np.shares_memory(np.frombuffer(found, np.uint8), np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x3a\x05abc", "middle of a field"), (b"\x3a", "middle of a number"), (b"\x3a\xff\xff\xff\xff\x0f", "middle"),
        (b"\x3a" + b"\xff" * 9 + b"\x01", "middle of a field"), (b"\x08" + b"\x80" * 10 + b"\x01", "64 bits"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "64 bits"), (b"\x08" + b"\x80" * 10 + b"\x00", "64 bits"),
        (b"\x08\x80", "middle of a number"), (b"\x0b\x0c", "wire type 3"),
        (b"\x0c", "wire type 4"), (b"\x0e", "wire type 6"), (b"\x0f", "wire type 7"), (b"\x02\x00", "field number"),
        (b"\x00", "field number"), (b"\x09\0\0\0\0", "middle of a field"), (b"\x0d\0\0", "middle of a field"),
        (b"\xff" * 9 + b"\x01", "field number"), (b"\x10\x01" * (FIELDS_MAX + 1), "more than"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why):
        cut(data, 7)


@given(st.binary(max_size=200), st.integers(1, 15))
def test_random_bytes_lose_nothing_or_are_refused(data: bytes, number: int) -> None:
    try:
        rest, found = cut(data, number)
    except InputError:
        return
    assert len(rest) + sum(map(len, found)) <= len(data)
    assert cut(rest, number) == (rest, [])


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 21, (1 << 32) + 5])
def test_a_prefix_is_read_back(size: int) -> None:
    data = prefix(6, size)
    if size:
        with pytest.raises(InputError, match="middle of a field"):
            cut(data, 6)
    assert len(data) == 1 + max(1, -(-size.bit_length() // 7))
