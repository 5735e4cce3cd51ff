"""Values for programs and for people."""

import json

import numpy as np
import pytest

from weftline.cli.show import JSON_BYTES_MAX, JSON_ITEMS_MAX, as_json, as_text, printable
from weftline.errors import LimitReached
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType

TENSOR, TEXT, JSON = PortType("tensor"), PortType("text"), PortType("json")


def test_numbers_that_json_lacks_are_those_of_pythons_json() -> None:
    shown = as_json("y", np.array([1.5, np.nan, np.inf, -np.inf], np.float32), TENSOR)
    assert json.dumps(shown["data"]) == "[1.5, NaN, Infinity, -Infinity]"
    assert json.dumps(as_json("y", {"a": [float("nan")]}, JSON)) == '{"a": [NaN]}'


def test_a_single_number_has_no_list() -> None:
    assert as_json("y", np.float32(2.5), TENSOR) == {"dtype": "float32", "shape": [], "data": 2.5}


def test_bfloat16_is_shown_as_what_it_means() -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    shown = as_json("y", bits, PortType.parse("bfloat16[2]"))
    assert shown == {"dtype": "bfloat16", "shape": [2], "data": [1.0, -2.0]}


@pytest.mark.parametrize("value", [np.zeros(JSON_ITEMS_MAX + 1), bytes(JSON_BYTES_MAX + 1)])
def test_what_is_too_large_is_refused_and_never_cut(value: object) -> None:
    with pytest.raises(LimitReached, match=r"output y: .*\n    fix: add --save DIR"):
        as_json("y", value, TENSOR)


@pytest.mark.parametrize("value", [np.zeros(JSON_ITEMS_MAX, np.int8), bytes(JSON_BYTES_MAX)])
def test_what_is_at_the_limit_is_shown(value: object) -> None:
    assert as_json("y", value, TENSOR)


def test_large_tensors_are_described_to_people() -> None:
    shown = as_text("y", np.arange(100, dtype=np.int64).reshape(10, 10), TENSOR)
    assert shown == "y: int64[10, 10], 0 to 99, mean 49.5"


def test_nothing_found_is_said() -> None:
    none = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32), ("cup",))
    assert as_text("y", none, PortType("detections")) == "y: nothing"
    assert as_json("y", none, PortType("detections")) == []


def test_texts_of_several_lines_are_indented() -> None:
    assert as_text("y", "one\ntwo", TEXT) == "y:\n  one\n  two"
    assert as_text("y", "", TEXT) == "y: "


def test_control_characters_are_made_visible() -> None:
    assert printable("a\tb\nc\x1b]0;title\x07\r\x9b1m") == "a\tb\nc\\x1b]0;title\\x07\\r\\x9b1m"


def test_a_list_is_shown_element_by_element_and_what_is_absent_is_null() -> None:
    pictures, type = [np.zeros((4, 6, 3), np.uint8), np.zeros((2, 2, 3), np.uint8)], PortType.parse("list[image]")
    assert [one["shape"] for one in as_json("y", pictures, type)] == [[4, 6, 3], [2, 2, 3]]
    assert as_text("y", pictures, type).splitlines() == [
        "y: a list of 2",
        "  0: picture of 6 x 4 pixels (--save DIR writes it)",
        "  1: picture of 2 x 2 pixels (--save DIR writes it)",
    ]
    assert as_text("y", pictures * 10, type).splitlines()[-1] == "  ... and 4 more"
    assert as_text("y", ["a", "b"], PortType.parse("list[text]")) == 'y:\n  [\n    "a",\n    "b"\n  ]'
    for written in ("image", "text", "list[image]", "detections"):
        assert as_text("y", None, PortType.parse(written)) == "y: null"
        assert as_json("y", None, PortType.parse(written)) is None
