"""What llm steps start with where they share a device's KV memory."""

import pytest

from weftline.errors import PipelineError
from weftline.pipelines.placement.budget import LEAST_BYTES
from weftline.pipelines.placement.place import Device, Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder

MODEL = "examples/models/shapes-chat"
MIB = 1 << 20
PLAIN = Machine(4, 16 << 30)
WITH_GPU = Machine(4, 16 << 30, (Device("cuda:0", 8 << 30),))


def planned(limits: dict, machine: Machine = PLAIN, **steps: dict) -> Plan:
    from pathlib import Path

    pipeline = Builder("test", limits={"kv_bytes": limits}, base_dir=Path(__file__).parents[3])
    text = pipeline.input("text", "text")
    for name, options in steps.items():
        pipeline.output(name, pipeline.step(name, "llm", model=MODEL, inputs={"prompt": text}, **options).text)
    return make_plan(pipeline.build(), machine)


def starts(plan: Plan) -> dict[str, int | None]:
    return {step.name: step.options["kv_bytes"] for step in plan.steps}


def test_steps_that_name_nothing_divide_half_of_what_the_others_leave() -> None:
    plan = planned({"cpu": 80 * MIB}, small={}, large={}, own={"kv_bytes": 20 * MIB})
    assert starts(plan) == {"small": 15 * MIB, "large": 15 * MIB, "own": 20 * MIB}


def test_instances_count_one_by_one() -> None:
    assert starts(planned({"cpu": 80 * MIB}, a={"instances": 3}, b={})) == {"a": 10 * MIB, "b": 10 * MIB}
    own = planned({"cpu": 80 * MIB}, a={"instances": 3, "kv_bytes": 20 * MIB}, b={})
    assert starts(own) == {"a": 20 * MIB, "b": 10 * MIB}


def test_a_step_on_another_device_keeps_its_own() -> None:
    for name in ("cuda", "cuda:0"):
        plan = planned({name: 80 * MIB}, WITH_GPU, a={}, b={"device": "cpu"})
        assert starts(plan) == {"a": 40 * MIB, "b": None}
        assert plan.limits.kv_bytes == {"cuda:0": 80 * MIB}
    both = planned({"cpu": 20 * MIB, "cuda": 80 * MIB}, WITH_GPU, a={"instances": {"cuda:0": 1, "cpu": 1}})
    assert starts(both) == {"a": 10 * MIB}, "one number for all instances: the smaller"


def test_a_limit_for_an_unused_device_is_noted() -> None:
    plan = planned({"cuda": 80 * MIB, "cpu": 80 * MIB}, a={"kv_bytes": MIB})
    assert starts(plan) == {"a": MIB}
    assert plan.notes == ("limits.kv_bytes.cuda:0 changes nothing: no llm step is on cuda:0",)


@pytest.mark.parametrize(
    ("bytes", "steps", "expected"),
    [
        (30 * MIB, {"a": {"kv_bytes": 20 * MIB}, "b": {"kv_bytes": 20 * MIB}}, "state 40 MiB as kv_bytes"),
        (4 * LEAST_BYTES - 2, {"a": {}, "b": {}}, "too little for the llm steps that share it"),
    ],
)
def test_too_few_bytes_are_a_problem_of_the_file(bytes: int, steps: dict, expected: str) -> None:
    with pytest.raises(PipelineError) as caught:
        planned({"cpu": bytes}, **steps)
    (problem,) = caught.value.problems
    assert problem.path == "limits.kv_bytes.cpu" and expected in problem.found and problem.line
    expected = int(problem.expected.split()[-1])
    planned({"cpu": expected}, **steps)


@pytest.mark.parametrize("limits", [{"gpu": 1 << 30}, {"cpu": 100}, {"cpu": "1GiB"}, 5])
def test_what_is_no_device_or_no_size_is_refused(limits: object) -> None:
    with pytest.raises(PipelineError) as caught:
        planned(limits, a={})  # type: ignore[arg-type]
    assert caught.value.problems[0].path.startswith("limits.kv_bytes")
