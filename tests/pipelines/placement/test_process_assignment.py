"""Light steps share a process, steps of one GPU share one, llm steps have their own, and a line says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weftline.errors import Problem
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.place import Process, assign_processes, place, process_notes
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.render.text import explain_text
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy, IdlePolicy, Limits
from weftline.pipelines.spec.single_step import graph_to_debug

GPU = "cuda:0"
SEPARATE = GpuPolicy(processes="separate")


def made(
    steps: list[Step], devices: dict[str, tuple[str, ...]], alone: set[str] = frozenset(), gpu: GpuPolicy | None = None
) -> list[Process]:
    problems: list[Problem] = []
    found, places = assign_processes(steps, dict.fromkeys(devices, True), alone, devices, gpu or GpuPolicy(), problems)
    assert problems == [] and set(places) == set(devices)
    return found


def names(processes: list[Process]) -> list[tuple[str, str, str]]:
    return [(one.name, " ".join(one.steps), one.device) for one in processes]


def test_steps_of_a_gpu_share_a_process_and_an_llm_step_has_its_own() -> None:
    steps = [Step(name) for name in ("see", "say", "name", "log")]
    devices = {"see": (GPU,), "say": (GPU,), "name": (GPU,), "log": ("cpu",)}
    found = made(steps, devices, {"say"})
    assert names(found) == [("gpu0", "see name", GPU), ("say", "say", GPU), ("log", "log", "")]
    assert process_notes(found, {"say"}, GpuPolicy()) == (
        "see and name share process gpu0: without MPS, processes of one GPU run in turns; "
        "gpu.processes: separate starts one for each",
        "say has process say to itself: other steps in it would wait for its rounds",
    )


def test_each_has_its_own_where_that_is_asked_for() -> None:
    found = made([Step("see"), Step("name")], {"see": (GPU,), "name": (GPU,)}, gpu=SEPARATE)
    assert names(found) == [("see", "see", GPU), ("name", "name", GPU)]
    (line,) = process_notes(found, (), SEPARATE)
    expected = (
        "see and name have a process each on cuda:0 and run in turns; gpu.processes: grouped lets steps share one"
    )
    assert line == expected


def test_instances_of_a_step_are_in_different_processes() -> None:
    steps = [Step("see", instances=2), Step("name", instances=3)]
    found = made(steps, {"see": (GPU, GPU), "name": (GPU, "cuda:1", GPU)})
    assert names(found) == [("gpu0", "see name", GPU), ("gpu0-2", "see name", GPU), ("name-2", "name", "cuda:1")]


def test_a_step_that_is_alone_on_its_gpu_names_its_process() -> None:
    assert names(made([Step("see", instances=2)], {"see": (GPU, GPU)})) == [("see", "see", GPU), ("see-2", "see", GPU)]
    assert process_notes(made([Step("see")], {"see": (GPU,)}), (), GpuPolicy()) == ()


def test_a_process_never_has_the_name_of_a_step() -> None:
    steps = [Step("a"), Step("b"), Step("gpu0"), Step("c", worker="gpu0-worker")]
    found = made(steps, {"a": (GPU,), "b": (GPU,), "gpu0": ("cpu",), "c": ("cpu",)})
    assert names(found) == [
        ("gpu0-worker-worker", "a b", GPU), ("gpu0", "gpu0", ""), ("gpu0-worker", "c", "")
    ]  # fmt: skip


def test_a_worker_goes_before_the_group() -> None:
    steps = [Step("a"), Step("b"), Step("c", worker="w"), Step("d", worker="w")]
    found = made(steps, dict.fromkeys("abcd", (GPU,)), {"d"})
    assert names(found) == [("gpu0", "a b", GPU), ("w", "c d", GPU)]


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (GpuPolicy(mps=True), "with MPS separate processes could"),
        (SEPARATE, "run in turns"),
        (GpuPolicy(processes="separate", mps=True), "run concurrently if"),
    ],
)
def test_what_mps_changes_is_said_and_what_it_costs(gpu: GpuPolicy, expected: str) -> None:
    lines = process_notes(made([Step("a"), Step("b")], {"a": (GPU,), "b": (GPU,)}, gpu=gpu), (), gpu)
    assert expected in lines[0] and (len(lines) == 2) == gpu.mps
    assert not gpu.mps or "a fatal fault in one process of a GPU ends all of them" in lines[1]


def test_two_gpus_in_one_process_are_a_problem() -> None:
    problems: list[Problem] = []
    steps = [Step("a", worker="w"), Step("b", worker="w"), Step("c", worker="w")]
    assign_processes(
        steps, dict.fromkeys("abc", True), (), {"a": ("cpu",), "b": (GPU,), "c": ("cuda:1",)}, SEPARATE, problems
    )
    assert [(one.path, one.found) for one in problems] == [
        ("steps.c.worker", "c is on cuda:1, and its shared worker w uses cuda:0")
    ]


MIB = 1 << 20
CPU = Machine(4, 16 << 30)


def light_processes(
    steps: list[Step], light: dict[str, int], limits: Limits | None = None
) -> list[tuple[str, str, int]]:
    """Return the name, steps and arena of each process."""
    placement, problems = place(steps, {}.fromkeys([one.name for one in steps], False), limits or Limits(), CPU,
                                light=light)  # fmt: skip
    assert problems == []
    return [(one.name, " ".join(one.steps), one.arena_bytes) for one in placement.workers]


def test_light_steps_share_a_process_with_the_sum_of_their_arenas() -> None:
    found = light_processes([Step("a"), Step("see"), Step("b"), Step("c")], {"a": 1, "b": 10 * MIB, "c": 1 << 40})
    assert found == [("light", "a b c", (9 + 10 + 72) * MIB), ("see", "see", 72 * MIB)]


@pytest.mark.parametrize("arena_bytes", [1 << 16, 100_000, 64 * MIB, 256 * MIB])
def test_a_lone_light_step_has_a_small_arena_that_follows_the_limit(arena_bytes: int) -> None:
    limits = Limits(arena_bytes=arena_bytes)
    ((name, steps, size),) = light_processes([Step("a")], {"a": 5000}, limits)
    assert (name, steps) == ("a", "a")
    assert arena_bytes / 8 <= size < arena_bytes / 8 + 4096


def test_a_step_that_states_something_about_its_process_is_no_part_of_it() -> None:
    settings: list[dict[str, Any]] = [
        {"worker": "w"},
        {"threads": 1},
        {"idle": IdlePolicy(1.0)},
        {"instances": 2, "reserved": 1},
    ]
    for stated in settings:
        found = light_processes([Step("b"), Step("c"), Step("a", **stated)], dict.fromkeys("abc", 1))
        assert found[0][1] == "b c" and {one[1:] for one in found[1:]} == {("a", 72 * MIB)}


def test_instances_of_light_steps_are_in_different_processes() -> None:
    found = light_processes([Step("a", instances=2), Step("b")], {"a": 1, "b": 1})
    assert found == [("light", "a b", 18 * MIB), ("light-2", "a", 9 * MIB)]


def test_the_process_of_light_steps_never_has_the_name_of_a_step() -> None:
    found = light_processes([Step("a"), Step("light"), Step("b")], {"a": 1, "b": 1})
    assert [(name, steps) for name, steps, _ in found] == [("light-worker", "a b"), ("light", "light")]


def planned(*more: tuple[str, str, dict[str, Any]], base_dir: Path = Path(), machine: Machine = CPU) -> Plan:
    return make_plan(prompts(*more, base_dir=base_dir).build(), machine)


def prompts(*more: tuple[str, str, dict[str, Any]], base_dir: Path = Path()) -> Builder:
    """Return templates a and b of the input, and further steps."""
    p = Builder("light", base_dir=base_dir)
    x = p.input("x", "text")
    for name, node, options in (("a", "template", {}), ("b", "template", {}), *more):
        if node == "template":
            options = {"template": "{{ x }}", **options}
        step = p.step(name, node, x=x, **options) if node != "echo" else p.step(name, node, value=x, **options)
        p.output(f"of_{name}", step.value if node == "echo" else step.text)
    return p


def of(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {worker.name: worker.steps for worker in plan.workers}


def test_the_plan_says_which_light_steps_share_a_process_and_why() -> None:
    plan = planned(("say", "echo", {}))
    assert of(plan) == {"light": ("a", "b"), "say": ("say",)}
    text = explain_text(plan)
    assert "light  holds a, b  1 thread of 4  arena 18 MiB" in text
    line = "a and b share process light: they run no model and no user code; a `worker:` of its own parts a step"
    assert line in plan.notes and line in text


def test_a_user_class_that_derives_from_a_light_node_is_not_light(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from weftline.nodes.template import Template\n\nclass Mine(Template):\n    pass\n"
    )
    plan = planned(("c", "mine.py:Mine", {"template": "{{ x }}"}), base_dir=tmp_path)
    assert of(plan) == {"light": ("a", "b"), "c": ("c",)}


def test_a_light_node_on_a_gpu_is_not_light() -> None:
    gpu = Machine(4, 16 << 30, (Device("fake:0", 8 << 30),))
    assert of(planned(("c", "template", {"device": "fake:0"}), machine=gpu)) == {"light": ("a", "b"), "c": ("c",)}


def test_the_step_to_debug_does_not_share_its_process() -> None:
    graph = graph_to_debug(prompts(("c", "template", {})).build(), "b")
    assert of(make_plan(graph, CPU)) == {"light": ("a", "c"), "b": ("b",)}
