"""What a value must be to stand on a port, lists included."""

import numpy as np
import pytest

from weftline.nodes.ports import PortType
from weftline.nodes.values import mismatch


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("list[text]", []),
        ("list[text]", ["a", "b"]),
        ("list[text]", ("a",)),
        ("list[image]", [np.zeros((2, 3, 3), np.uint8), np.zeros((1, 1, 3), np.uint8)]),
        ("list[list[float32[N]]]", [[], [np.zeros(3, np.float32)]]),
        ("list[any]", [None, 3]),
    ],
)
def test_a_list_of_right_elements_is_right(type: str, value: object) -> None:
    assert mismatch(PortType.parse(type), value) == ""


@pytest.mark.parametrize(
    ("type", "value", "said"),
    [
        ("list[text]", "abc", "wants list[text] (a list), got a str of length 3"),
        ("list[text]", None, "wants list[text] (a list), got nothing"),
        ("list[text]", ["a", 7], "is a list whose element 1 wants text (a str), got a value of type int"),
        ("list[float32[2]]", [np.zeros(3, np.float32)], "is a list whose element 0 wants float32[2], got float32[3]"),
        ("float32[2]", [1.0, 2.0], "wants float32[2] (a numpy array), got a list of length 2"),
        ("list[list[json]]", [[1], 2], "is a list whose element 1 wants list[json] (a list), got a value of type int"),
    ],
)
def test_the_first_wrong_element_is_named(type: str, value: object, said: str) -> None:
    assert mismatch(PortType.parse(type), value) == said
