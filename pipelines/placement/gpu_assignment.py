"""GPU assignment of instances without a fixed GPU.

What was pinned stays where it is. Then each instance, largest first, goes to a GPU that it fits on, if possible to one

- that has no instance of its step yet, so that they spread;
- that a step is on with which it exchanges tensors;
- that no llm step is to fill with its KV memory;
- and of those, to the one with most free.

Llm steps that take what is left come before all others, and keep apart. Where that ends with too much on a GPU, tensors
are let travel, and at last GPUs are filled one by one: the first of these ways in which everything fits is taken. If
there is none, it is the first way, and the budgets say what is too much.

What is not known to need anything goes on the first GPU with room for its process, llm steps aside. A light step on
`auto` follows the steps that it exchanges tensors with, if they are on one GPU. What other pipelines have of a GPU
(`Device.taken`) is not free, and one that they fill with KV memory is filled.

Where times were measured (`weftline profile`) that is one start. Another is that what was measured is spread first, by
its times, and the rest, whose times nobody knows, placed around it as said above. This one is changed for the better
(`spreading`), and where it is not even then the first is too. The better one is taken, so that what fits without times
fits with them, and no GPU is busier than the busiest was. What other pipelines do on a GPU is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from weftline.pipelines.placement.gpu_load import Balance
from weftline.pipelines.placement.load_balance import balanced
from weftline.pipelines.placement.loads import AUTO, Chosen, Load, Room, Rooms, hold, loads_of
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.needs import Need, gpus_of
from weftline.pipelines.placement.traffic import links_of
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy
from weftline.shm.device.names import is_gpu

_Way = Literal["together", "apart", "tight"]
_WAYS: tuple[_Way, ...] = ("together", "apart", "tight")
_Places = dict[str, list[str]]


def fit(
    steps: Sequence[Step],
    written: Mapping[str, Sequence[str]],
    heavy: Mapping[str, bool],
    needs: Mapping[str, Need],
    edges: Collection[tuple[str, str]],
    machine: Machine,
    gpu: GpuPolicy,
    context_bytes: Mapping[str, int],
) -> tuple[dict[str, tuple[str, ...]], Balance | None]:
    """Return the device of each instance of each step, and how busy GPUs are with them; None: no time was measured.

    written: the same, as the pipeline has it, with 'auto' for those that are to be placed.
    edges:   pairs of steps, giver and reader, whose tensors can stay on a device.
    """
    if not machine.devices:
        bare = {name: tuple("cpu" if one == AUTO else one for one in devices) for name, devices in written.items()}
        return bare, None
    loads = loads_of(steps, written, heavy, needs, gpu)
    neighbours = _neighbours(edges)

    def empty() -> Rooms:
        return _rooms(loads, machine, gpu, context_bytes)

    def tried(first: Chosen) -> tuple[Rooms, Chosen]:
        tries = []
        for way in _WAYS:
            tries.append(_try(way, loads, neighbours, empty(), first))
            if hold(tries[-1][0]):
                return tries[-1]
        return tries[0]

    (rooms, chosen), balance = tried({}), None
    if any(load.work for load in loads) and all(load.pinned in {"", *rooms} for load in loads):
        balance = balanced(loads, links_of(loads, written, edges), chosen, empty, tried)
        rooms, chosen = balance.rooms, balance.chosen
    devices = {
        name: [chosen.get((name, copy), "cpu") if one == AUTO else one for copy, one in enumerate(own)]
        for name, own in written.items()
    }
    light = [step for step in steps if not heavy[step.name] and AUTO in written[step.name]]
    _follow(light, steps, written, devices, needs, neighbours, rooms)
    return {name: tuple(own) for name, own in devices.items()}, balance


def _rooms(loads: Sequence[Load], machine: Machine, gpu: GpuPolicy, context_bytes: Mapping[str, int]) -> Rooms:
    """Return the GPUs as they are before anything is placed."""
    arena = gpu.arena_bytes if any(need.gives for load in loads for need in load.needs) else 0
    return {
        one.name: Room(
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
    rooms: Rooms,
    first: Chosen,
) -> tuple[Rooms, Chosen]:
    """Place all instances one way, `first` and pinned ones before the rest; return the remainder and the assignment."""
    order, places = [*rooms], dict[tuple[str, int], str]()

    def put(load: Load, device: str) -> None:
        for name in gpus_of(device, load.ranks):
            if name in rooms:
                rooms[name].take(load)
        places.update(dict.fromkeys(load.members, device))

    for load in loads:
        if device := load.pinned or first.get(load.members[0], ""):
            put(load, device)
    free = [load for load in loads if load.members[0] not in places]
    for load in (one for one in free if not one.known and not one.open_kv):
        put(load, next((device for device in order if _fits(load, device, rooms)), order[0]))
    rest = [load for load in free if load.known or load.open_kv]
    if way != "tight":
        rest.sort(key=lambda load: not load.open_kv)  # what fills a GPU first, so that others keep away from it
    for load in rest:
        put(load, _best(way, load, rooms, order, neighbours))
    return rooms, places


def _best(
    way: _Way,
    load: Load,
    rooms: Mapping[str, Room],
    order: Sequence[str],
    neighbours: Mapping[str, Collection[str]],
) -> str:
    starts = [device for device in order if rooms.keys() >= {*gpus_of(device, load.ranks)}] or order[:1]
    fits = [device for device in starts if _fits(load, device, rooms)]
    near = {name for own in load.names for name in neighbours.get(own, ())}

    def rank(device: str) -> tuple[int | bool, ...]:
        room, index = rooms[device], order.index(device)
        copies = max(room.copies[name] for name in load.names)
        if not load.known:
            return room.fillers, room.others, index
        if way == "tight" and fits:
            return room.free, index
        if load.open_kv or way != "together":
            return copies, room.fillers, -room.free, index
        return copies, not any(room.copies[name] for name in near), room.fillers, -room.free, index

    return min(fits or starts, key=rank)


def _fits(load: Load, device: str, rooms: Mapping[str, Room]) -> bool:
    return all(name in rooms and rooms[name].cost(load) <= rooms[name].free for name in gpus_of(device, load.ranks))


def _neighbours(edges: Collection[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for giver, reader in edges:
        found.setdefault(giver, set()).add(reader)
        found.setdefault(reader, set()).add(giver)
    return found


def _follow(
    light: Sequence[Step],
    steps: Sequence[Step],
    written: Mapping[str, Sequence[str]],
    devices: _Places,
    needs: Mapping[str, Need],
    neighbours: Mapping[str, Collection[str]],
    rooms: Mapping[str, Room],
) -> None:
    """Put light steps where the steps are that they exchange tensors with; round by round, so that no order decides."""
    waiting = sorted(light, key=lambda step: step.name)
    while True:
        found = {step.name: _target(step, steps, devices, neighbours) for step in waiting}
        moved = False
        for step in waiting:
            device = found[step.name]
            load = Load(((step.name, 0),), (needs.get(step.name, Need()),), device, False)
            if not device or device not in rooms or _target(step, steps, devices, neighbours) != device:
                continue
            count = list(written[step.name]).count(AUTO)
            if load.on(device) * count > max(0, rooms[device].free):
                continue
            for _ in range(count):
                rooms[device].take(load)
            devices[step.name] = [device if one == AUTO else one for one in written[step.name]]
            moved = True
        waiting = [step for step in waiting if "cpu" in devices[step.name] and AUTO in written[step.name]]
        if not moved:
            return


def _target(step: Step, steps: Sequence[Step], devices: _Places, neighbours: Mapping[str, Collection[str]]) -> str:
    """Return the one GPU that a step's neighbours are on, if its worker may be there too; '' otherwise."""
    around = {device for name in neighbours.get(step.name, ()) for device in devices.get(name, ()) if is_gpu(device)}
    sharing = {
        device
        for other in steps
        if step.worker is not None and other.worker == step.worker and other.name != step.name
        for device in devices[other.name]
        if is_gpu(device)
    }
    return next(iter(around)) if len(around) == 1 and sharing <= around else ""
