"""Pipelines that are to be open at the same time are planned one beside the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from weftline.errors import PipelineError
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.reservations import JointPlan, Owner, ReservationTable, planner
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_yaml

GIB = 1 << 30
MACHINE = Machine(2, 8 * GIB, (Device("cuda:0", 8 * GIB), Device("cuda:1", 8 * GIB)))


A, B, C = Owner("a", 1), Owner("b", 2), Owner("c", 3)


def taking(gib: int, device: str) -> Pipeline:
    step = f"{{node: echo, inputs: {{value: x}}, device: '{device}', device_bytes: {gib * GIB}}}"
    text = f"weftline: 1\nname: p\ninputs: {{x: text}}\nsteps: {{s: {step}}}\noutputs: {{y: s.value}}\n"
    return load_yaml(text, "p.yaml", Path())


def talking(gib: float | None, device: str = "cuda", more: str = "") -> Pipeline:
    """Return a pipeline of one llm step with this memory besides KV memory; None: unknown."""
    stated = "" if gib is None else f", device_bytes: {int(gib * GIB)}"
    step = f"{{node: llm, model: m, inputs: {{prompt: x}}, device: {device}{stated}{more}}}"
    text = f"weftline: 1\nname: p\ninputs: {{x: text}}\nsteps: {{s: {step}}}\noutputs: {{y: s.text}}\n"
    return load_yaml(text, "p.yaml", Path())


def together(pipelines: dict[Owner, Pipeline], reservations: ReservationTable | None = None) -> dict[Owner, Plan]:
    joint = JointPlan(MACHINE, reservations)
    for owner, pipeline in pipelines.items():
        joint.add(owner, planner(pipeline))
    return dict(joint.plans())


def test_each_is_planned_for_what_those_before_it_leave() -> None:
    joint = JointPlan(MACHINE)
    joint.add(A, planner(taking(4, "cuda")))
    with pytest.raises(PipelineError, match="a           another pipeline  claimed"):
        joint.add(B, planner(taking(3, "cuda")))
    joint.add(C, planner(taking(3, "cuda:1")))
    joint.add(Owner("d", 4), planner(taking(1, "cuda")))  # what was refused claims nothing
    with pytest.raises(PipelineError) as refused:
        joint.add(Owner("e", 5), planner(taking(1, "cuda")))
    assert refused.value.problems[0].fix.endswith("or unload a, d")
    assert [owner.name for owner in joint.plans()] == ["a", "c", "d"]


@pytest.mark.parametrize(
    "pipeline", [taking(4, "cuda"), taking(4, "cpu"), talking(2), talking(None), talking(1, "cpu")]
)
def test_a_single_pipeline_is_planned_as_without_reservations(pipeline: Pipeline) -> None:
    assert together({A: pipeline}) == {A: make_plan(pipeline, MACHINE)}


def test_llm_steps_divide_a_known_remainder_evenly_in_their_plans() -> None:
    plans = together({A: talking(1, "cuda"), B: talking(2, "auto"), C: talking(2, "cuda:0")})
    assert plans[B].step("s").device == "cuda:1", "it keeps away from one that takes what is left"
    part = (8 - 1 - 1 - 2 - 1) * GIB // 2
    for owner, other in ((A, C), (C, A)):
        (budget,) = plans[owner].budgets
        assert budget.kv_bytes == plans[owner].step("s").options["kv_bytes"] == part
        assert budget.claimed_bytes + part == budget.total_bytes
        row = next(claim for claim in budget.claims if claim.owner == other.name)
        assert row.bytes == part + GIB // 2 + (2 if other == C else 1) * GIB, "what it gets is claimed as well"
    assert plans[B].budgets[0].kv_bytes == make_plan(talking(2), MACHINE).budgets[0].kv_bytes, "it has all of its own"


def test_no_llm_step_has_a_size_while_one_claim_is_unknown() -> None:
    plans = together({A: talking(1, "cuda:0"), B: talking(None, "cuda:0"), C: talking(1, "cuda:1")})
    for owner in (A, B):
        assert plans[owner].budgets[0].kv_bytes == 0 and plans[owner].step("s").options["kv_bytes"] is None
    assert plans[C].budgets[0].kv_bytes > 0
    reservations = ReservationTable()
    reservations.try_reserve(C, make_plan(taking(3, "cuda:0"), MACHINE))
    beside = together({A: talking(1, "cuda:0"), B: talking(1, "cuda:0")}, reservations)
    assert [plan.budgets[0].kv_bytes for plan in beside.values()] == [GIB // 4, GIB // 4]
    assert reservations.reserved_bytes == {"cuda:0": 3 * GIB + GIB // 2}, "what was planned holds nothing yet"


def test_what_was_open_when_it_began_counts_whatever_happens_meanwhile() -> None:
    reservations = ReservationTable()
    reservations.try_reserve(C, make_plan(talking(None, "cuda:0", ", instances: 2"), MACHINE))
    joint = JointPlan(MACHINE, reservations)
    joint.add(A, planner(talking(1, "cuda:0")))
    reservations.release(C)
    assert joint.plans()[A].budgets[0].kv_bytes == 0, "the size of c is unknown"


def test_the_only_one_that_is_not_known_takes_what_the_others_leave() -> None:
    plans = together({A: talking(None, "cuda:0"), B: taking(2, "cuda:0"), C: talking(1, "cuda:1")})
    assert plans[A].budgets[0].rest_bytes == 8 * GIB - (1 + 2) * GIB - 2 * (GIB // 2)
    assert [plan.budgets[0].rest_bytes for plan in (plans[B], plans[C])] == [0, 0]
    held = ReservationTable()
    assert held.try_reserve(A, plans[A]) and held.try_reserve(B, plans[B]), "there is room for what is planned together"
    assert not held.try_reserve(Owner("late", 9), make_plan(taking(1, "cuda:0"), MACHINE))
    both = together({A: talking(None, "cuda:0"), B: talking(None, "cuda:0")})
    assert [plan.budgets[0].rest_bytes for plan in both.values()] == [0, 0]


def test_a_known_step_waits_for_another_that_waits_for_another_gpu() -> None:
    two = talking(1, "auto", ", instances: 2")
    assert make_plan(two, MACHINE).step("s").devices == ("cuda:0", "cuda:1")
    plans = together({A: two, B: talking(None, "cuda:1"), C: talking(1, "cuda:0")})
    assert [budget.kv_bytes for plan in plans.values() for budget in plan.budgets] == [0, 0, 0, 0]


def test_who_would_have_less_than_the_least_is_refused_with_who_has_what() -> None:
    reserve = 8 * GIB - 6 * GIB - GIB - (64 << 10)
    pipelines = {A: talking(3, "cuda:0"), B: talking(3, "cuda:0")}
    for owner, one in pipelines.items():
        tight = dataclasses.replace(one, gpu=dataclasses.replace(one.gpu, reserve_bytes=reserve))
        pipelines[owner] = tight
    with pytest.raises(PipelineError) as refused:
        together(pipelines)
    assert {problem.file for problem in refused.value.problems} == {"p.yaml"}
    assert "nothing is left for the KV memory of s" in refused.value.problems[0].found
    assert "another pipeline" in refused.value.problems[0].found
