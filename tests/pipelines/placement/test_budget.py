"""Who takes what of each GPU: what is left is KV memory, and what is too much is refused with a table."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from weftline.engine.protocol.first_message import open_message
from weftline.errors import PipelineError
from weftline.pipelines.placement.budget import LEAST_BYTES, over_commit_text, reserve_of
from weftline.pipelines.placement.machine import Device, Machine, Taken
from weftline.pipelines.placement.plan import Claim, DeviceBudget, Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import Measured, Profile, StepProfile, step_digest
from weftline.pipelines.placement.reservations import reserved_memory
from weftline.pipelines.render.text import explain_text
from weftline.pipelines.spec.loader import load_yaml

GIB, MIB = 1 << 30, 1 << 20
ONE = Machine(8, 64 * GIB, (Device("cuda:0", 24 * GIB, "NVIDIA L4"),))
TWO = Machine(8, 64 * GIB, (Device("cuda:0", 24 * GIB), Device("cuda:1", 24 * GIB)))
TEXT = """
inputs: {{photo: image, x: "float32[4, 8]"}}
steps:
  find: {{node: find, inputs: {{image: photo}}{find}}}
  name: {{node: name, inputs: {{image: find.image}}{name}}}
  grow: {{node: grow, inputs: {{x: x}}{grow}}}
outputs: {{label: name.label, y: grow.y}}
"""
STATED = {"find": f", device_bytes: {2 * GIB}", "name": f", device_bytes: {GIB}", "grow": f", device_bytes: {8 * GIB}"}


@pytest.fixture
def planned(device_catalog: dict[str, str]):
    def make(machine: Machine = ONE, more: str = "", profile: Profile | None = None, **steps: str) -> Plan:
        text = TEXT.format(**(dict.fromkeys(STATED, "") | steps))
        pipeline = load_yaml(f"weftline: 1\nname: near\n{text}{more}\n", "near.yaml", Path(), device_catalog)
        return make_plan(pipeline, machine, device_catalog, profile)

    return make


@pytest.fixture
def filling(device_catalog: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that streams takes what is left when it opens, as an LLM does."""
    monkeypatch.setattr(sys.modules["weftline_device_nodes"].Grow, "fills_memory", True)


def claims(budget: DeviceBudget) -> set[tuple[str, str, int, str]]:
    return {(claim.owner, claim.what, claim.bytes // MIB, claim.source) for claim in budget.claims}


def test_everything_that_takes_memory_is_claimed(planned) -> None:
    (budget,) = planned(**STATED).budgets
    assert claims(budget) == {
        ("", "reserve", 1024, "assumed"),
        ("gpu0", "context", 512, "assumed"), ("gpu0", "arena", 256, "assumed"),
        ("grow", "context", 512, "assumed"),
        ("find", "weights and work", 2048, "stated"), ("name", "weights and work", 1024, "stated"),
        ("grow", "weights and work", 8192, "stated"),
    }  # fmt: skip
    assert budget.claimed_bytes + budget.kv_bytes == budget.total_bytes == 24 * GIB


def test_what_is_left_goes_to_the_llm_step_that_names_none(planned) -> None:
    plan = planned(**STATED)
    left = plan.budgets[0].kv_bytes
    assert plan.step("grow").options["kv_bytes"] == left == plan.limits.kv_bytes["cuda:0"] > 10 * GIB
    two = planned(**(STATED | {"grow": f", instances: 2, device_bytes: {4 * GIB}"}))
    assert two.step("grow").options["kv_bytes"] == int(two.budgets[0].kv_bytes / 4), "half is given where it is needed"
    assert two.limits.kv_bytes == {"cuda:0": two.budgets[0].kv_bytes}


def test_kv_memory_that_is_stated_is_claimed(planned) -> None:
    own = planned(**(STATED | {"grow": f", kv_bytes: {3 * GIB}, device_bytes: {8 * GIB}"}))
    assert ("grow", "KV memory", 3072, "stated") in claims(own.budgets[0]) and own.budgets[0].kv_bytes == 0
    assert own.limits.kv_bytes == {}
    limit = planned(more=f"limits: {{kv_bytes: {{cuda: {5 * GIB}}}}}", **STATED)
    assert ("llm steps", "KV memory", 5120, "stated") in claims(limit.budgets[0]) and limit.budgets[0].kv_bytes == 0
    assert limit.step("grow").options["kv_bytes"] == 5 * GIB // 2


def test_with_something_unknown_kv_memory_is_decided_when_it_opens(planned) -> None:
    plan = planned(**(STATED | {"name": ""}))
    assert ("name", "weights and work", 0, "unknown") in claims(plan.budgets[0])
    assert plan.budgets[0].kv_bytes == 0 and plan.step("grow").options["kv_bytes"] is None and not plan.limits.kv_bytes


def test_the_only_unknown_llm_step_uses_the_remainder_when_it_opens(planned, filling) -> None:
    plan = planned(**(STATED | {"grow": ""}))
    (budget,) = plan.budgets
    assert budget.rest_bytes == budget.total_bytes - budget.claimed_bytes == 24 * GIB - (1024 + 768 + 512 + 3072) * MIB
    assert plan.step("grow").options["kv_bytes"] is None and not plan.limits.kv_bytes
    reserved = reserved_memory(plan, budget)
    assert (reserved.bytes, reserved.fills, reserved.takers) == (23 * GIB, True, 0), "no other pipeline has a share"
    assert "are left for grow, which was not measured" in explain_text(plan)
    planned_bytes = {
        step.name: (step.memory_limit_bytes, step.reserve_bytes)
        for worker in range(len(plan.workers))
        for step in open_message(plan, worker, Path()).steps
    }
    assert planned_bytes == {"find": (0, 0), "name": (0, 0), "grow": (budget.rest_bytes, GIB)}


@pytest.mark.parametrize(
    ("machine", "more", "steps"),
    [
        (ONE, "", {"name": "", "grow": ""}),  # another step's memory is not known
        (ONE, "", {"grow": ", instances: 2"}),  # two take from one device
        (ONE, f"limits: {{kv_bytes: {{cuda: {GIB}}}}}", {"grow": ""}),
        (ONE, "", {"grow": f", kv_bytes: {GIB}"}),
        (dataclasses.replace(ONE, devices=(dataclasses.replace(ONE.devices[0], shared=True),)), "", {"grow": ""}),
        (
            dataclasses.replace(
                ONE, devices=(dataclasses.replace(ONE.devices[0], taken=(Taken("other", GIB, known=False),)),)
            ),
            "",
            {"grow": ""},
        ),
        (dataclasses.replace(ONE, devices=(Device("fake:0", 24 * GIB),)), "", {"grow": ""}),
    ],
)
def test_where_others_may_take_as_much_memory_is_given_out_as_it_is_needed(
    planned, filling, machine, more, steps
) -> None:
    plan = planned(machine, more, **(STATED | steps))
    assert [one.rest_bytes for one in plan.budgets] == [0]


def test_other_pipelines_memory_is_no_part_of_what_is_left(planned, filling) -> None:
    device = dataclasses.replace(ONE.devices[0], taken=(Taken("other", 5 * GIB),), reserve_bytes=2 * GIB)
    (budget,) = planned(dataclasses.replace(ONE, devices=(device,)), **(STATED | {"grow": ""})).budgets
    assert budget.rest_bytes == 24 * GIB - (2048 + 768 + 512 + 3072) * MIB - 5 * GIB
    assert reserve_of(budget) == 2 * GIB


def test_the_plan_says_what_is_left(planned) -> None:
    assert "14 GiB are left, all of it KV memory" in explain_text(planned(TWO, **STATED))
    assert "19 GiB are left\n" in explain_text(planned(TWO, **STATED))
    own = STATED | {"grow": f", kv_bytes: {3 * GIB}, device_bytes: {8 * GIB}"}
    assert "7.8 GiB are left\n" in explain_text(planned(**own))
    assert "at most 12 GiB are left; not measured: name" in explain_text(planned(**(STATED | {"name": ""})))


def test_each_gpu_that_is_used_has_a_budget(planned) -> None:
    plan = planned(TWO, **STATED)
    assert [one.device for one in plan.budgets] == ["cuda:0", "cuda:1"]
    assert plan.step("grow").device == "cuda:0" and plan.step("find").device == plan.step("name").device == "cuda:1"
    assert [one.kv_bytes > 0 for one in plan.budgets] == [True, False]
    assert planned(Machine(8, 64 * GIB)).budgets == ()
    assert [one.device for one in planned(TWO).budgets] == ["cuda:0"], "unknown steps are on the first"


def test_what_a_gpu_policy_says_is_stated(planned) -> None:
    more = "gpu: {reserve_bytes: 0, context_bytes: 1048576, arena_bytes: 2097152, processes: separate}"
    plan = planned(more=more, **STATED)
    assert ("", "reserve", 0, "stated") in claims(plan.budgets[0])
    assert ("find", "context", 1, "stated") in claims(plan.budgets[0])
    assert {claim for claim in claims(plan.budgets[0]) if claim[1] == "arena"} == {("find", "arena", 2, "stated")}


def profile_of(plan: Plan, kind: str, **sizes: int) -> Profile:
    steps = {
        step.name: StepProfile(step_digest(step), {kind: Measured(GIB, {step.batch.items_max: sizes[step.name] * GIB})})
        for step in plan.steps
    }
    return Profile(steps, {kind: 300 * MIB})


def test_what_was_measured_need_not_be_stated(planned) -> None:
    profile = profile_of(planned(), "cuda L4", find=2, name=3, grow=8)
    plan = planned(profile=profile)
    assert ("name", "weights and work", 3072, "measured") in claims(plan.budgets[0])
    assert ("gpu0", "context", 300, "measured") in claims(plan.budgets[0])
    assert plan.step("name").device_bytes == 3 * GIB and plan.budgets[0].kv_bytes > 0
    stated = planned(profile=profile, name=f", device_bytes: {GIB}")
    assert ("name", "weights and work", 1024, "stated") in claims(stated.budgets[0]), "the pipeline has the last word"
    other = planned(TWO, profile=profile)
    assert ("name", "weights and work", 0, "unknown") in claims(other.budgets[0]), "measured on another kind of GPU"


def test_a_step_that_has_changed_is_unknown_and_a_note_says_so(planned) -> None:
    profile = profile_of(planned(), "cuda L4", find=2, name=3, grow=8)
    old = dataclasses.replace(profile.steps["name"], digest="0" * 16)
    plan = planned(profile=dataclasses.replace(profile, steps={**profile.steps, "name": old}))
    assert ("name", "weights and work", 0, "unknown") in claims(plan.budgets[0])
    assert [note for note in plan.notes if "measured" in note] == [
        "name has changed since it was measured (node or options). Run `weftline profile`"
    ]


def test_too_much_is_refused_with_a_table_largest_first_and_a_way_out(planned) -> None:
    with pytest.raises(PipelineError) as refused:
        planned(**(STATED | {"find": f", instances: 2, device_bytes: {8 * GIB}"}))
    (problem,) = refused.value.problems
    assert (problem.path, problem.file, problem.line) == ("steps.find.device_bytes", "near.yaml", 6)
    assert problem.found.splitlines() == [
        "cuda:0 has 24 GiB, and 28 GiB of it are claimed: 4 GiB too much",
        "       16 GiB  find (2 instances)  weights and work  stated",
        "        8 GiB  grow                weights and work  stated",
        "        1 GiB  name                weights and work  stated",
        "        1 GiB                      reserve           assumed",
        "      512 MiB  gpu0                context           assumed",
        "      512 MiB  gpu0-2              context           assumed",
        "      512 MiB  grow                context           assumed",
        "      256 MiB  gpu0                arena             assumed",
        "      256 MiB  gpu0-2              arena             assumed",
        "       28 GiB  together",
        "       24 GiB  cuda:0 has",
    ]
    assert problem.fix.startswith("put find or others on another GPU")


def test_each_gpu_that_is_over_committed_is_a_problem(planned) -> None:
    steps = {name: f", device: {device}, device_bytes: {30 * GIB}"
             for name, device in (("find", "cuda"), ("name", "cuda"), ("grow", "'cuda:1'"))}  # fmt: skip
    with pytest.raises(PipelineError) as refused:
        planned(TWO, more="gpu: {mps: true}", **steps)
    assert [one.found.split(",")[0] for one in refused.value.problems] == ["cuda:0 has 24 GiB", "cuda:1 has 24 GiB"]
    assert [one.line for one in refused.value.problems] == [6, 8], "where the largest of its claims stands"


@pytest.mark.parametrize(
    ("more", "grow", "line", "fix"),
    [
        ("", f", kv_bytes: {20 * GIB}, device_bytes: {8 * GIB}", 8, "lower steps.grow.kv_bytes by 9.2 GiB"),
        (f"limits: {{kv_bytes: {{cuda: {20 * GIB}}}}}", STATED["grow"], 10, "lower limits.kv_bytes.cuda:0 by 9.2 GiB"),
        (f"gpu: {{reserve_bytes: {24 * GIB}}}", STATED["grow"], 10, "lower gpu.reserve_bytes by 12 GiB"),
        (f"gpu: {{reserve_bytes: {24 * GIB}, context_bytes: {30 * GIB}}}", STATED["grow"], 10, "lower gpu.reserve_b"),
        (f"gpu: {{arena_bytes: {30 * GIB}}}", STATED["grow"], 10, "lower gpu.arena_bytes, or"),
        ("", f", device_bytes: {22 * GIB}", 8, "put grow or others on another GPU (`device:`), or lower steps.grow.de"),
    ],
)
def test_the_way_out_is_the_largest_thing_that_can_be_lowered(
    planned, more: str, grow: str, line: int, fix: str
) -> None:
    with pytest.raises(PipelineError) as refused:
        planned(more=more, **(STATED | {"grow": grow}))
    (problem,) = refused.value.problems
    assert problem.fix.startswith(fix) and problem.line == line


def test_a_gpu_that_holds_not_even_processes_has_a_way_out(planned) -> None:
    with pytest.raises(PipelineError) as refused:
        planned(more=f"gpu: {{reserve_bytes: 0, context_bytes: {13 * GIB}}}", find=", worker: f")
    (problem,) = refused.value.problems
    assert problem.found.startswith("cuda:0 has 24 GiB, and 39 GiB of it are claimed")
    assert (problem.path, problem.line) == ("gpu.arena_bytes", 10)
    with pytest.raises(PipelineError) as refused:
        planned(
            more=f"gpu: {{reserve_bytes: 0, context_bytes: {25 * GIB}}}", find=", device: cpu", name=", device: cpu"
        )
    assert refused.value.problems[0].fix == "let steps share a process, or use another GPU (`device:`)"


def test_a_step_with_an_unknown_device_has_no_planned_kv_memory(planned) -> None:
    known = STATED | {"grow": f", instances: {{'cuda:0': 1, 'cuda:1': 1}}, device_bytes: {GIB}"}
    both = planned(TWO, **known)
    assert [one.kv_bytes > 0 for one in both.budgets] == [True, True] and both.step("grow").options["kv_bytes"]
    for more in (
        {"name": ", device: 'cuda:1'"},
        {"grow": f", instances: {{'cuda:0': 1, cpu: 1}}, device_bytes: {GIB}"},
    ):
        plan = planned(TWO, **(known | more))
        assert plan.step("grow").options["kv_bytes"] is None, "what is left of one GPU is no figure for another device"
        assert [one.kv_bytes for one in plan.budgets] == [0] * len(plan.budgets) and plan.limits.kv_bytes == {}


def test_an_llm_step_that_nothing_is_left_for_is_a_problem(planned) -> None:
    exact = 24 * GIB - GIB - 2 * 512 * MIB - 256 * MIB - 3 * GIB  # all but its weights
    with pytest.raises(PipelineError) as refused:
        planned(**(STATED | {"grow": f", device_bytes: {exact}"}))
    (problem,) = refused.value.problems
    assert problem.found.startswith(
        "cuda:0 has 24 GiB, and 24 GiB of it are claimed: nothing is left for the KV memory"
    )
    planned(**(STATED | {"grow": f", device_bytes: {exact - MIB}"}))
    two = 24 * GIB - GIB - 3 * 512 * MIB - 256 * MIB - 3 * GIB
    with pytest.raises(PipelineError) as refused:
        planned(**(STATED | {"grow": f", instances: 2, device_bytes: {two // 2 - LEAST_BYTES}"}))
    assert [one.path for one in refused.value.problems] == ["steps.grow.device_bytes"], "each starts with its half"
    planned(**(STATED | {"grow": f", instances: 2, device_bytes: {two // 2 - 2 * LEAST_BYTES}"}))


def test_an_unknown_claim_is_shown_as_such() -> None:
    text = over_commit_text(
        "cuda:1", GIB, [Claim("a", "weights and work", 0, "unknown"), Claim("b", "arena", 2 * GIB, "x")]
    )
    assert "          ?  a           weights and work  unknown" in text.splitlines()
