"""Instances go to GPUs by what they need: what fits is found, what is pinned stays, and no order decides."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.needs import Need, Needs
from weftline.pipelines.placement.place import Placement, place
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy, Limits

GIB = 1 << 30
BARE = GpuPolicy(reserve_bytes=0, context_bytes=0)


def machine(*gibs: int) -> Machine:
    devices = tuple(Device(f"cuda:{index}", gib * GIB) for index, gib in enumerate(gibs))
    return Machine(16, 1 << 50, devices)


def need(gib: float | None, on: Machine, kv: float | None = 0, **more) -> Need:
    known = {} if gib is None else {device.name: int(gib * GIB) for device in on.devices}
    return Need(known, kv_bytes=None if kv is None else int(kv * GIB), **more)


def placed(
    steps: Mapping[str, dict], needs: Mapping[str, Need], on: Machine, edges=(), gpu: GpuPolicy = BARE
) -> Placement:
    """Place heavy steps, those that say so aside."""
    light = {name for name, step in steps.items() if step.pop("light", False)}
    written = [Step(name, "x", **step) for name, step in steps.items()]
    heavy = {name: name not in light for name in steps}
    placement, problems = place(written, heavy, Limits(), on, gpu, Needs(needs), edges)
    assert problems == []
    return placement


def test_the_largest_comes_first_and_goes_where_most_is_free() -> None:
    two = machine(40, 40)
    needs = {"a": need(10, two), "b": need(30, two), "c": need(25, two)}
    assert placed({"a": {}, "b": {}, "c": {}}, needs, two).devices == {
        "a": ("cuda:1",), "b": ("cuda:0",), "c": ("cuda:1",)
    }  # fmt: skip


def test_equals_are_placed_by_name_in_whatever_order_they_are_written() -> None:
    two = machine(40, 40)
    needs = {"a": need(10, two), "b": need(10, two)}
    assert placed({"b": {}, "a": {}}, needs, two).devices == {"a": ("cuda:0",), "b": ("cuda:1",)}


def test_neighbours_stay_together_while_they_fit() -> None:
    two, steps = machine(40, 40), {"a": {}, "b": {}, "c": {}}
    needs = {"a": need(20, two), "b": need(15, two), "c": need(4, two)}
    near = {("a", "b"), ("b", "c")}
    assert set(placed(dict(steps), needs, two, near).devices.values()) == {("cuda:0",)}
    assert placed(dict(steps), needs, two).devices["b"] == ("cuda:1",)
    needs["b"] = need(25, two)
    assert placed(dict(steps), needs, two, {("a", "b")}).devices["a"] == ("cuda:1",), "they do not fit on one"


def test_what_shares_a_process_shares_its_context() -> None:
    two, near = machine(21, 40), {("a", "b")}
    needs = {"a": need(10, two), "b": need(10, two)}
    context = GpuPolicy(reserve_bytes=0, context_bytes=GIB)
    steps = {"a": {"device": "cuda:0"}, "b": {}}
    assert placed(dict(steps), needs, two, near, context).devices["b"] == ("cuda:0",)
    apart = GpuPolicy(reserve_bytes=0, context_bytes=GIB, processes="separate")
    assert placed(dict(steps), needs, two, near, apart).devices["b"] == ("cuda:1",)


def test_tensors_are_let_travel_before_memory_runs_out() -> None:
    three = machine(10, 10, 10)
    needs = {"a": need(6, three), "b": need(6, three), "c": need(4, three), "d": need(4, three), "e": need(10, three)}
    found = placed({name: {} for name in "abcde"}, needs, three, {("c", "d"), ("a", "c")})
    used = {device: sum(needs[name].bytes[device] for name in "abcde" if found.devices[name] == (device,)) // GIB
            for device in ("cuda:0", "cuda:1", "cuda:2")}  # fmt: skip
    assert sorted(used.values()) == [10, 10, 10]


def test_llm_steps_that_fill_a_gpu_keep_apart_and_others_keep_away() -> None:
    two = machine(80, 80)
    llm = {"kv": None, "alone": True}
    needs = {"say": need(16, two, **llm), "judge": need(14, two, **llm), "see": need(2, two)}
    found = placed({"say": {}, "judge": {}, "see": {}}, needs, two).devices
    assert found["say"] != found["judge"]
    alone = placed({"say": {}, "see": {}}, needs, two).devices
    assert alone == {"say": ("cuda:0",), "see": ("cuda:1",)}, "what is left there is KV memory"
    busy = {"say": need(10, two, **llm), "a": need(30, two), "b": need(25, two)}
    found = placed({"say": {}, "a": {}, "b": {}}, busy, two).devices
    assert found["a"] == found["b"] != found["say"], "smaller than either, it still has a GPU to itself"
    unknown = {"say": need(None, two, **llm), "judge": need(None, two, **llm), "see": need(2, two)}
    found = placed({"say": {}, "judge": {}, "see": {}}, unknown, two).devices
    assert found["say"] != found["judge"], "whatever their sizes are"


def test_what_is_not_known_goes_on_the_first_gpu() -> None:
    two = machine(80, 80)
    needs = {"a": need(None, two), "c": need(70, two)}
    found = placed({"a": {}, "b": {}, "c": {}}, needs, two).devices
    assert found["a"] == found["b"] == ("cuda:0",)
    small = machine(1, 80)
    own = GpuPolicy(reserve_bytes=GIB, context_bytes=GIB)
    assert placed({"a": {}, "b": {}}, needs, small, gpu=own).devices["a"] == ("cuda:1",), "nor does its process fit"


def test_instances_of_a_step_spread() -> None:
    four = machine(80, 80, 80, 80)
    needs = {"a": need(10, four), "b": need(5, four)}
    found = placed({"a": {"instances": 4}, "b": {"instances": {"cuda:2": 2}}}, needs, four)
    assert sorted(found.devices["a"]) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert found.devices["b"] == ("cuda:2", "cuda:2")


def test_a_light_step_follows_those_it_exchanges_tensors_with() -> None:
    two, light = machine(40, 40), {"light": True}
    needs = {"see": need(30, two), "name": need(4, two), "other": need(35, two)}
    near = {("see", "cut"), ("cut", "shrink"), ("shrink", "name")}
    steps = {"see": {}, "cut": {**light}, "shrink": {**light}, "name": {}, "other": {}, "log": {**light}}
    found = placed(steps, needs, two, near | {("see", "name")}).devices
    assert found["see"] == found["cut"] == found["shrink"] == found["name"]
    assert found["log"] == ("cpu",)
    steps = {"see": {}, "cut": {**light}, "name": {"device": "cuda:0"}}
    assert placed(steps, needs, two, {("see", "cut"), ("cut", "name")}).devices["cut"] == ("cpu",), "one on each side"
    steps = {"see": {}, "cut": {"light": True, "device": "cpu"}}
    assert placed(steps, needs, two, near).devices["cut"] == ("cpu",), "it says so"
    steps = {"see": {}, "cut": {"light": True, "worker": "w"}, "name": {"worker": "w", "device": "cuda:0"}}
    assert placed(steps, needs, two, {("see", "cut")}).devices["cut"] == ("cpu",), "its process uses another GPU"


def test_steps_that_share_a_worker_are_on_one_gpu() -> None:
    two, w = machine(40, 40), {"worker": "w"}
    needs = {"a": need(20, two), "b": need(15, two), "c": need(10, two)}
    found = placed({"a": {**w}, "b": {**w, "instances": 2}, "c": {**w, "device": "cuda:1"}}, needs, two)
    assert found.devices["a"] == found.devices["c"] == ("cuda:1",) and found.devices["b"][0] == "cuda:1"
    assert [worker.device for worker in found.workers] == ["cuda:1", found.devices["b"][1]]


def test_ranks_use_the_gpus_after_the_first() -> None:
    four = machine(40, 40, 40, 40)
    needs = {"say": need(30, four, alone=True, ranks=2), "a": need(35, four), "b": need(25, four)}
    found = placed({"say": {}, "a": {}, "b": {}}, needs, four).devices
    used = {found["say"][0], f"cuda:{int(found['say'][0][-1]) + 1}"}
    assert found["say"] != ("cuda:3",) and not used & {found["a"][0], found["b"][0]}


def test_ranks_that_the_machine_has_no_gpus_for_are_a_problem() -> None:
    two = machine(80, 80)
    needs = Needs({"say": need(8, two, ranks=2, kv=1), "many": need(8, two, ranks=3, kv=1)})
    steps = [Step("say", "x", device="cuda:1"), Step("many", "x")]
    _, problems = place(steps, {"say": True, "many": True}, Limits(), two, BARE, needs)
    assert [(one.path, one.found) for one in problems] == [
        ("steps.say.ranks", "2 GPUs from cuda:1 on, and this machine has cuda:0, cuda:1"),
        ("steps.many.ranks", "3 GPUs from cuda:0 on, and this machine has cuda:0, cuda:1"),
    ]
    assert place(steps[1:], {"many": True}, Limits(), machine(), BARE, needs)[1] == [], "on the CPU they take none"


_SIZES = st.none() | st.sampled_from([1, 3, 6, 6, 10, 20, 37])
_MS = st.sampled_from([0.1, 2, 2, 5, 30])
_GPUS = st.lists(st.sampled_from([8, 16, 24, 40, 80]), min_size=1, max_size=8)


@st.composite
def worlds(draw: st.DrawFn):
    on, timed = machine(*draw(_GPUS)), draw(st.booleans())
    names = [device.name for device in on.devices]
    steps, needs = {}, {}
    for index in range(draw(st.integers(1, 7))):
        step: dict = {"light": draw(st.booleans()) and draw(st.booleans())}
        shape = draw(st.sampled_from(["auto", "auto", "auto", "pinned", "cpu", "by device", "worker"]))
        if shape == "by device":
            step["instances"] = {name: draw(st.integers(1, 2)) for name in draw(st.sets(st.sampled_from(names)))} | {
                "cpu": 1
            }
        else:
            step["instances"] = draw(st.integers(1, 3))
            step |= {"pinned": {"device": draw(st.sampled_from(names))}, "cpu": {"device": "cpu"}}.get(shape, {})
            step |= {"worker": draw(st.sampled_from(["w", "v"]))} if shape == "worker" else {}
        name = f"s{index}"
        steps[name] = step
        kv = draw(st.sampled_from([0, 0, None, 3]))
        times = dict.fromkeys(names, draw(_MS)) if timed and draw(st.booleans()) else {}
        needs[name] = need(draw(_SIZES), on, kv, alone=kv != 0, ms=times)
    pair = st.tuples(st.sampled_from([*steps]), st.sampled_from([*steps]))
    return on, steps, needs, draw(st.frozensets(pair, max_size=6))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(worlds(), st.sampled_from(["grouped", "separate"]), st.randoms(use_true_random=False))
def test_every_instance_has_one_place_and_no_order_decides_which(world, processes: str, rng) -> None:
    on, steps, needs, edges = world
    gpu = GpuPolicy(processes=processes, reserve_bytes=0, context_bytes=1 << 29)
    found = placed({name: dict(step) for name, step in steps.items()}, needs, on, edges, gpu)
    for name, step in steps.items():
        places, devices = found.worker_indexes[name], found.devices[name]
        count = step["instances"] if isinstance(step["instances"], int) else sum(step["instances"].values())
        assert len(places) == len(devices) == len(set(places)) == count
        for place_, device in zip(places, devices, strict=True):
            worker = found.workers[place_]
            assert name in worker.steps and (device == "cpu" or worker.device == device)
        if not isinstance(step["instances"], int):
            assert {device: devices.count(device) for device in step["instances"]} == step["instances"]
        elif "device" in step:
            assert set(devices) == {step["device"]}
        elif not step["light"]:
            assert "cpu" not in devices
        if needs[name].alone and "worker" not in step and step.get("device") != "cpu" and not step["light"]:
            assert all(found.workers[place_].steps == (name,) for place_ in places)
    names = [worker.name for worker in found.workers]
    assert len(set(names)) == len(names)
    assert placed({name: dict(step) for name, step in steps.items()}, needs, on, edges, gpu) == found
    order = [*steps]
    rng.shuffle(order)
    assert placed({name: dict(steps[name]) for name in order}, needs, on, edges, gpu).devices == found.devices


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(worlds())
def test_no_gpu_is_over_committed_where_filling_them_one_by_one_fits(world) -> None:
    on, steps, needs, edges = world
    plain = {name: {"instances": 1, **({"device": step["device"]} if "device" in step else {})}
             for name, step in steps.items() if step.get("device") != "cpu"}  # fmt: skip
    if not plain:
        return
    capacity = {device.name: device.memory_bytes for device in on.devices}
    size = {name: max(needs[name].bytes.values(), default=0) + (needs[name].kv_bytes or 0) for name in plain}
    for name in (name for name in plain if "device" in plain[name]):
        capacity[plain[name]["device"]] -= size[name]
    for name in sorted((name for name in plain if "device" not in plain[name]), key=lambda name: (-size[name], name)):
        fits = [device for device, free in capacity.items() if free >= size[name]]
        best = min(fits or capacity, key=lambda device: capacity[device]) if size[name] else on.devices[0].name
        capacity[best] -= size[name]
    if min(capacity.values()) < 0:
        return
    found = placed({name: dict(step) for name, step in plain.items()}, needs, on, edges).devices
    for device in on.devices:
        assert sum(size[name] for name in plain if found[name] == (device.name,)) <= device.memory_bytes
