"""Steps of one worker hand over inside it, unless something can happen between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.text import explain_text
from weftline.pipelines.spec.loader import load_yaml

HERE = Path(__file__).parents[1]
Planned = Callable[..., Plan]


@pytest.fixture
def planned(catalog: dict[str, str]) -> Planned:
    def make(steps: str, outputs: str, inputs: str = "q: text, r: text") -> Plan:
        text = f"weftline: 1\nname: n\ninputs: {{{inputs}}}\nsteps:\n{steps}outputs: {{{outputs}}}\n"
        return make_plan(load_yaml(text, "x.yaml", HERE, catalog), Machine(4, 8 << 30), catalog)

    return make


def echo(name: str, wire: str, more: str = "", worker: str = "w") -> str:
    return f"  {name}: {{node: echo, inputs: {{value: {wire}}}, worker: {worker}{more}}}\n"


def chained(plan: Plan) -> list[list[str]]:
    return [[plan.steps[index].name for index in chain] for chain in plan.chains]


def test_steps_of_one_worker_that_follow_each_other_are_a_chain(planned: Planned) -> None:
    plan = planned(echo("a", "q") + echo("b", "a.value") + echo("c", "b.value"), "y: c.value, r: r")
    assert chained(plan) == [["a", "b", "c"]]
    text = explain_text(plan)
    assert "Passed on inside a worker\n  a -> b -> c  inside w\n" in text


def test_a_chain_may_branch_and_read_inputs(planned: Planned) -> None:
    both = "  d: {node: shaped, takes: text, inputs: {x: b.value, extra: r}, worker: w}\n"
    plan = planned(echo("a", "q") + echo("b", "a.value") + echo("c", "a.value") + both, "y: c.value, z: d.y")
    assert chained(plan) == [["a", "b", "c", "d"]]


def test_what_comes_from_elsewhere_ends_a_chain(planned: Planned) -> None:
    plan = planned(
        echo("a", "q") + echo("b", "a.value", worker="v") + echo("c", "b.value") + echo("d", "c.value"),
        "y: d.value, r: r",
    )
    assert chained(plan) == [["c", "d"]]


def test_two_heads_are_two_chains(planned: Planned) -> None:
    plan = planned(
        echo("a", "q") + echo("b", "r") + echo("c", "a.value") + echo("d", "b.value"), "y: c.value, z: d.value"
    )
    assert chained(plan) == [["a", "c"], ["b", "d"]]


def test_steps_in_processes_of_their_own_are_no_chain(planned: Planned) -> None:
    plan = planned(echo("a", "q", worker="a1") + echo("b", "a.value", worker="b1"), "y: b.value, r: r")
    assert chained(plan) == []
    plan = planned(echo("a", "q", ", instances: 2") + echo("b", "a.value"), "y: b.value, r: r")
    assert chained(plan) == [], "the second instance of a has no b beside it"
    plan = planned(echo("a", "q", ", instances: 2") + echo("b", "a.value", ", instances: 2"), "y: b.value, r: r")
    assert chained(plan) == [["a", "b"]]


@pytest.mark.parametrize(
    "more",
    [
        ", batch: {items_max: 4, wait_max_ms: 1}", ", batch: {items_max: 4, wait: auto}",
        ", batch: {items_max: 4, shapes: same}", ", retry: 1", ", timeout_ms: 5", ", fallback: {value: x}",
        ", when: r", ", sequence: {}",
    ],
)  # fmt: skip
def test_a_step_with_something_of_its_own_joins_no_chain(planned: Planned, more: str) -> None:
    plan = planned(echo("a", "q") + echo("b", "a.value", more) + echo("c", "b.value"), "y: c.value, r: r")
    assert not any("b" in chain[1:] for chain in chained(plan)), "it may start a chain of its own"


def test_the_head_has_any_batch_policy_but_padding(planned: Planned) -> None:
    for batch, chain in (
        ("{items_max: 4, wait_max_ms: 5, sizes: [2, 4]}", [["a", "b"]]), ("{wait: auto, items_max: 4}", [["a", "b"]]),
        ("{shapes: same}", [["a", "b"]]), ("{pad: {T: [4]}}", []),
    ):  # fmt: skip
        head = f"  a: {{node: shaped, takes: 'float32[T]', gives: text, inputs: {{x: q}}, worker: w, batch: {batch}}}\n"
        plan = planned(head + echo("b", "a.y"), "y: b.value, r: r", "q: 'float32[T]', r: text")
        assert chained(plan) == chain, batch


def test_what_may_be_absent_mapped_or_streamed_is_no_part_of_a_chain(planned: Planned) -> None:
    plan = planned(echo("a", "q") + echo("b", "a.value"), "y: b.value", "q: {type: text, optional: true}")
    assert chained(plan) == []
    lists = "  a: {node: echo, map: value, inputs: {value: q}, worker: w}\n"
    lists += "  b: {node: echo, map: value, inputs: {value: a.value}, worker: w}\n"
    assert chained(planned(lists, "y: b.value", "q: 'list[text]'")) == []
    say = "  b: {node: llm, model: m, inputs: {prompt: a.value}, worker: w}\n"
    assert chained(planned(echo("a", "q") + say, "y: b.text", "q: text")) == []
    optional = "  b: {node: shaped, takes: text, inputs: {x: a.value, extra: n}, worker: w}\n"
    plan = planned(echo("a", "q") + optional, "y: b.y", "q: text, n: {type: json, optional: true}")
    assert chained(plan) == []


def test_a_fallback_is_no_part_of_a_chain(planned: Planned) -> None:
    steps = echo("a", "q", ", fallback: c") + echo("b", "r") + echo("c", "b.value")
    assert chained(planned(steps, "y: a.value, z: b.value")) == []
