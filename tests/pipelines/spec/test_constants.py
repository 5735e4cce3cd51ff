"""What can be written into a pipeline as a value."""

from typing import Any

import pytest

from weftline.nodes.contract import ConfigError
from weftline.pipelines.spec.constants import CONSTANT_BYTES_MAX, check_constant, check_default, type_of


@pytest.mark.parametrize("value", [None, True, 3, 1.5, "é", [1, [2]], {"a": {"b": None}}])
def test_what_json_holds_is_a_constant(value: Any) -> None:
    assert check_constant(value) is value
    assert type_of(value) == ("text" if value == "é" else "json")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("inf"), "not a JSON value"), (object(), "not a JSON value"), ("x" * CONSTANT_BYTES_MAX, "bytes as json"),
        ([1] * CONSTANT_BYTES_MAX, "bytes as json"), ("\ud800", "not a JSON value"),
    ],
)  # fmt: skip
def test_the_rest_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_constant(value, "value")
    assert caught.value.option == "value"


def test_a_constant_of_the_largest_size_is_taken() -> None:
    check_constant("x" * (CONSTANT_BYTES_MAX - 2))


@pytest.mark.parametrize(
    ("type", "value"),
    [("text", "x"), ("json", {"a": [1]}), ("float32[2]", [1, 2.5]), ("int64[]", 3), ("list[text]", ["a"]), ("any", 3)],
)
def test_a_default_is_what_a_caller_may_send(type: str, value: Any) -> None:
    check_default(type, value)


@pytest.mark.parametrize(
    ("type", "value", "said"),
    [
        ("text", 3, "wants text"), ("float32[2]", [1], "float32"), ("int8[]", 300, "exactly"),
        ("image", "a.png", "cannot contain"), ("list[list[audio]]", [], "cannot contain"),
        ("list[text]", ["a", 1], "element 1"),
    ],
)  # fmt: skip
def test_any_other_default_is_a_problem_of_that_key(type: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_default(type, value)
    assert caught.value.option == "default"
