"""Plans for blocks: which pipelines allow it, and what is left of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.jobs.runners.plans import (
    ARENA_BYTES,
    RUN_MAX_MS,
    block_plan,
    block_rows_of,
    find_block_obstacle,
    required_steps,
)
from weftline.engine.jobs.runners.rows_node import RowsConfig, RowsNode
from weftline.nodes.contract import StepContext
from weftline.pipelines.check.options import to_config
from weftline.pipelines.placement.place import Device, Machine
from weftline.pipelines.placement.plan import Claim, Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder, constant
from weftline.pipelines.spec.loader import load_file

MACHINE = Machine(cores=4, memory_bytes=64 << 30)
EXAMPLES = Path(__file__).parents[4] / "examples"
STEPS = Path(__file__).parents[2]


def plan_of(build: Any, **limits: Any) -> Plan:
    """Return the plan of a pipeline with a text input `x` and a step `s`, of which `build` makes something."""
    p = Builder("p", base_dir=STEPS, limits=limits or None)
    x = p.input("x", "text")
    p.output("y", build(p, x))
    return make_plan(p.build(), MACHINE)


def one_step(**more: Any) -> Plan:
    return plan_of(lambda p, x: p.step("s", "echo", value=x, **more).value)


def test_the_deadline_of_the_pipeline_does_not_apply_to_blocks() -> None:
    plan = plan_of(lambda p, x: p.step("s", "echo", value=x).value, deadline_ms=5.0, refuse_early=False)
    limits = block_plan(plan).plan.limits
    assert (limits.deadline_ms, limits.refuse_early) == (None, True)


HINDRANCES: dict[str, Any] = {
    "step s has `when`, which applies to single items":
        lambda p, x: p.step("s", "echo", value=x, when="x == 'a'").value,
    "step s has a fallback": lambda p, x: p.step("s", "echo", value=x, fallback={"value": "sorry"}).value,
    "step s has `retry`, which applies to single items":
        lambda p, x: p.step("s", "echo", value=x, retry=1).value,
    "step s has `timeout_ms`, which applies to single items":
        lambda p, x: p.step("s", "echo", value=x, timeout_ms=100).value,
    "step s has `finite`, which applies to single items":
        lambda p, x: p.step("s", "echo", value=x, finite=True).value,
    "step s is not idempotent": lambda p, x: p.step("s", "echo", value=x, idempotent=False).value,
    "step s keeps state between requests": lambda p, x: p.step("s", "remember", value=x, idempotent=True).value,
    "step s streams": lambda p, x: p.step("s", "trickle", value=x).value,
    "step s has `map`, which applies to single items": lambda p, x: p.step(
        "s", "function", function="plain_steps.py:mark", map="a",
        a=p.step("l", "function", function="plain_steps.py:parts", a=x).output,
    ).output,
    "step s is decided by the scheduler, row by row": lambda p, x: p.step("s", "first", a=x, b=x).value,
    "step s pads its inputs": lambda p, x: p.step(
        "s", "function", function="plain_steps.py:scaled", batch={"pad": {"N": [8]}},
        x=p.step("n", "function", function="plain_steps.py:signal", a=x).output,
    ).output,
}  # fmt: skip


@pytest.mark.parametrize("why", HINDRANCES)
def test_what_depends_on_a_single_row_cannot_be_given_blocks(why: str) -> None:
    assert find_block_obstacle(plan_of(HINDRANCES[why])) == why


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("classifier.yaml", ""),
        ("tabular.yaml", ""),
        ("embedding.yaml", ""),
        ("user_node.yaml", ""),
        ("control_flow.yaml", "step kind answers"),
        ("streaming_guard.yaml", "streams"),
        ("stateful.yaml", "remembers"),
    ],
)
def test_examples_that_are_plain_can_be_given_blocks(file: str, why: str) -> None:
    found = find_block_obstacle(make_plan(load_file(EXAMPLES / file), MACHINE))
    assert bool(found) == bool(why), found


def test_only_steps_that_are_wanted_can_hinder() -> None:
    p = Builder("p", base_dir=STEPS)
    x = p.input("x", "text")
    p.output("plain", p.step("s", "echo", value=x).value)
    p.output("outcome", p.step("t", "trickle", value=x).value)
    p.output("same", x)
    plan = make_plan(p.build(), MACHINE)
    assert find_block_obstacle(plan) == "step t streams"
    assert find_block_obstacle(plan, ["plain", "same"]) == ""
    assert find_block_obstacle(plan, ["same"]) == "no step runs for these outputs"
    assert [step.name for step in required_steps(plan, ["plain"])] == ["s"]
    rewritten = block_plan(plan, ["plain", "same"]).plan
    assert [step.name for step in rewritten.steps] == ["s"]
    assert [worker.name for worker in rewritten.workers] == ["s"]
    assert [one.name for one in rewritten.outputs] == ["plain", "s: outcome"]


def test_steps_keep_their_names_workers_devices_and_instances() -> None:
    plan = make_plan(load_file(EXAMPLES / "embedding.yaml"), MACHINE)
    rewritten = block_plan(plan).plan
    assert [step.name for step in rewritten.steps] == [step.name for step in plan.steps]
    for old, new in zip(plan.steps, rewritten.steps, strict=True):
        assert new.workers == old.workers
        assert new.devices == old.devices
        assert new.heavy == old.heavy
        assert new.node.rpartition(":")[2] == ("HeavyRowsNode" if old.heavy else "RowsNode")
    assert [(one.name, one.threads) for one in rewritten.workers] == [(one.name, one.threads) for one in plan.workers]


def test_a_step_has_all_options_to_run_its_node() -> None:
    def build(p: Builder, x: Any) -> Any:
        batch = {"items_max": 5, "shapes": "same", "wait_max_ms": 3}
        return p.step("s", "function", function="plain_steps.py:both", a=x, b=constant("!"), batch=batch).output

    plan = plan_of(build)
    (step,) = block_plan(plan).plan.steps
    config: RowsConfig = to_config(RowsNode, step.options)
    assert config.runs == plan.steps[0].node
    assert config.runs_options == plan.steps[0].options
    assert config.inputs == {"a": "text", "b": "text"}
    assert config.fixed == {"b": "!"}
    assert (config.rows_max, config.same_shapes) == (5, True)
    assert step.batch.items_max == 1
    ports = RowsNode.ports(config, StepContext(STEPS))
    assert [one.port for one in step.inputs] == [one.name for one in ports.inputs]
    assert [one.name for one in step.outputs] == [one.name for one in ports.outputs]


def test_request_options_of_a_step_are_loaded_with_its_blocks() -> None:
    plan = block_plan(plan_of(lambda p, x: p.step("s", "template", x=x, template="{{ x }}").text)).plan
    assert plan.steps[0].options["runs_options"]["template"] == "{{ x }}"
    assert set(plan.steps[0].request_options) <= set(plan.steps[0].options) and not plan.steps[0].mixed_options


def test_every_value_has_as_many_readers_as_read_it() -> None:
    def build(p: Builder, x: Any) -> Any:
        s = p.step("s", "echo", value=x)
        p.output("again", s.value)
        return p.step("t", "function", function="plain_steps.py:both", a=s.value, b=x).output

    rewritten = block_plan(plan_of(build)).plan
    assert rewritten.input_readers == {"x": 2, "seeds": 2}
    assert rewritten.step("s").readers == {"value": 2, "outcome": 1}
    assert rewritten.step("t").readers == {"output": 1, "outcome": 1}


def test_names_of_its_own_give_way_to_the_pipelines() -> None:
    p = Builder("p", base_dir=STEPS)
    seeds = p.input("seeds", "text")
    p.output("y", p.step("s", "echo", value=seeds).value)
    found = block_plan(make_plan(p.build(), MACHINE))
    assert found.seeds == "seeds_"
    assert [one.name for one in found.plan.inputs] == ["seeds", "seeds_"]


def test_limits_grow_with_what_a_request_carries() -> None:
    plan = one_step(run_max_ms=1000, batch={"items_max": 10})
    assert block_plan(plan, block_rows=1005).plan.steps[0].run_max_ms == 101_000
    slow = one_step(run_max_ms=80_000_000, batch={"items_max": 1})
    assert block_plan(slow, block_rows=1000).plan.steps[0].run_max_ms == RUN_MAX_MS
    small = plan_of(lambda p, x: p.step("s", "echo", value=x).value, arena_bytes=1 << 20, request_bytes_max=1 << 16)
    limits = block_plan(small).plan.limits
    assert limits.arena_bytes == ARENA_BYTES
    assert limits.request_bytes_max > 1 << 30
    assert {worker.arena_bytes for worker in block_plan(small).plan.workers} == {ARENA_BYTES}


def test_what_it_takes_of_gpus_is_claimed_and_nothing_for_what_is_left_out() -> None:
    gib, gpus = 1 << 30, (Device("fake:0", 24 << 30), Device("fake:1", 24 << 30))
    p = Builder("p", base_dir=STEPS)
    x = p.input("x", "text")
    for name, device, size in (("s", "fake:0", 4), ("t", "fake:0", 5), ("u", "fake:1", 6)):
        p.output(name, p.step(name, "echo", value=x, device=device, worker=name, device_bytes=size * gib).value)
    plan = make_plan(p.build(), Machine(4, 64 << 30, gpus))
    more = (Claim("s", "arena", gib, "assumed"), Claim("s", "another pipeline", gib, "claimed"))
    budgets = tuple(replace(one, claims=one.claims + more, kv_bytes=gib) for one in plan.budgets)
    (budget,) = block_plan(replace(plan, budgets=budgets), ["s"]).plan.budgets
    assert (budget.device, budget.total_bytes, budget.kv_bytes) == ("fake:0", 24 * gib, 0)
    assert sorted((claim.owner, claim.what, claim.bytes) for claim in budget.claims) == [
        ("", "reserve", gib),
        ("s", "context", gib // 2),
        ("s", "weights and work", 4 * gib),
    ]
    assert [one.device for one in block_plan(plan).plan.budgets] == ["fake:0", "fake:1"]
    assert block_plan(one_step()).plan.budgets == ()


def test_what_is_asked_of_gpus_is_asked_for_blocks_too() -> None:
    p = Builder("p", base_dir=STEPS, gpu={"ordering": "event", "mps": True})
    p.output("y", p.step("s", "echo", value=p.input("x", "text"), device="fake:0").value)
    made = block_plan(make_plan(p.build(), Machine(4, 64 << 30, (Device("fake:0", 24 << 30),)))).plan
    assert (made.ordering, made.mps) == ("event", True)


def test_steps_of_one_worker_hand_over_inside_it() -> None:
    def build(p: Builder, x: Any) -> Any:
        waits = {"items_max": 8, "wait_max_ms": 5}
        s = p.step("s", "echo", value=x, worker="w", batch=waits)
        return p.step("t", "echo", value=s.value, worker="w", batch=waits).value

    plan = plan_of(build)
    assert plan.chains == ()
    assert block_plan(plan).plan.chains == ((0, 1),)


@pytest.mark.parametrize(
    ("type", "sizes", "rows"),
    [
        ("text", [8], 1024),
        ("text", [64, 48], 960),
        ("text", [1000], 1000),
        ("text", [1000, 999], 1000),
        ("text", [3000], 3000),
        ("float32[4]", [7], 1022),
        ("float32[3, 640, 640]", [4], 16),
        ("image", [8], 32),
        ("image", [24], 24),
        ("list[image]", [8], 16),
    ],
)
def test_a_block_has_whole_batches_and_a_bounded_size(type: str, sizes: list[int], rows: int) -> None:
    p = Builder("p")
    wire: Any = p.input("x", type)
    for place, size in enumerate(sizes):
        wire = p.step(f"s{place}", "echo", type=type, value=wire, batch={"items_max": size}).value
    p.output("y", wire)
    assert block_rows_of(make_plan(p.build(), MACHINE)) == rows
