"""Steps of one GPU share a process, llm steps have their own, and a line says why."""

from __future__ import annotations

import pytest

from weftline.errors import Problem
from weftline.pipelines.placement.place import Process, grouped, reasons
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy

GPU = "cuda:0"
SEPARATE = GpuPolicy(processes="separate")


def made(
    steps: list[Step], devices: dict[str, tuple[str, ...]], alone: set[str] = frozenset(), gpu: GpuPolicy | None = None
) -> list[Process]:
    problems: list[Problem] = []
    found, places = grouped(steps, dict.fromkeys(devices, True), alone, devices, gpu or GpuPolicy(), problems)
    assert problems == [] and set(places) == set(devices)
    return found


def names(processes: list[Process]) -> list[tuple[str, str, str]]:
    return [(one.name, " ".join(one.steps), one.device) for one in processes]


def test_steps_of_a_gpu_share_a_process_and_an_llm_step_has_its_own() -> None:
    steps = [Step(name) for name in ("see", "say", "name", "log")]
    devices = {"see": (GPU,), "say": (GPU,), "name": (GPU,), "log": ("cpu",)}
    found = made(steps, devices, {"say"})
    assert names(found) == [("gpu0", "see name", GPU), ("say", "say", GPU), ("log", "log", "")]
    assert reasons(found, {"say"}, GpuPolicy()) == (
        "see and name share process gpu0: without MPS, processes of one GPU run in turns; "
        "gpu.processes: separate starts one for each",
        "say has process say to itself: other steps in it would wait for its rounds",
    )


def test_each_has_its_own_where_that_is_asked_for() -> None:
    found = made([Step("see"), Step("name")], {"see": (GPU,), "name": (GPU,)}, gpu=SEPARATE)
    assert names(found) == [("see", "see", GPU), ("name", "name", GPU)]
    (line,) = reasons(found, (), SEPARATE)
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
    assert reasons(made([Step("see")], {"see": (GPU,)}), (), GpuPolicy()) == ()


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
    lines = reasons(made([Step("a"), Step("b")], {"a": (GPU,), "b": (GPU,)}, gpu=gpu), (), gpu)
    assert expected in lines[0] and (len(lines) == 2) == gpu.mps
    assert not gpu.mps or "a fatal fault in one process of a GPU ends all of them" in lines[1]


def test_two_gpus_in_one_process_are_a_problem() -> None:
    problems: list[Problem] = []
    steps = [Step("a", worker="w"), Step("b", worker="w"), Step("c", worker="w")]
    grouped(steps, dict.fromkeys("abc", True), (), {"a": ("cpu",), "b": (GPU,), "c": ("cuda:1",)}, SEPARATE, problems)
    assert [(one.path, one.found) for one in problems] == [
        ("steps.c.worker", "c is on cuda:1, and its shared worker w uses cuda:0")
    ]
