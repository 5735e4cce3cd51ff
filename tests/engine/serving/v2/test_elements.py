"""Elements of BYTES tensors: length prefixes, and values of text, JSON, detections and lists."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import serialize_byte_tensor

from weftline.engine.serving.v2.elements import decode_elements, encode_elements, text_of, value_of
from weftline.errors import InputError


def test_text_is_utf_8_from_every_source() -> None:
    assert text_of(memoryview("grün".encode())) == "grün" == text_of("grün")


@pytest.mark.parametrize(
    "element", [b"\xff", b"\xed\xa0\x80", "\ud800", b"a\0b", "\0", b"\xc0\x80", b"\xf4\x90\x80\x80"]
)
def test_what_is_no_text_is_refused(element: bytes | str) -> None:
    with pytest.raises(InputError, match=r"expected text"):
        text_of(element)


def test_detections_may_have_numbers_that_json_lacks() -> None:
    found = value_of("detections", b'[{"name":"a","score":NaN,"box":[0,-Infinity,Infinity,1]}]', "detections")
    assert np.isnan(found.scores[0]) and found.boxes.tolist() == [[0.0, -np.inf, np.inf, 1.0]]


def test_detections_come_back_as_they_went_out() -> None:
    sent = b'[{"name":"star","score":0.5,"box":[1,2,3,4.5]},{"name":"dot","score":1,"box":[0,0,1,1]}]'
    found = value_of("detections", sent, "detections")
    assert found.to_json() == [
        {"name": "star", "score": 0.5, "box": [1.0, 2.0, 3.0, 4.5]},
        {"name": "dot", "score": 1.0, "box": [0.0, 0.0, 1.0, 1.0]},
    ]
    assert len(value_of("detections", b"[]", "detections")) == 0 and value_of(
        "detections", b"[]", "detections"
    ).boxes.shape == (0, 4)


@pytest.mark.parametrize(
    "json",
    [
        b"{}", b"[1]", b'[{"name":"a","score":1}]', b'[{"name":1,"score":1,"box":[1,2,3,4]}]',
        b'[{"name":"a","score":"1","box":[1,2,3,4]}]', b'[{"name":"a","score":1,"box":[1,2,3]}]',
        b'[{"name":"a","score":true,"box":[1,2,3,4]}]', b'[{"name":"a","score":1,"box":[1,2,3,1e300]}]',
        b'[{"name":"a","score":1,"box":[1,2,3,4],"more":1}]',
    ],
)  # fmt: skip
def test_what_are_no_detections_is_refused(json: bytes) -> None:
    with pytest.raises(InputError, match="expected a list of"):
        value_of("detections", json, "detections")


def test_bytes_stay_bytes() -> None:
    assert value_of("bytes", memoryview(b"\0\xff"), "bytes") == b"\0\xff"
    assert value_of("image", "text", "image") == b"text"


def test_a_list_in_an_element_is_json() -> None:
    assert value_of("list", b'["a", "b"]', "list[list[text]]") == ["a", "b"]
    with pytest.raises(InputError, match="no list"):
        value_of("list", b'"a"', "list[list[text]]")


def test_an_element_is_text_or_bytes() -> None:
    with pytest.raises(InputError, match="neither"):
        value_of("text", 7, "text")


def test_it_is_what_the_stock_client_writes() -> None:
    elements = [b"abc", b"", b"\0", "grün".encode()]
    stock = serialize_byte_tensor(np.array(elements, object)).item()
    assert encode_elements(elements) == stock
    assert [bytes(one) for one in decode_elements(stock, 4)] == elements


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_elements_survive_the_trip(elements: list[bytes]) -> None:
    assert [bytes(one) for one in decode_elements(encode_elements(elements), len(elements))] == elements


def test_long_elements_are_views_not_copies() -> None:
    raw = encode_elements([b"short", bytes(5000)])
    short, long = decode_elements(raw, 2)
    assert isinstance(short, bytes)
    assert np.shares_memory(np.frombuffer(long, np.uint8), np.frombuffer(raw, np.uint8))


def test_a_message_of_nothing_but_lengths_does_not_grow() -> None:
    raw = bytes(4 * 20_000)
    tracemalloc.start()
    try:
        decode_elements(raw, 20_000)
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
        (struct.pack("<I", 1) + b"ab", 1, "after the \\d+ elements"),
        (struct.pack("<I", 0) * 3, 2, "after the \\d+ elements"),
        (b"x", 0, "after the \\d+ elements"),
        (b"abcd" * 4, 1 << 40, "four-byte"),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(raw: bytes, count: int, why: str) -> None:
    with pytest.raises(InputError, match=why):
        decode_elements(raw, count)


@given(st.binary(max_size=64), st.integers(0, 8))
def test_random_bytes_are_elements_or_an_input_error(raw: bytes, count: int) -> None:
    try:
        elements = decode_elements(raw, count)
    except InputError:
        return
    assert encode_elements(elements) == raw


def test_a_bytes_port_takes_a_nul_in_json() -> None:
    assert value_of("bytes", "a\0b", "bytes") == b"a\0b"
    with pytest.raises(InputError, match="NUL"):
        value_of("text", "a\0b", "text")
    with pytest.raises(InputError, match="surrogate"):
        value_of("bytes", "\ud800", "bytes")
