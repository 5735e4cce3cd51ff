"""Single elements as values: text, JSON, detections, and lists of what JSON can hold."""

from __future__ import annotations

import pytest

from weftline.engine.serving.v2.element import text_of, value_of
from weftline.errors import InputError


def test_text_is_utf_8_whoever_sent_it() -> None:
    assert text_of(memoryview("grün".encode())) == "grün" == text_of("grün")


@pytest.mark.parametrize(
    "element", [b"\xff", b"\xed\xa0\x80", "\ud800", b"a\0b", "\0", b"\xc0\x80", b"\xf4\x90\x80\x80"]
)
def test_what_is_no_text_is_refused(element: bytes | str) -> None:
    with pytest.raises(InputError, match=r"expected text"):
        text_of(element)


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
