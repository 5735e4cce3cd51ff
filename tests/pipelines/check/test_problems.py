"""Names are guessed well and values are shown short."""

import pytest

from weftline.pipelines.check.problems import did_you_mean, listed, nearest, shown


@pytest.mark.parametrize(
    ("word", "known", "name"),
    [
        ("item_max", ["items_max", "wait_max_ms"], "items_max"), ("modle", ["mode", "model"], "model"),
        ("MODEL", ["model"], "model"), ("wait-max-ms", ["wait_max_ms"], "wait_max_ms"),
        ("zzz", ["model"], ""), ("x", [], ""),
    ],
)  # fmt: skip
def test_the_nearest_name_is_what_was_meant(word: str, known: list[str], name: str) -> None:
    assert nearest(word, known) == name
    assert did_you_mean(word, known) == (f"did you mean {name}?" if name else "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), ("a", "'a'"), (3, "3"), ({}, "an empty mapping"),
        ({"a": 1}, "a mapping of 1 keys"),
        ([], "an empty list"), ([1, 2], "a list of 2"), ("x" * 100, "'" + "x" * 56 + "..."),
    ],
)  # fmt: skip
def test_values_are_shown_short(value: object, text: str) -> None:
    assert shown(value) == text


def test_long_lists_are_cut() -> None:
    assert listed([]) == "none"
    assert listed("abc") == "a, b, c"
    assert listed(map(str, range(20))).endswith("15 and 4 more")
