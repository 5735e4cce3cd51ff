"""Wires that lead nowhere, circles, and things that exist for nobody."""

import pytest

from weftline.pipelines.check.wiring import run_order
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.wire import Wire

ECHO = "{{node: echo, inputs: {{value: {}}}}}"


def echoes(wires: dict[str, str], outputs: str, inputs: str = "q: text") -> str:
    steps = "".join(f"  {name}: {ECHO.format(wire)}\n" for name, wire in wires.items())
    return f"inputs: {{{inputs}}}\nsteps:\n{steps}outputs: {{{outputs}}}\n"


@pytest.mark.parametrize(
    ("wire", "found", "fix"),
    [
        ("zzz", "there is no input zzz", ""),
        ("questoin", "there is no input questoin", "did you mean question?"),
        ("fisrt", "there is no input fisrt", "did you mean first.value?"),
        ("first", "first is a step, not an input", "write first.value"),
        ("fisrt.value", "there is no step fisrt", "did you mean first?"),
        ("first.valeu", "first has no output valeu", "did you mean first.value?"),
        ("first.whole", "first has no output whole", "did you mean first.value?"),
        ("question.text", "question is an input and has no ports", "write question"),
    ],
)
def test_a_wire_that_leads_nowhere_names_what_was_meant(problems, wire: str, found: str, fix: str) -> None:
    text = echoes({"first": "question", "second": wire}, "y: second.value, z: first.value", "question: text")
    assert [(path, one.found, one.fix) for path, one in problems(text).items()] == [
        ("steps.second.inputs.value", found, fix)
    ]
    text = echoes({"first": "question"}, f"y: {wire}, z: first.value", "question: text")
    assert [(path, one.found, one.fix) for path, one in problems(text).items()] == [("outputs.y", found, fix)]


def test_a_circle_is_named_whole(problems) -> None:
    found = problems(echoes({"b": "a.value", "c": "b.value", "a": "c.value"}, "y: c.value, q: q"))
    assert {path: one.found for path, one in found.items()} == {
        "steps.b.inputs.value": "the steps run in a circle: b -> c -> a -> b"
    }


def test_two_circles_are_two_problems_and_a_step_can_circle_alone(problems) -> None:
    found = problems(echoes({"a": "a.value", "b": "c.value", "c": "b.value"}, "y: c.value, q: q, x: a.value"))
    assert {one.found for one in found.values()} == {
        "the steps run in a circle: a -> a",
        "the steps run in a circle: b -> c -> b",
    }


def test_what_nobody_reads_is_said(problems) -> None:
    found = problems(echoes({"a": "q", "b": "a.value"}, "y: a.value", "q: text, unread: image"))
    assert set(found) == {"steps.b", "inputs.unread"}


def test_a_typo_does_not_make_what_was_meant_unread(problems) -> None:
    assert set(problems(echoes({"a": "q", "b": "q"}, "y: b.value, z: aa.value"))) == {"outputs.z"}


def test_an_empty_pipeline_says_what_it_lacks(problems) -> None:
    assert set(problems("steps: {}\noutputs: {}\n")) == {"steps", "outputs"}


def test_an_input_can_be_an_output(problems) -> None:
    assert problems(echoes({"a": "q"}, "y: a.value, again: q")) == {}


def test_required_inputs_must_be_wired_and_optional_ones_need_not(problems) -> None:
    head = "inputs: {q: text}\nsteps: {a: {node: shaped, takes: text, inputs: {"
    tail = "}}}\noutputs: {y: a.y}\n"
    assert problems(f"{head}x: q{tail}") == {}
    assert problems(f"{head}x: q, extra: q{tail}") == {}
    found = problems(f"{head}extra: q, ex: q{tail}")
    assert set(found) == {"steps.a.inputs", "steps.a.inputs.ex"}
    assert "x (text)" in found["steps.a.inputs.ex"].expected


def test_the_order_is_the_files_among_steps_that_are_ready() -> None:
    wires = {"d": "c", "c": "a", "b": None, "a": None, "e": "b"}
    steps = tuple(Step(name, "echo", {}, {"value": Wire(wire, "value")}) for name, wire in wires.items())
    assert run_order(Pipeline("p", (), steps, {})) == ["b", "a", "c", "d", "e"]


def test_steps_behind_a_circle_are_left_out_of_the_order() -> None:
    wires = {"a": "b", "b": "a", "after": "b", "free": None}
    steps = tuple(Step(name, "echo", {}, {"value": Wire(wire, "value")}) for name, wire in wires.items())
    assert run_order(Pipeline("p", (), steps, {})) == ["free"]
