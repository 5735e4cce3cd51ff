"""Which steps stream and which wires carry pieces: pieces where both ends can, the whole everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weftline.errors import Problem
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.text import explain_mermaid, explain_text
from weftline.pipelines.spec.loader import load_yaml

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
    assert found["steps.s.node"].found == "takes text in pieces, and Takes has no `feed`"
