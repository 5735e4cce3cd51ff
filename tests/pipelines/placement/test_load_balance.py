"""Measured times spread work over GPUs: what fits still fits, and the busiest GPU has hardly more than it must."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.pipelines.placement import load_balance as spreading
from weftline.pipelines.placement.load_balance import HOP_MS, Balance, balanced, improve, search, spread
from weftline.pipelines.placement.loads import Assignment, Capacities, GpuCapacity, Load, loads_of
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.needs import Need, Needs
from weftline.pipelines.placement.place import Placement, place
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy, Limits

GIB = 1 << 30
BARE = GpuPolicy(reserve_bytes=0, context_bytes=0)
Edges = frozenset[tuple[str, str]]


def machine(*gibs: int) -> Machine:
    return Machine(16, 1 << 50, tuple(Device(f"cuda:{index}", gib * GIB) for index, gib in enumerate(gibs)))


TWO = machine(80, 80)


def timed(ms: float | Sequence[float] | None, on: Machine = TWO, gib: float = 1, **more) -> Need:
    """A need of so many GiB, and of so many ms on every GPU or on each; None: not measured."""
    names = [device.name for device in on.devices]
    each = (
        {}
        if ms is None
        else dict(zip(names, ms, strict=False))
        if isinstance(ms, Sequence)
        else dict.fromkeys(names, ms)
    )
    return Need(dict.fromkeys(names, int(gib * GIB)), ms=each, **more)


def placed(needs: Mapping[str, Need], on: Machine = TWO, edges=(), **steps: dict) -> Placement:
    """Place a step for each need, heavy ones unless they say so, with what is written of them."""
    light = {name for name, step in steps.items() if step.pop("light", False)}
    names = {**needs, **steps}
    written = [Step(name, "x", **steps.get(name, {})) for name in names]
    heavy = {name: name not in light for name in names}
    placement, problems = place(written, heavy, Limits(), on, BARE, Needs(needs), edges)
    assert problems == []
    return placement


def groups(placement: Placement) -> set[str]:
    """The steps of each GPU, as one word."""
    found: dict[str, str] = {}
    for name, devices in sorted(placement.devices.items()):
        for device in devices:
            found[device] = found.get(device, "") + name
    return set(found.values())


def test_work_is_spread_by_times_and_not_by_memory() -> None:
    needs = {"a": timed(8, gib=20), "b": timed(7, gib=1), "c": timed(5, gib=1), "d": timed(4, gib=1)}
    assert groups(placed(needs)) == {"ad", "bc"}
    assert groups(placed({name: Need(need.bytes) for name, need in needs.items()})) == {"a", "bcd"}, "without times"


def loads_on(ms: Sequence[float], gpus: int) -> tuple[list[Load], dict[str, GpuCapacity]]:
    on = machine(*[80] * gpus)
    needs = {f"s{index}": timed(one, on) for index, one in enumerate(ms)}
    written = dict.fromkeys(needs, ("auto",))
    loads = loads_of([Step(name) for name in needs], written, dict.fromkeys(needs, True), needs, BARE)
    return loads, {device.name: GpuCapacity(device.name, device.memory_bytes, 0) for device in on.devices}


def test_the_longest_come_first_and_exchanges_mend_what_that_gets_wrong() -> None:
    balance = Balance(*loads_on([3, 3, 2, 2, 2], 2), {})
    assert spread(balance)
    assert balance.score.busiest_ms == 7, "Graham's example: 4/3 - 1/6 times what is best, and it is never more"
    improve(balance)
    assert [*balance.busy.values()] == [6, 6]
    short_first = Balance(*loads_on([1, 1, 2], 2), {})
    assert spread(short_first) and short_first.score.busiest_ms == 2


def bare(
    ms: Sequence[Sequence[float]], links: Mapping[int, Mapping[int, int]], size: int = 1, pin: int = -1
) -> Balance:
    """Loads of `size` bytes with their ms on each GPU, of 9 bytes; the one at `pin` is pinned to the second."""
    names = [f"cuda:{index}" for index in range(len(ms[0]))]
    sizes = dict.fromkeys(names, size)
    capacities = {name: GpuCapacity(name, 9, 0) for name in names}
    loads = [
        Load(
            ((f"s{index}", 0),),
            (Need(sizes),),
            "cuda:1" if index == pin else "",
            True,
            dict(zip(names, one, strict=True)),
        )
        for index, one in enumerate(ms)
    ]
    return Balance(loads, capacities, links)


def test_spreading_sees_what_travels_what_is_pinned_and_what_has_no_room() -> None:
    far = bare([[5, 5], [4, 4]], {0: {1: 6}, 1: {0: 6}})
    assert spread(far) and far.at[0] == far.at[1], "six tensors take longer than either"
    near = bare([[99] * 3, [5] * 3, [5] * 3], {1: {2: 1}, 2: {1: 1}})
    assert spread(near) and near.score.travel == 0, "another is the busiest anyway"
    pinned = bare([[5, 5], [4, 4]], {}, pin=0)
    assert spread(pinned) and pinned.at == {0: "cuda:1", 1: "cuda:0"}
    assert not spread(bare([[5, 5]] * 3, {}, size=9))


def test_spreading_parts_instances_of_a_step() -> None:
    loads, _ = loads_on([50], 2)
    one = Need({"cuda:0": 1, "cuda:1": 1})
    copies = [Load((("a", copy),), (one,), "", True, {"cuda:0": 1, "cuda:1": 1}) for copy in range(2)]
    balance = Balance(
        [*copies, *loads], {"cuda:0": GpuCapacity("cuda:0", 9, 0), "cuda:1": GpuCapacity("cuda:1", 90 * GIB, 0)}, {}
    )
    assert spread(balance) and balance.at[0] != balance.at[1], "though one GPU has far more memory"


def test_unmeasured_loads_stay_where_memory_alone_places_them() -> None:
    loads, _ = loads_on([5, 5], 2)
    unknown = Load((("u", 0),), (Need({"cuda:0": 1, "cuda:1": 1}),), "", True)
    a, b = (load.members[0] for load in loads)

    def empty() -> Capacities:
        return {name: GpuCapacity(name, 80 * GIB, 0) for name in ("cuda:0", "cuda:1")}

    def tried(first: Assignment) -> tuple[Capacities, Assignment]:
        return empty(), {**first, ("u", 0): "cuda:1" if first[a] == "cuda:0" else "cuda:0"}

    chosen = {a: "cuda:0", b: "cuda:1", ("u", 0): "cuda:0"}
    found = balanced([*loads, unknown], {0: {2: 1}, 2: {0: 1}}, chosen, empty, tried)
    assert found.chosen == chosen and found.score.busiest_ms == 5


def searched(balance: Balance, *start: str) -> Balance:
    for index, device in enumerate(start):
        balance.put(index, device)
    search(balance)
    return balance


def test_a_search_takes_gpus_as_equal_only_where_they_are() -> None:
    together = searched(bare([[5, 5], [5, 5]], {0: {1: 6}, 1: {0: 6}}, size=0), "cuda:0", "cuda:1")
    assert together.score.busiest_ms == 10, "one that has work is another way than one that has none"
    unlike = bare([[9.5, 9.5], [5, 9], [5, 9]], {})
    assert searched(unlike, "cuda:0", "cuda:0", "cuda:0").score.busiest_ms == 10, "others take longer on one of them"


def test_a_search_tries_one_of_many_empty_gpus_and_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    balance = bare([[2] * 8, [2] * 8], {})
    for index in (0, 1):
        balance.put(index, "cuda:0")
    puts, put = [], Balance.put
    monkeypatch.setattr(Balance, "put", lambda self, index, device: puts.append(device) or put(self, index, device))
    search(balance)
    assert balance.score.busiest_ms == 2 and len(puts) <= 6
    monkeypatch.setattr(spreading, "TRIES_MAX", 20)
    crowded = bare([[one] * 3 for one in range(1, 9)], {}, size=1)
    for index in range(8):
        crowded.put(index, "cuda:0")
    puts.clear()
    search(crowded)
    assert len(puts) == 20 + 8, "and all of them once more, where they end"


def test_transfers_are_saved_once_the_busiest_gpu_is_optimal() -> None:
    loads, capacities = loads_on([100, 5, 5], 3)
    apart = {load.members[0]: device for load, device in zip(loads, capacities, strict=True)}
    balance = Balance(loads, capacities, {1: {2: 1}, 2: {1: 1}}, apart)
    improve(balance)
    assert balance.at[1] == balance.at[2] != balance.at[0] and balance.score.travel == 0


def test_a_large_one_changes_places_with_two_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = machine(16, 16)
    needs = {"a": timed(2, tight, 3), "b": timed(2, tight), "c": timed(0.2, tight, 14), "d": timed(1, tight, 3)}
    pinned = {"b": {"device": "cuda:0"}}
    assert groups(placed(needs, tight, **pinned)) == {"ad", "bc"}
    unknown = {"u": timed(None, tight), "v": timed(None, tight)}
    assert groups(placed({**needs, **unknown}, tight, **pinned)) == {"aduv", "bc"}, "they are placed by memory then"
    monkeypatch.setattr(spreading, "FEW", 2)
    assert groups(placed(needs, tight, **pinned)) == {"abd", "c"}, "one for one nothing is better"


def test_instances_that_crowd_are_parted_though_no_gpu_gets_less_busy() -> None:
    three = machine(18, 18, 18)
    needs = {"b": timed(5, three, 9), "c": timed(5, three, 9), "p": timed(20, three, 18), "z": timed(0.2, three, 9)}
    found = placed(needs, three, {("b", "c")}, p={"device": "cuda:2"}, z={"instances": 2}).devices
    assert {*found["z"]} == {"cuda:0", "cuda:1"} and found["b"] != found["c"]


@pytest.mark.parametrize("tries", [0, 1, 3, 8])
def test_a_search_that_gives_up_leaves_everything_somewhere(monkeypatch: pytest.MonkeyPatch, tries: int) -> None:
    monkeypatch.setattr(spreading, "TRIES_MAX", tries)
    loads, capacities = loads_on([5, 4, 3, 3, 2], 2)
    balance = Balance(loads, capacities, {}, {load.members[0]: "cuda:0" for load in loads})
    search(balance)
    assert len(balance.at) == 5 and balance.score.busiest_ms <= 17
    assert sum(balance.busy.values()) == 17 and (tries < 8 or balance.score.busiest_ms < 17)


def test_no_more_than_so_many_changes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    after = Balance.after
    monkeypatch.setattr(Balance, "after", lambda self, change: tried.append(change) or after(self, change))
    monkeypatch.setattr(spreading, "TRIES_MAX", 7)
    loads, capacities = loads_on([*range(1, 40)], 4)
    balance = Balance(loads, capacities, {}, {load.members[0]: "cuda:0" for load in loads})
    improve(balance)
    assert len(tried) == 7 and balance.score.busiest_ms < sum(range(1, 40))


def test_tensors_stay_where_their_way_takes_longer_than_what_it_saves() -> None:
    edge = {("a", "b")}
    assert groups(placed({"a": timed(HOP_MS / 2), "b": timed(HOP_MS / 2)}, edges=edge)) == {"ab"}
    assert groups(placed({"a": timed(HOP_MS * 2), "b": timed(HOP_MS * 2)}, edges=edge)) == {"a", "b"}
    assert groups(placed({"a": timed(HOP_MS / 2), "b": timed(HOP_MS / 2)})) == {"a", "b"}


def test_tensors_stay_where_another_gpu_is_the_busiest_anyway() -> None:
    three = machine(80, 80, 80)
    needs = {"long": timed(100, three), "a": timed(20, three), "b": timed(20, three)}
    assert groups(placed(needs, three, {("a", "b")})) == {"long", "ab"}
    assert groups(placed(needs, three)) == {"long", "a", "b"}


def test_a_light_step_between_two_links_them() -> None:
    needs = {"a": timed(0.4), "b": timed(0.4)}
    through = {("a", "cut"), ("cut", "b")}
    assert groups(placed(dict(needs), TWO, through, cut={"light": True})) == {"abcut"}
    apart = placed(dict(needs), TWO, through, cut={"light": True, "device": "cpu"}).devices
    assert apart["a"] != apart["b"], "on the CPU it gets everything from host memory"


def test_instances_share_the_work_of_their_step() -> None:
    needs = {"a": timed(20), "b": timed(9), "c": timed(8)}
    found = placed(needs, a={"instances": 2})
    assert sorted(found.devices["a"]) == ["cuda:0", "cuda:1"] and found.devices["b"] != found.devices["c"]
    assert [one.busy_ms for one in found.work] == [19, 18]
    found = placed(needs, a={"instances": {"cuda:1": 1, "cpu": 3}})
    assert found.devices["b"] == ("cuda:0",) and found.devices["c"] == ("cuda:1",)
    assert [one.busy_ms for one in found.work] == [9, 13], "three quarters of it are done on the CPU"


def test_what_is_pinned_stays_and_counts() -> None:
    needs = {"a": timed(10), "b": timed(9), "c": timed(2)}
    found = placed(needs, a={"device": "cuda:1"}, b={"device": "cuda:1"}).devices
    assert found == {"a": ("cuda:1",), "b": ("cuda:1",), "c": ("cuda:0",)}
    found = placed({**needs, "w": timed(5)}, a={"device": "cuda:0"}, b={"worker": "x"}, c={"worker": "x"}).devices
    assert found["b"] == found["c"] == ("cuda:1",) and found["w"] == ("cuda:0",)


def test_memory_goes_before_times() -> None:
    tight = machine(20, 10)
    needs = {"a": timed(10, tight, 12), "b": timed(10, tight, 8), "c": timed(1, tight, 9)}
    assert placed(needs, tight).devices == {"a": ("cuda:0",), "b": ("cuda:0",), "c": ("cuda:1",)}, "b and c do not fit"


def test_unmeasured_loads_are_placed_by_memory_around_the_rest() -> None:
    needs = {"a": timed(9), "b": timed(8), "c": timed(None, gib=30), "d": timed(None, gib=20)}
    found = placed(needs)
    assert found.devices["a"] != found.devices["b"]
    assert found.devices["c"] != found.devices["d"]
    small = machine(31, 21)
    needs = {"a": timed(9, small, 18), "b": timed(8, small, 12), "c": timed(None, small, 20)}
    assert groups(placed(needs, small)) == {"ab", "c"}, "it has no other place"


def test_llm_steps_that_fill_a_gpu_keep_apart_whatever_they_take() -> None:
    llm = {"kv_bytes": None, "alone": True}
    needs = {"say": timed(10, **llm), "judge": timed(10, **llm), "see": timed(100)}
    found = placed(needs).devices
    assert found["say"] != found["judge"]
    quick = {"say": timed(30, gib=1, **llm), "see": timed(10, gib=9), "name": timed(10, gib=9)}
    assert groups(placed(quick)) == {"say", "namesee"}


def test_a_slower_gpu_gets_less() -> None:
    needs = {name: timed([4, 8]) for name in "abc"}
    found = placed(needs)
    assert [one.busy_ms for one in found.work] == [8, 8] and len(found.work[0].steps) == 2
    half = {name: timed([4]) for name in "abc"}
    assert [one.busy_ms for one in placed(half).work] in ([8, 4], [4, 8]), "it counts as the one that was measured"


def test_ranks_keep_all_of_their_gpus_busy() -> None:
    three = machine(80, 80, 80)
    found = placed({"say": timed(50, three, ranks=2, alone=True), "see": timed(40, three)}, three).devices
    start = int(found["say"][0][-1])
    assert found["see"][0] not in {f"cuda:{start}", f"cuda:{start + 1}"}


MS = st.sampled_from([0.2, 1, 2, 3, 5, 8, 13, 20, 40])


@st.composite
def worlds(draw: st.DrawFn, everything_timed: bool):
    on = machine(*draw(st.lists(st.sampled_from([16, 24, 40]), min_size=2, max_size=3)))
    names = [f"s{index}" for index in range(draw(st.integers(2, 6)))]
    steps, needs = {}, {}
    for name in names:
        shape = draw(st.sampled_from(["auto", "auto", "auto", "pinned", "two"]))
        pin = {"device": draw(st.sampled_from([device.name for device in on.devices]))}
        steps[name] = {"pinned": pin, "two": {"instances": 2}}.get(shape, {})
        ms = draw(MS if everything_timed else MS | st.none())
        needs[name] = timed(ms, on, draw(st.sampled_from([1, 3, 6, 8, 10, 14])))
    pair = st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda pair: pair[0] < pair[1])
    return on, steps, needs, draw(st.frozensets(pair, max_size=3))


World = tuple[Machine, Mapping[str, dict], Mapping[str, Need], Edges]


def judged(world: World, devices: Mapping[str, Sequence[str]]) -> tuple[bool, int, float, float]:
    """Return whether it fits, pairs of instances on one GPU, and how busy the busiest is, without and with hops."""
    on, _, needs, edges = world
    free = {device.name: device.memory_bytes for device in on.devices}
    busy = dict.fromkeys(free, 0.0)
    for name, own in devices.items():
        for device in own:
            free[device] -= needs[name].bytes[device]
            busy[device] += needs[name].ms.get(device, 0) / len(own)
    crowding = sum(own.count(device) * (own.count(device) - 1) // 2 for own in devices.values() for device in {*own})
    hops = dict(busy)
    for pair in edges:
        (one, *more), (other, *others) = (devices[name] for name in pair)
        if not more and not others and one != other:
            hops[one] += HOP_MS
            hops[other] += HOP_MS
    return min(free.values()) >= 0, crowding, max(busy.values()), max(hops.values())


def choose(world: World, with_times: bool) -> Mapping[str, Sequence[str]]:
    on, steps, needs, edges = world
    known = needs if with_times else {name: Need(need.bytes) for name, need in needs.items()}
    return placed(known, on, edges, **{name: dict(step) for name, step in steps.items()}).devices


@settings(max_examples=40)
@given(worlds(everything_timed=True))
def test_the_busiest_gpu_is_at_most_a_third_busier_than_it_must_be(world: World) -> None:
    on, steps, _, edges = world
    names = [device.name for device in on.devices]
    every = [
        [(step["device"],)] if "device" in step
        else [*itertools.combinations_with_replacement(names, step.get("instances", 1))]
        for step in steps.values()
    ]  # fmt: skip
    all_ways = (judged(world, dict(zip(steps, own, strict=True))) for own in itertools.product(*every))
    fitting = [(crowding, busiest) for fits, crowding, busiest, _ in all_ways if fits]
    fits, crowding, _, busiest = judged(world, choose(world, with_times=True))
    if not fits:
        return  # the next test says when it must
    least_crowding, least = min(fitting)
    assert crowding == least_crowding
    assert busiest <= 4 / 3 * least + HOP_MS * len(edges) + 1e-6


@settings(max_examples=60)
@given(worlds(everything_timed=False))
def test_times_never_make_what_fits_not_fit_nor_the_busiest_gpu_busier(world: World) -> None:
    fits, crowding, _, busiest = judged(world, choose(world, with_times=True))
    fitted, crowded, _, was_busiest = judged(world, choose(world, with_times=False))
    assert fits or not fitted
    if fitted:
        assert (crowding, busiest) <= (crowded, was_busiest + 1e-6)
