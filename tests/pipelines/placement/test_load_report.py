"""A plan says how busy each GPU is by measured times, and why what is on it is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from weftline.pipelines.placement.gpu_assignment import work_rows
from weftline.pipelines.placement.load_balance import HOP_MS
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.needs import Need, Needs
from weftline.pipelines.placement.place import place
from weftline.pipelines.placement.plan import DeviceWork, Plan, StepWork
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import Measured, Profile, StepProfile, step_digest
from weftline.pipelines.render.text import explain_text
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.policy import GpuPolicy, Limits

GIB = 1 << 30
TWO = Machine(8, 1 << 50, tuple(Device(f"cuda:{index}", 80 * GIB, "NVIDIA H200") for index in range(2)))
ONE = Machine(8, 1 << 50, TWO.devices[:1])


def need(ms: float | None, gib: int = 1, **more) -> Need:
    times = {} if ms is None else dict.fromkeys(("cuda:0", "cuda:1"), ms)
    return Need(dict.fromkeys(("cuda:0", "cuda:1"), gib * GIB), ms=times, **more)


def worked(needs: Mapping[str, Need], on: Machine = TWO, edges=(), light=(), **steps: dict) -> tuple[DeviceWork, ...]:
    written = [Step(name, "x", **steps.get(name, {})) for name in {**needs, **steps}]
    heavy = {step.name: step.name not in light for step in written}
    gpu = GpuPolicy(reserve_bytes=0, context_bytes=0)
    placement, problems = place(written, heavy, Limits(), on, gpu, Needs(needs), edges)
    assert problems == []
    return placement.work


def why(work: tuple[DeviceWork, ...]) -> dict[str, str]:
    return {own.step: own.why for one in work for own in one.steps}


def test_unmeasured_work_is_not_reported() -> None:
    assert worked({"a": need(None), "b": need(None)}) == ()
    assert worked({"a": need(3)}, Machine(8, GIB)) == ()


def test_each_gpu_has_its_steps_longest_first_with_their_share() -> None:
    work = worked({"a": need(20), "b": need(4), "c": need(None)}, a={"instances": 2}, b={"device": "cuda:1"})
    assert work[0].device == "cuda:0" and work[0].busy_ms == 10 and work[1].busy_ms == 14
    assert work[1].steps == (
        StepWork("a", 10, "its instances keep apart"),
        StepWork("b", 4, "stated in the pipeline"),
    )
    assert work[0].steps[1:] == (StepWork("c", None, "by memory: its time was not measured"),)


def test_ranks_are_on_all_of_their_gpus() -> None:
    work = worked({"say": need(50, ranks=2, alone=True), "see": need(4)})
    assert [[one.ms for one in own.steps if one.step == "say"] for own in work] == [[50], [50]]
    assert why(work)["say"] == "it fits on no other GPU"
    three = Machine(8, 1 << 50, (*TWO.devices, Device("cuda:2", 80 * GIB, "NVIDIA H200")))
    assert why(worked({"say": need(50, ranks=2)}, three))["say"] == "it uses 2 GPUs from there on"


def test_tensors_that_travel_are_counted_on_both_gpus() -> None:
    work = worked({"a": need(9), "b": need(8)}, edges={("a", "b")})
    found = sorted((one.travel, one.travel_ms, one.busy_ms) for one in work)
    assert found == [(1, HOP_MS, 8 + HOP_MS), (1, HOP_MS, 9 + HOP_MS)]


@pytest.mark.parametrize(
    ("needs", "more", "said"),
    [
        ({"a": need(5)}, {"on": ONE}, "the only GPU"),
        ({"a": need(5, 60), "b": need(9, 60)}, {}, "it fits on no other GPU"),
        ({"a": need(5), "b": need(4)}, {"b": {"device": "cuda:1"}}, "elsewhere a GPU would be busy for 9 ms"),
        ({"a": need(5, kv_bytes=None), "b": need(5, kv_bytes=None)}, {}, "llm steps keep apart"),
        ({"a": need(2), "b": need(9)}, {"b": {"instances": 2}}, "elsewhere no GPU would be less busy: by memory"),
        (
            {"a": need(1), "b": need(2), "c": need(9)},
            {"edges": {("a", "b")}, "b": {"device": "cuda:1"}, "c": {"device": "cuda:0"}},
            "elsewhere a GPU would be busy for 11 ms",
        ),
        (
            {"a": need(1), "b": need(2), "c": need(9), "d": need(4)},
            {"edges": {("a", "b")}, "b": {"device": "cuda:1"}, "c": {"device": "cuda:1"}, "d": {"device": "cuda:1"}},
            "exchanges tensors with b",
        ),
        ({"a": need(5), "b": need(5)}, {"a": {"worker": "w"}, "b": {"worker": "w", "device": "cuda:1"}},
         "its worker is there: stated for another step"),
    ],
)  # fmt: skip
def test_a_reason_says_what_would_be_worse_elsewhere(needs: dict, more: dict, said: str) -> None:
    assert why(worked(needs, **more))["a"] == said


def test_where_no_gpu_would_be_busier_tensors_or_memory_decide() -> None:
    three = Machine(8, 1 << 50, (*TWO.devices, Device("cuda:2", 80 * GIB, "NVIDIA H200")))
    long = need(50)
    work = worked({"a": need(5), "b": need(5), "c": long}, three, {("a", "b")}, c={"device": "cuda:2"})
    assert why(work)["a"] == "exchanges tensors with b" and len(work) == 2
    work = worked({"a": need(5), "c": long}, three, c={"device": "cuda:2"})
    assert why(work)["a"] == "elsewhere no GPU would be less busy: by memory"


def test_a_light_step_is_beside_those_it_exchanges_tensors_with() -> None:
    needs = {"a": need(5), "cut": need(2), "b": need(30)}
    (first,) = [one for one in worked(needs, edges={("a", "cut")}, light={"cut"}) if len(one.steps) > 1]
    assert first.steps[1] == StepWork("cut", 2, "beside the steps that it exchanges tensors with")


PIPELINE = """
weftline: 1
name: n
inputs: {photo: image}
steps:
  find: {node: find, inputs: {image: photo}, batch: {items_max: 8}}
  name: {node: name, inputs: {image: find.image}}
  blur: {node: blur, inputs: {image: photo}, fallback: grey}
  grey: {node: blur, inputs: {image: photo}}
outputs: {l: name.label, b: blur.image}
"""


@pytest.fixture
def planned(device_catalog: dict[str, str]):
    def plan(run_ms: Mapping[str, Mapping[int, float]]) -> Plan:
        pipeline = load_yaml(PIPELINE, "n.yaml", Path(__file__).parents[1], device_catalog)
        steps = make_plan(pipeline, TWO, device_catalog).steps
        known = {one.name: Measured(GIB, {8: GIB}, run_ms.get(one.name, {})) for one in steps}
        profiles = {one.name: StepProfile(step_digest(one), {"cuda H200": known[one.name]}) for one in steps}
        return make_plan(pipeline, TWO, device_catalog, Profile(profiles))

    return plan


def test_edges_that_leave_a_gpu_are_said_to_be_assumed() -> None:
    rows = work_rows(worked({"a": need(9), "b": need(8)}, edges={("a", "b")}))
    assumed = "1 ms of it assumed: tensors travel over 1 edge between it and other GPUs"
    assert [[*cells] for cells in rows if cells[0][0].startswith("cuda")] == [
        [["cuda:0"], ["9 ms"], [assumed]],
        [["cuda:1"], ["10 ms"], [assumed]],
    ]


def test_the_plan_shows_it_in_lines(planned) -> None:
    plan = planned({"find": {1: 12, 8: 48, 16: 1}, "name": {1: 2}, "blur": {1: 6.25}, "grey": {1: 7}})
    lines = explain_text(plan).splitlines()
    start = lines.index("Work of GPUs for one request, as measured") + 1
    assert lines[start : lines.index("", start)] == [
        "  cuda:0  6.25 ms",
        "    blur  6.25 ms  elsewhere a GPU would be busy for 14.25 ms",
        "    grey  0 ms     elsewhere no GPU would be less busy: by memory",
        "  cuda:1  8 ms",
        "    find  6 ms     elsewhere a GPU would be busy for 13.25 ms",
        "    name  2 ms     elsewhere a GPU would be busy for 9.25 ms",
    ], "a batch of 8 takes 48 ms, and who answers in another's place has no work"


def test_without_times_the_plan_says_nothing_of_them(planned) -> None:
    plan = planned({})
    assert plan.work == () and "Work of GPUs" not in explain_text(plan)
