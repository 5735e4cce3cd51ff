"""What a request may say about the text it wants, and what is refused before anything is prepared."""

from typing import Any

import pytest

from weftline.engine.llm.grammar.constraint import (
    NESTING_MAX,
    REGEX_CHARS_MAX,
    TEXT_BYTES_MAX,
    Constraint,
)
from weftline.engine.llm.params import CHOICES_MAX
from weftline.errors import InputError


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_each_kind_is_read_from_what_a_request_sends() -> None:
    assert Constraint.read({"regex": "[0-9]+"}) == Constraint("regex", "[0-9]+")
    assert Constraint.read({"grammar": 'start: "a"'}) == Constraint("grammar", 'start: "a"')
    assert Constraint.read({"choice": ["yes", "no"]}) == Constraint("choice", ("yes", "no"))
    assert Constraint.read({"choice": ("yes", "no")}) == Constraint("choice", ("yes", "no"))
    assert Constraint.read({"json_object": True}) == Constraint("json_object")
    assert Constraint.read({"json_schema": {"b": 1, "a": "ä"}}) == Constraint("json_schema", '{"b":1,"a":"ä"}')
    assert Constraint.read({"json_schema": {}}).value == "{}"


def test_equal_constraints_are_one_key_and_the_order_of_properties_counts() -> None:
    assert hash(Constraint.read({"choice": ["a", "b"]})) == hash(Constraint("choice", ("a", "b")))
    first = Constraint.read({"json_schema": {"properties": {"a": {}, "b": {}}}})
    assert first != Constraint.read({"json_schema": {"properties": {"b": {}, "a": {}}}})


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (None, "sampling: found NoneType, expected an object with one key of json_schema"),
        ({}, "sampling: found an object with 0 keys"),
        ({"regex": "a", "choice": ["a"]}, "sampling: found an object with 2 keys"),
        ({"xml": "a"}, "sampling: found a constraint 'xml', expected one of json_schema"),
        ({7: "a"}, "found a constraint '7'"),
        ({"regex": ""}, "sampling.regex: found an empty text, expected a pattern"),
        ({"regex": 5}, "sampling.regex: found int, expected a pattern"),
        ({"regex": ["a"]}, "sampling.regex: found list, expected a pattern"),
        ({"regex": "a" * (REGEX_CHARS_MAX + 1)}, f"found {REGEX_CHARS_MAX + 1} characters, expected at most"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
        ({"regex": "a\\"}, "sampling.regex: found a backslash at the end"),
        ({"regex": "a\\\\\\"}, "sampling.regex: found a backslash at the end"),
        ({"grammar": None}, "sampling.grammar: found NoneType, expected a grammar in Lark's syntax"),
        ({"grammar": "a" * (TEXT_BYTES_MAX + 1)}, "sampling.grammar: found more than 65536 bytes"),
        ({"grammar": "ä" * (TEXT_BYTES_MAX // 2 + 1)}, "sampling.grammar: found more than 65536 bytes"),
        ({"choice": []}, "sampling.choice: found a list of 0, expected a list of 1 to 1024 texts"),
        ({"choice": ["a"] * (CHOICES_MAX + 1)}, "sampling.choice: found a list of 1025"),
        ({"choice": "yes"}, "sampling.choice: found 'yes', expected a list"),
        ({"choice": ["yes", ""]}, "sampling.choice: found an empty text"),
        ({"choice": ["yes", 5]}, "sampling.choice: found int, expected texts"),
        ({"choice": ["yes", "\udfff"]}, "half of a surrogate pair"),
        ({"choice": ["a" * 100] * 700}, "sampling.choice: found more than 65536 bytes together"),
        ({"json_object": False}, "sampling.json_object: found false, expected true"),
        ({"json_object": 1}, "sampling.json_object: found int, expected true"),
        ({"json_schema": True}, "sampling.json_schema: found bool, expected an object"),
        ({"json_schema": "{}"}, "sampling.json_schema: found str, expected an object"),
        ({"json_schema": {"a": float("nan")}}, "cannot be written as JSON"),
        ({"json_schema": {"a": 10**5000}}, "cannot be written as JSON"),
        ({"json_schema": {"a": {1, 2}}}, "cannot be written as JSON"),
        ({"json_schema": {"a": "\ud800"}}, "half of a surrogate pair"),
        ({"json_schema": {"a": "b" * TEXT_BYTES_MAX}}, "sampling.json_schema: found more than 65536 bytes"),
        ({"json_schema": {"enum": [[]] * (TEXT_BYTES_MAX + 1)}}, "found more than 65536 values"),
        ({"json_schema": nested(NESTING_MAX + 1)}, "nested deeper than 64"),
        ({"json_schema": nested(100_000)}, "nested deeper than 64"),
    ],
)
def test_a_refusal_names_its_reason(sent: object, reason: str) -> None:
    with pytest.raises(InputError) as raised:
        Constraint.read(sent)
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_schema_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["items"] = loop
    with pytest.raises(InputError, match="nested deeper"):
        Constraint.read({"json_schema": loop})
    wide: dict[str, Any] = {}
    wide["allOf"] = [wide, wide]
    with pytest.raises(InputError, match="the limit"):
        Constraint.read({"json_schema": wide})


def test_the_deepest_schema_allowed_is_allowed() -> None:
    assert Constraint.read({"json_schema": nested(NESTING_MAX)}).kind == "json_schema"


@pytest.mark.parametrize("text", ["", "[1]", "nonsense", "[" * 100_000, '{"a": ' * 70 + "1" + "}" * 70])
def test_a_constraint_made_by_hand_is_valid_as_well(text: str) -> None:
    with pytest.raises(InputError, match="json_schema"):
        Constraint("json_schema", text)


def test_a_json_object_has_no_value() -> None:
    with pytest.raises(InputError, match="expected nothing beside it"):
        Constraint("json_object", "{}")
