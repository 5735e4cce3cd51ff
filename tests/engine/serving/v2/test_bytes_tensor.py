"""S2: elements with their lengths, and lengths that lie."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import serialize_byte_tensor

from weftline.engine.serving.v2.bytes_tensor import decode, encode
from weftline.errors import InputError


def test_it_is_what_the_stock_client_writes() -> None:
    elements = [b"abc", b"", b"\0", "grün".encode()]
    stock = serialize_byte_tensor(np.array(elements, object)).item()
    assert encode(elements) == stock
    assert [bytes(one) for one in decode(stock, 4)] == elements


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_elements_survive_the_trip(elements: list[bytes]) -> None:
    assert [bytes(one) for one in decode(encode(elements), len(elements))] == elements


def test_long_elements_are_views_not_copies() -> None:
    raw = encode([b"short", bytes(5000)])
    short, long = decode(raw, 2)
    assert isinstance(short, bytes)
    assert np.shares_memory(np.frombuffer(long, np.uint8), np.frombuffer(raw, np.uint8))


def test_a_message_of_nothing_but_lengths_does_not_grow() -> None:
    raw = bytes(4 * 20_000)
    tracemalloc.start()
    try:
        decode(raw, 20_000)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(raw)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("raw", "count", "why"),
    [
        (b"", 1, "four-byte"),
        (b"\x01\0\0", 1, "four-byte"),
        (struct.pack("<I", 5) + b"abcd", 1, "past the end"),
        (struct.pack("<I", 0xFFFFFFFF) + b"abcd", 1, "past the end"),
        (struct.pack("<I", 4) + b"abcd", 2, "four-byte|past the end"),
        (struct.pack("<I", 1) + b"a" + b"\0\0\0", 2, "past the end"),
        (struct.pack("<I", 1) + b"ab", 1, "left after"),
        (struct.pack("<I", 0) * 3, 2, "left after"),
        (b"x", 0, "left after"),
        (b"abcd" * 4, 1 << 40, "four-byte"),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(raw: bytes, count: int, why: str) -> None:
    with pytest.raises(InputError, match=why):
        decode(raw, count)


@given(st.binary(max_size=64), st.integers(0, 8))
def test_random_bytes_are_elements_or_an_input_error(raw: bytes, count: int) -> None:
    try:
        elements = decode(raw, count)
    except InputError:
        return
    assert encode(elements) == raw
