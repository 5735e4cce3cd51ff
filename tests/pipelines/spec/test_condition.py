"""Conditions mean what Python means by them, see nothing but values, and say where they are wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.pipelines.spec.condition import (
    CHARS_MAX,
    Condition,
    all_of,
    any_of,
    equals,
    none_of,
    parse,
    resolve,
    rewired,
)
from weftline.pipelines.spec.wire import Wire


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("guard.verdict.action == 'block'", [{"action": "block"}], True),
        ("guard.verdict['action'] == 'block'", [{"action": "allow"}], False),
        ("rows[0].name == 'a' and rows[-1] == null", [[{"name": "a"}, None]], True),
        ("not skip", [None], True), ("skip", [0], False), ("skip or a.b", [0, "x"], True),
        ("see.labels == ['cat', 'dog']", [["cat", "dog"]], True), ("'cat' in see.labels", [["dog"]], False),
        ("kind in ['a', 'b']", ["b"], True), ("kind not in ['a', 'b']", [None], True),
        ("len(see.boxes) > 2", [[None] * 3], True), ("max(x) > 2", [[1, 3]], True), ("max(x) > 2", [[1, 2]], False),
        ("max(x, default=0) == 0", [[]], True), ("min(x.y) == 'a'", [["b", "a"]], True),
        ("max(x.y, default=0) == 0", [None], True),
        ("max(a, b, 2) == 2", [1, 0], True), ("min(len(x), 2) == 1", [[7]], True), ("max(x) == 4", [4], True),
        ("max == 'a'", ["a"], True), ("0 < score <= 0.5", [0.5], True), ("0 < score <= 0.5", [0], False),
        ("x.missing.deeper == null", [{}], True), ("x[7] == null", [[1]], True), ("x[-3] == null", [[1]], True),
        ("x == true", [True], True), ("x == '# 1'", ["# 1"], True),
        ("x == -1.5", [-1.5], True), (" x\n  == 'a b' ", ["a b"], True), ("'b' in text", ["abc"], True),
        ("(a or b) == 3", [None, 3], True), ("a.x.__class__ == null", [{}], True),
    ],
)  # fmt: skip
def test_it_holds_or_not(text: str, values: list[Any], holds: bool) -> None:
    assert parse(text).holds(values) is holds


def test_it_knows_what_it_reads_each_once() -> None:
    found = parse("a.b == c and a.b.key != d['x'] and not c")
    assert found.wires == (Wire("a", "b"), Wire(None, "c"), Wire(None, "d"))
    assert found.text == "a.b == c and a.b.key != d['x'] and not c"


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ("f(x)", 1, "nothing can be called but len(x)"), ("x is None", 1, "write == or !="),
        ("a == b and x.y()", 12, "nothing can be called"), ("  1 + x > 2", 3, "nothing can be computed"),
        ("my-step.text == 'x'", 1, "rename it"), ("x[1:2]", 3, "cannot stand here"), ("x[true]", 3, "a key is"),
        ("x == b'1'", 6, "cannot stand here"), ("'é' == f'{x}'", 8, "cannot stand here"), ("[x]", 2, "cannot stand"),
        ("a && b", 4, "write `and` for &&"), ("a = 3", 3, "write `==` for ="), ("len", 1, "len is written len(x)"),
        ("max(*x)", 1, "without *"), ("max()", 1, "nothing can be called"),
        ("max(x, key=1)", 1, "max is written max(x)"),
        ("max(a, b, default=1)", 1, "max is written max(x)"),
        ("len(*x)", 1, "nothing can be called"), ("lambda: x", 1, "cannot stand here"), ("'a'.upper", 1, "has none"),
        ("x if y else z", 1, "cannot stand here"), ("true.x", 1, "has none"), ("-true", 1, "nothing can be computed"),
        ("x == 1j", 6, "cannot stand here"), ("(x := 3)", 2, "cannot stand here"), ("len(x, y)", 1, "nothing can be"),
        (" (x)  # é\n and y == 1", 7, "no comments"),
    ],
)  # fmt: skip
def test_what_a_condition_cannot_say_is_refused_with_its_place(text: str, where: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"^at character {where}: ") as caught:
        parse(text)
    assert said in str(caught.value)


def test_signs_of_comparisons_get_no_hint() -> None:
    with pytest.raises(ValueError, match="at character") as caught:
        parse("a >= 3 b == c != d <= e")
    assert "write `" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "", " \n", "not " * 60 + "x", "(" * 300 + "x" + ")" * 300, "x" + ".a" * 40, "x" * (CHARS_MAX + 1), "\0",
        "x == " + "[" * 40 + "]" * 40,
    ],
)  # fmt: skip
def test_what_is_empty_long_or_deep_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "values", "said"),
    [
        ("a.score < 3", [None], "a.score (null) < 3 (a number) cannot be decided"),
        ("a.b.c >= 'x'", [{"c": 1}], "a.b.c (a number) >= 'x' (text) cannot be decided"),
        ("3 in x", [5], "3 (a number) in x (a number) cannot be decided"),
        ("len(x) > 1", [5], "x is a number, which has no len"),
        ("max(x) > 1", [None], "x is null, not a list; write `x != null and ...` where x may be absent"),
        ("len(x.y.z) > 1", [{}], "x.y.z is null, which has no len; write `x != null and ...` where x may be absent"),
        ("max(x) > 1", [[]], "max(x) of an empty list; write max(x, default=...)"),
        ("min(x) > 1", [[1, "a"]], "min(x) of a number, text cannot be decided"),
        ("max(x, 2) > 1", ["a"], "max(x, 2) of text, a number cannot be decided"),
        ("a.x.key == 1", ["text"], "a.x is text, which has no 'key'"),
        ("x['a b'].c == 1", [{"a b": True}], "x['a b'] is true or false, which has no 'c' in it"),
    ],
)  # fmt: skip
def test_what_cannot_be_decided_names_both_sides_and_shows_no_value(text: str, values: list[Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text).holds(values)
    assert said in str(caught.value)


def test_names_of_inputs_are_read_as_inputs() -> None:
    found = resolve(parse("q.kind == 'a' and q.kind.deep == see.kind and q"), {"q"})
    assert found.wires == (Wire(None, "q"), Wire("see", "kind"))
    assert found.holds([{"kind": "b"}, None]) is False
    with pytest.raises(ValueError, match=r"q\.kind is text"):
        found.holds([{"kind": "a"}, "a"])
    untouched = parse("see.kind == 'a'")
    assert resolve(untouched, {"q"}) is untouched


@pytest.mark.parametrize(
    "text", ["max(facts.scores) < 0.8", "min(facts.scores, default=1) < 0.8", "max(facts.a, 0) < 1"]
)
def test_extremes_of_inputs_and_of_joined_conditions_hold(text: str) -> None:
    one = resolve(parse(text), ["facts"])
    assert one.wires == (Wire(None, "facts"),)
    for each in (one, all_of([one, one]), rewired(one, [Wire("s", "facts")])):
        assert each.holds([{"scores": [0.5], "a": 0.5}])
        assert not each.holds([{"scores": [0.9], "a": 1.5}])


def test_conditions_are_joined_over_the_same_wires() -> None:
    by = Wire("ask", "kind")
    both = any_of([all_of([equals(by, "a"), equals(Wire(None, "x"), True)]), none_of(by, ["a", 3])])
    assert both.text == "(ask.kind == 'a' and x == true) or ask.kind not in ['a', 3]"
    assert both.wires == (by, Wire(None, "x"))
    assert [both.holds(values) for values in (["a", True], ["a", False], ["b", None], [3, None])] == [
        True, False, True, False,
    ]  # fmt: skip
    again = parse(both.text)
    assert [again.holds(values) for values in (["a", True], ["a", False])] == [True, False]
    moved = rewired(both, [Wire("b/ask", "kind"), Wire("b/ask", "kind")])
    assert moved.wires == (Wire("b/ask", "kind"),)
    assert moved.holds([3]) is False
    assert all_of([both]) is both


# against Python itself


class Text(str):
    """Text that cannot be looked into, as conditions have it."""

    def __getitem__(self, key: Any) -> str:
        raise TypeError("text has no keys")


class Loose(dict[str, Any]):
    """A mapping in which a missing key is None, and keys are attributes too: what a condition makes of JSON."""

    def __missing__(self, key: str) -> None:
        return None

    __getattr__ = dict.get


NAMES = ("x", "y", "step")
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, "", "a", "ab"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("kab"), inner, max_size=2)
)
LITERALS = SCALARS.map(repr) | st.lists(SCALARS, max_size=3).map(repr)
LEAVES = st.sampled_from(["x", "y", "step.out", "x.k", "y['a']", "step.out.k", "x[0]"]) | LITERALS
SIGNS = st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"])


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return (
        st.tuples(inner, SIGNS, inner).map(lambda parts: f"({' '.join(parts)})")
        | st.tuples(inner, SIGNS, inner, SIGNS, inner).map(lambda parts: f"({' '.join(parts)})")
        | st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})")
        | inner.map(lambda one: f"(not {one})")
        | inner.filter(lambda one: one[0] in "xys(").map(lambda one: f"len({one})")
    )


TEXTS = st.recursive(LEAVES, _larger, max_leaves=8)


def python_says(text: str, values: dict[str, Any]) -> bool | None:
    """Return what Python makes of the text; None when it raises."""
    given = {"x": values["x"], "y": values["y"], "step": Loose(out=values["step"]), "len": len, "__builtins__": {}}
    try:
        return bool(eval(text, given))  # noqa: S307 - the oracle; its texts are made above
    except (TypeError, AttributeError, IndexError, KeyError):
        return None


def loosened(value: Any) -> Any:
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, dict):
        return Loose({key: loosened(one) for key, one in value.items()})
    return [loosened(one) for one in value] if isinstance(value, list) else value


@settings(max_examples=150, deadline=None)
@given(TEXTS, VALUES, VALUES, VALUES)
def test_it_means_what_python_means(text: str, x: Any, y: Any, out: Any) -> None:
    values = {"x": x, "y": y, "step": out}
    found = resolve(parse(text), {"x", "y"})
    said = python_says(text, {name: loosened(one) for name, one in values.items()})
    if said is None:  # where Python raises, null may have answered for a missing key; it is never a Python error
        try:
            found.holds([values[wire.step or wire.port] for wire in found.wires])
        except ValueError:
            return
    else:
        assert found.holds([values[wire.step or wire.port] for wire in found.wires]) is said


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30) | st.text(alphabet="xy.()[]'\"=<>!andor notilen 01,-:", max_size=30))
def test_any_text_is_a_condition_or_a_value_error(text: str) -> None:
    try:
        found = parse(text)
    except ValueError:
        return
    assert isinstance(found, Condition)
