"""Which steps of a worker run on threads of their own."""

from typing import Any

import pytest

from weftline.pipelines.placement.chains import step_threads
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.single_step import plan_to_debug

GPU = {"device": "fake:0", "worker": "w"}
CPU = {"device": "cpu", "worker": "w"}


def plan_of(*steps: dict[str, Any]) -> Plan:
    """Return the plan of echoes, each of the input or of the step that it comes `after`."""
    p = Builder("threads", gpu={"reserve_bytes": 0, "arena_bytes": 1 << 20})
    x, made = p.input("x", "json"), {}
    for name, options in zip("abcdef", steps):
        source = made[options["after"]].value if "after" in options else x
        more = {key: value for key, value in options.items() if key != "after"}
        made[name] = p.step(name, "echo", type="json", value=source, **more)
        p.output(f"of_{name}", made[name].value)
    return make_plan(p.build(), Machine(4, 16 << 30, (Device("fake:0", 8 << 30),)))


@pytest.mark.parametrize(
    ("steps", "threads"),
    [
        ([GPU, GPU, GPU], {0: 1, 1: 2, 2: 3}),
        ([CPU, CPU, CPU], {}),  # they would compete for the worker's cores
        ([GPU, CPU, CPU], {0: 1, 1: 2, 2: 2}),
        ([GPU], {}),
        ([GPU, {**GPU, "after": "a"}, GPU], {0: 1, 1: 1, 2: 2}),  # a chain
        ([GPU, {**GPU, "after": "a"}], {}),
        ([GPU, {**CPU, "after": "a"}, GPU], {0: 1, 1: 1, 2: 2}),  # a chain is where one of its steps is
    ],
)
def test_gpu_chains_have_threads_and_cpu_steps_share_one(steps: list[dict[str, Any]], threads: dict[int, int]) -> None:
    plan = plan_of(*steps)
    assert len(plan.workers) == 1 and dict(step_threads(plan, 0)) == threads


def test_a_worker_with_the_step_that_is_debugged_has_one_thread() -> None:
    plan = plan_of(GPU, GPU)
    assert dict(step_threads(plan_to_debug(plan, "a"), 0)) == {}
