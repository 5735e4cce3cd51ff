"""Values of calls in XML have the types of the function's schema."""

from __future__ import annotations

from typing import Any

import pytest

from weftline.engine.llm.xml_call import read_arguments

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "place": {"type": "object"},
    "either": {"type": ["string", "null"]},
    "some": {"anyOf": [{"type": "null"}, {"type": "string"}, 5]},
    "one": {"enum": ["1", "2"]},
    "odd": 5,
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "\n a\n b \n", " a\n b "),
        ("text", "null", "null"),
        ("count", "\n5\n", 5),
        ("count", "five", "five"),
        ("count", "NaN", "NaN"),
        ("place", '{"at": [1, null]}', {"at": [1, None]}),
        ("either", "5", "5"),
        ("either", "null", None),
        ("some", "true", "true"),
        ("some", "null", None),
        ("one", "1", "1"),
        ("odd", "1.5", 1.5),
        ("unknown", "true", True),
        ("unknown", "[" * 100_000, "[" * 100_000),
        ("unknown", "", ""),
    ],
)
def test_values_have_the_types_of_the_schema(name: str, text: str, value: Any) -> None:
    body = f"\n<parameter={name}>{text}</parameter>\n"
    assert read_arguments(body, {"properties": PROPERTIES}) == {name: value}


def test_parameters_are_read_in_order() -> None:
    body = "<parameter=b>\n1\n</parameter>\n<parameter=a>\nx > y\n</parameter>\n"
    assert list(read_arguments(body, {}).items()) == [("b", 1), ("a", "x > y")]
    assert read_arguments("\n", {"properties": 5}) == {}


@pytest.mark.parametrize(
    "body",
    ["x<parameter=a>1</parameter>", "<parameter=a>1</parameter>x", "<parameter=a>1", "<parameter=a", "x"],
)
def test_other_text_is_no_call(body: str) -> None:
    with pytest.raises(ValueError, match="parameter"):
        read_arguments(body, {})
