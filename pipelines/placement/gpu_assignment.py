"""GPU assignment of instances without a fixed GPU, and the reason for each placement.

Instances with a fixed GPU stay there. Every other instance, largest first, goes to a GPU that it fits on, preferring

- one without an instance of its step, so that instances spread;
- one with a step that it exchanges tensors with;
- one that no llm step fills with its KV cache;
- of those, the one with most free memory.

Llm steps that use a GPU's remaining memory are placed first, and apart from each other. Where a GPU is then
over-committed, a second attempt ignores transfers, and a third fills GPUs one by one. The first attempt in which
everything fits is used. If none fits, the first is used, and the budgets report the over-commitment.

Steps without known memory needs go on the first GPU that has space for their process, llm steps aside. A step on
`auto` that is not heavy follows the steps that it exchanges tensors with, if they are on one GPU. Memory reserved by
other pipelines (`Device.taken`) is not free, and a GPU that they fill with KV cache counts as filled.

Where times were measured (`weftline profile`) this is one start of `load_balance`. The other spreads measured loads by
their times, and places the rest around them as above. Both are improved and the better one is used. A placement that
fits without times therefore fits with them, and no GPU is busier than the busiest was. Work of other pipelines on a GPU
is not considered.

The report explains each placement by its alternative: elsewhere the step does not fit, instances or llm steps would
share a GPU, the busiest GPU would be busier, or tensors would be transferred.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from weftline.pipelines.placement.load_balance import DIGITS, HOP_MS, Balance, balanced
from weftline.pipelines.placement.loads import (
    AUTO,
    Assignment,
    Capacities,
    GpuCapacity,
    Load,
    all_fit,
    links_of,
    loads_of,
    share_ms,
)
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.needs import Need, gpus_of
from weftline.pipelines.placement.plan import DeviceWork, StepWork
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy
from weftline.shm.device.names import is_gpu

_Way = Literal["together", "apart", "tight"]
_WAYS: tuple[_Way, ...] = ("together", "apart", "tight")
_Places = dict[str, list[str]]


def assign_gpus(
    steps: Sequence[Step],
    written: Mapping[str, Sequence[str]],
    heavy: Mapping[str, bool],
    needs: Mapping[str, Need],
    edges: Collection[tuple[str, str]],
    machine: Machine,
    gpu: GpuPolicy,
    context_bytes: Mapping[str, int],
) -> tuple[dict[str, tuple[str, ...]], Balance | None]:
    """Return the device of each instance of each step, and the GPU loads; None: no time was measured.

    written: stated devices, 'auto' for instances to place.
    edges:   pairs of steps, writer and reader, whose tensors can stay on a device.
    """
    if not machine.devices:
        bare = {name: tuple("cpu" if one == AUTO else one for one in devices) for name, devices in written.items()}
        return bare, None
    loads = loads_of(steps, written, heavy, needs, gpu)
    neighbours = _neighbours(edges)

    def empty() -> Capacities:
        return _capacities(loads, machine, gpu, context_bytes)

    def tried(first: Assignment) -> tuple[Capacities, Assignment]:
        tries = []
        for way in _WAYS:
            tries.append(_try(way, loads, neighbours, empty(), first))
            if all_fit(tries[-1][0]):
                return tries[-1]
        return tries[0]

    (capacities, chosen), balance = tried({}), None
    if any(load.work for load in loads) and all(load.pinned in {"", *capacities} for load in loads):
        balance = balanced(loads, links_of(loads, written, edges), chosen, empty, tried)
        capacities, chosen = balance.capacities, balance.chosen
    devices = {
        name: [chosen.get((name, copy), "cpu") if one == AUTO else one for copy, one in enumerate(own)]
        for name, own in written.items()
    }
    followers = [step for step in steps if not heavy[step.name] and AUTO in written[step.name]]
    _follow(followers, steps, written, devices, needs, neighbours, capacities)
    return {name: tuple(own) for name, own in devices.items()}, balance


def _capacities(
    loads: Sequence[Load], machine: Machine, gpu: GpuPolicy, context_bytes: Mapping[str, int]
) -> Capacities:
    """Return the free capacity of each GPU before placement."""
    arena = gpu.arena_bytes if any(need.gives for load in loads for need in load.needs) else 0
    return {
        one.name: GpuCapacity(
            one.name,
            one.memory_bytes - max(gpu.reserve_bytes, one.reserve_bytes) - one.taken_bytes,
            context_bytes.get(one.name, gpu.context_bytes) + arena,
            one.taken_bytes,
            fillers=sum(other.fills for other in one.taken),
        )
        for one in machine.devices
    }


def _try(
    way: _Way,
    loads: Sequence[Load],
    neighbours: Mapping[str, Collection[str]],
    capacities: Capacities,
    first: Assignment,
) -> tuple[Capacities, Assignment]:
    """Place all instances one way, `first` and pinned ones before the rest; return the remainder and the assignment."""
    order, places = [*capacities], dict[tuple[str, int], str]()

    def put(load: Load, device: str) -> None:
        for name in gpus_of(device, load.ranks):
            if name in capacities:
                capacities[name].add(load)
        places.update(dict.fromkeys(load.members, device))

    for load in loads:
        if device := load.pinned or first.get(load.members[0], ""):
            put(load, device)
    free = [load for load in loads if load.members[0] not in places]
    for load in (one for one in free if not one.known and not one.open_kv):
        put(load, next((device for device in order if _fits(load, device, capacities)), order[0]))
    rest = [load for load in free if load.known or load.open_kv]
    if way != "tight":
        rest.sort(key=lambda load: not load.open_kv)  # loads that fill a GPU first, so that others avoid it
    for load in rest:
        put(load, _best(way, load, capacities, order, neighbours))
    return capacities, places


def _best(
    way: _Way,
    load: Load,
    capacities: Mapping[str, GpuCapacity],
    order: Sequence[str],
    neighbours: Mapping[str, Collection[str]],
) -> str:
    starts = [device for device in order if capacities.keys() >= {*gpus_of(device, load.ranks)}] or order[:1]
    fits = [device for device in starts if _fits(load, device, capacities)]
    near = {name for own in load.names for name in neighbours.get(own, ())}

    def rank(device: str) -> tuple[int | bool, ...]:
        capacity, index = capacities[device], order.index(device)
        copies = max(capacity.copies[name] for name in load.names)
        if not load.known:
            return capacity.fillers, capacity.others, index
        if way == "tight" and fits:
            return capacity.free, index
        if load.open_kv or way != "together":
            return copies, capacity.fillers, -capacity.free, index
        return copies, not any(capacity.copies[name] for name in near), capacity.fillers, -capacity.free, index

    return min(fits or starts, key=rank)


def _fits(load: Load, device: str, capacities: Mapping[str, GpuCapacity]) -> bool:
    return all(
        name in capacities and capacities[name].cost(load) <= capacities[name].free
        for name in gpus_of(device, load.ranks)
    )


def _neighbours(edges: Collection[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for giver, reader in edges:
        found.setdefault(giver, set()).add(reader)
        found.setdefault(reader, set()).add(giver)
    return found


def _follow(
    followers: Sequence[Step],
    steps: Sequence[Step],
    written: Mapping[str, Sequence[str]],
    devices: _Places,
    needs: Mapping[str, Need],
    neighbours: Mapping[str, Collection[str]],
    capacities: Mapping[str, GpuCapacity],
) -> None:
    """Place steps that are not heavy with those that they exchange tensors with, in rounds: order has no effect."""
    waiting = sorted(followers, key=lambda step: step.name)
    while True:
        found = {step.name: _target(step, steps, devices, neighbours) for step in waiting}
        moved = False
        for step in waiting:
            device = found[step.name]
            load = Load(((step.name, 0),), (needs.get(step.name, Need()),), device, False)
            if not device or device not in capacities or _target(step, steps, devices, neighbours) != device:
                continue
            count = list(written[step.name]).count(AUTO)
            if load.on(device) * count > max(0, capacities[device].free):
                continue
            for _ in range(count):
                capacities[device].add(load)
            devices[step.name] = [device if one == AUTO else one for one in written[step.name]]
            moved = True
        waiting = [step for step in waiting if "cpu" in devices[step.name] and AUTO in written[step.name]]
        if not moved:
            return


def _target(step: Step, steps: Sequence[Step], devices: _Places, neighbours: Mapping[str, Collection[str]]) -> str:
    """Return the only GPU of a step's neighbours, if its worker may be there too; else ''."""
    around = {device for name in neighbours.get(step.name, ()) for device in devices.get(name, ()) if is_gpu(device)}
    sharing = {
        device
        for other in steps
        if step.worker is not None and other.worker == step.worker and other.name != step.name
        for device in devices[other.name]
        if is_gpu(device)
    }
    return next(iter(around)) if len(around) == 1 and sharing <= around else ""


def work_of(
    steps: Sequence[Step],
    written: Mapping[str, Sequence[str]],
    devices: Mapping[str, Sequence[str]],
    needs: Mapping[str, Need],
    balance: Balance,
) -> tuple[DeviceWork, ...]:
    """Return the work of each GPU that has steps.

    written: stated device of each instance, 'auto' for those that were placed.
    devices: their placement.
    """
    indexes = {member: index for index, load in enumerate(balance.loads) for member in load.members}

    def on(gpu: str) -> Iterator[StepWork]:
        for step in steps:
            need, own = needs.get(step.name, Need()), devices[step.name]
            for copy, device in enumerate(own):
                if gpu in gpus_of(device, need.ranks):
                    ms = share_ms(need.ms, gpu, len(own)) if need.ms else None
                    yield StepWork(step.name, ms, why(step.name, copy))

    def why(step: str, copy: int) -> str:
        if written[step][copy] != AUTO:
            return "stated in the pipeline"
        index = indexes.get((step, copy))
        return "beside the steps that it exchanges tensors with" if index is None else _why(index, balance)

    found = []
    for gpu in balance.capacities:
        there = sorted(on(gpu), key=lambda one: (-(one.ms or 0.0), one.step))
        travel = sum(balance.far(index, gpu) for index, device in balance.at.items() if device == gpu)
        found += [DeviceWork(gpu, tuple(there), travel, travel * HOP_MS)] if there else []
    return tuple(found)


def work_rows(work: Sequence[DeviceWork]) -> list[list[list[str]]]:
    """Return a row for each GPU and for each instance on it: its time, and the reason."""
    rows = []
    for one in work:
        edges = f"{one.travel} edge{'s' if one.travel > 1 else ''}"
        away = f"{_ms(one.travel_ms)} of it assumed: tensors travel over {edges} between it and other GPUs"
        rows.append([[one.device], [_ms(one.busy_ms)], [away if one.travel else ""]])
        rows += [[[f"  {own.step}"], ["?" if own.ms is None else _ms(own.ms)], [own.why]] for own in one.steps]
    return rows


def _why(index: int, balance: Balance) -> str:
    """Return the disadvantage of placing a load without a stated device on another GPU."""
    load, here = balance.loads[index], balance.at[index]
    if load.pinned:
        return "its worker is there: stated for another step"
    elsewhere = [gpu for gpu in balance.capacities if gpu != here]
    if not elsewhere:
        return "the only GPU"
    fits = [gpu for gpu in elsewhere if balance.fits_on(index, gpu)]
    if not fits:
        return "it fits on no other GPU"
    if load.ranks > 1:
        return f"it uses {load.ranks} GPUs from there on"
    crowded = balance.crowds(load, balance.capacities[here]) - len(load.names) - load.open_kv
    calm = [gpu for gpu in fits if balance.crowds(load, balance.capacities[gpu]) <= crowded]
    if not calm:
        return "llm steps keep apart" if load.open_kv else "its instances keep apart"
    if not load.work:
        return "by memory: its time was not measured"
    peak = max(balance.busy.values())
    busy = {gpu: balance.busy[gpu] + balance.moves(index, gpu)[1] for gpu in calm}
    even = [gpu for gpu, ms in busy.items() if round(ms - peak, DIGITS) <= 0]
    if not even:
        return f"elsewhere a GPU would be busy for {_ms(min(busy.values()))}"
    if all(balance.far(index, gpu) > balance.far(index, here) for gpu in even):
        near = {other for other in balance.links[index] if balance.at[other] == here}
        return (
            f"exchanges tensors with {', '.join(sorted(name for other in near for name in balance.loads[other].names))}"
        )
    return "elsewhere no GPU would be less busy: by memory"


def _ms(ms: float) -> str:
    return f"{round(ms, 2):g} ms"
