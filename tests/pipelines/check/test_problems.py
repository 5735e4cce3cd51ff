"""Names are guessed well and values are shown short.

Problems have the line and the path of the source.
"""

import pytest

from weftline.errors import Problem
from weftline.pipelines.check.problems import Origin, Report, did_you_mean, listed, nearest, shown
from weftline.pipelines.spec.graph import Pipeline


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


LINES = {"steps.answer": 3, "steps.answer.prompt": 5}


def test_problems_are_placed_once_and_under_what_was_written() -> None:
    report = Report(
        Pipeline("p", (), (), {}, file="p.yaml", lines=LINES), {"steps.answer_prompt": Origin("steps.answer.prompt")}
    )
    report.add("steps.answer_prompt.inputs.see__x", "odd")
    report.add("steps.answer_prompt.inputs.see__x", "odd")
    report.add("steps.answer.model", "missing")
    report.add("steps.answer_prompted", "another step")
    report.add("steps.answer.prompt", "later", line=9)
    assert [(one.path, one.line, one.file) for one in report.problems] == [
        ("steps.answer.prompt", 5, "p.yaml"),
        ("steps.answer.model", 3, "p.yaml"),
        ("steps.answer_prompted", 0, "p.yaml"),
        ("steps.answer.prompt", 9, "p.yaml"),
    ]
    assert report.holds("steps.answer_prompt.template")
    assert not report.holds("steps.answer")


def test_a_problem_of_another_file_has_its_path() -> None:
    inner = Pipeline("i", (), (), {}, file="i.yaml", lines={"steps.say": 7, "steps.say.model": 8})
    report = Report(
        Pipeline("p", (), (), {}, file="p.yaml", lines=LINES),
        {"steps.read/say": Origin("steps.say", inner, whole=False)},
    )
    report.add("steps.read/say.model", "missing")
    report.add("steps.say.model", "another step, of the outer file")
    assert [(one.path, one.line, one.file) for one in report.problems] == [
        ("steps.say.model", 8, "i.yaml"),
        ("steps.say.model", 0, "p.yaml"),
    ]
    assert report.holds("steps.read/say.model")


def test_a_problem_that_has_its_file_is_left_as_it_is() -> None:
    report = Report(Pipeline("p", (), (), {}, file="p.yaml", lines=LINES), {"steps.answer": Origin("steps.other")})
    found = Problem("steps.answer", "odd", file="i.yaml")
    report.take([found, found])
    assert report.problems == [found]
