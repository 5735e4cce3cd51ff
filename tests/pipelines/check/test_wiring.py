"""Dangling wires, cycles, and unused parts.

Which steps stream and which wires carry pieces: pieces where both ends can, the whole everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weftline.errors import Problem
from weftline.pipelines.check.wiring import run_order
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.text import explain_mermaid, explain_text
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.loader import load_yaml
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
        "steps.b.inputs.value": "the steps form a cycle: b -> c -> a -> b"
    }


def test_two_circles_are_two_problems_and_a_step_can_circle_alone(problems) -> None:
    found = problems(echoes({"a": "a.value", "b": "c.value", "c": "b.value"}, "y: c.value, q: q, x: a.value"))
    assert {one.found for one in found.values()} == {
        "the steps form a cycle: a -> a",
        "the steps form a cycle: b -> c -> b",
    }


def test_unread_parts_are_reported(problems) -> None:
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


HERE = Path(__file__).parents[1]

HEAD = """\
weftline: 1
name: one
inputs: {x: text}
steps:
"""
SAY = "  say: {node: llm, inputs: {prompt: x}, model: m}\n"
GUARD = "  guard: {node: guardrail, inputs: {text: say.text}}\n"
OUTPUTS = "outputs: {y: guard.text}\n"


def planned(text: str, catalog: dict[str, str]) -> Plan:
    return make_plan(load_yaml(HEAD + text, "one.yaml", HERE, catalog), Machine(4, 8 << 30), catalog)


def streams(plan: Plan) -> dict[str, bool]:
    """Return the steps that stream, and whether each takes pieces."""
    return {step.name: any(read.pieces for read in step.inputs) for step in plan.steps if step.streams}


def test_a_guardrail_behind_a_stream_takes_its_pieces_and_gives_them(catalog: dict[str, str]) -> None:
    plan = planned(SAY + GUARD + OUTPUTS, catalog)
    assert streams(plan) == {"say": False, "guard": True}
    assert plan.step("guard").fed == ("text",) and plan.outputs[0].pieces
    assert "text <- say.text, streams" in explain_text(plan)
    assert "text, streams" in explain_mermaid(plan)


def test_a_guardrail_behind_anything_else_is_run_in_batches(catalog: dict[str, str]) -> None:
    plan = planned("  guard: {node: guardrail, inputs: {text: x}}\n" + OUTPUTS, catalog)
    assert streams(plan) == {} and not plan.outputs[0].pieces and plan.step("guard").fed == ()


def test_pieces_go_on_from_guardrail_to_guardrail(catalog: dict[str, str]) -> None:
    second = "  again: {node: guardrail, inputs: {text: guard.text}}\n"
    plan = planned(SAY + GUARD + second + "outputs: {y: again.text}\n", catalog)
    assert streams(plan) == {"say": False, "guard": True, "again": True}


def test_the_whole_goes_where_the_source_has_a_fallback(catalog: dict[str, str]) -> None:
    say = "  say: {node: llm, inputs: {prompt: x}, model: m, fallback: {text: Sorry.}}\n"
    assert streams(planned(say + GUARD + OUTPUTS, catalog)) == {"say": False}


def test_the_whole_goes_into_and_out_of_lists(catalog: dict[str, str]) -> None:
    say = "  say: {node: llm, inputs: {prompt: xs}, model: m, map: prompt}\n"
    guard = "  guard: {node: guardrail, inputs: {text: say.text}, map: text}\n"
    plan = make_plan(
        load_yaml(HEAD.replace("x: text", '"xs": "list[text]"') + say + guard + OUTPUTS, "one.yaml", HERE, catalog),
        Machine(4, 8 << 30), catalog,
    )  # fmt: skip
    assert streams(plan) == {"say": False}


def test_a_fed_step_may_have_a_fallback_a_condition_and_a_retry(catalog: dict[str, str]) -> None:
    guard = (
        "  guard: {node: guardrail, inputs: {text: say.text}, when: x, retry: {attempts: 1}, timeout_ms: 100,\n"
        "          fallback: {text: no}}\n"
    )
    assert streams(planned(SAY + guard + OUTPUTS, catalog)) == {"say": False, "guard": True}


def test_a_node_that_takes_pieces_and_has_no_way_to_is_reported(
    catalog: dict[str, str], problems: Callable[[str], dict[str, Problem]], tmp_path: Path
) -> None:
    (tmp_path / "n.py").write_text(
        "from weftline.node import BatchNode, Ports, port\n"
        "class Takes(BatchNode):\n"
        "    @classmethod\n"
        "    def ports(cls, config, step):\n"
        "        return Ports((port('text', 'text', pieces=True),), (port('text', 'text'),))\n"
        "    def run(self, batch):\n"
        "        return {}\n"
    )
    step = f"  s: {{node: '{tmp_path}/n.py:Takes', inputs: {{text: x}}}}\n"
    found = problems("inputs: {x: text}\nsteps:\n" + step + "outputs: {y: s.text}\n")
    assert found["steps.s.node"].found == "has the streamed input text, and Takes has no `feed`"
