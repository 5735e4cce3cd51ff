"""Loads, the placement units on GPUs; the free capacity of each GPU; and tensor traffic between loads.

A load is one instance, or the instances that share a worker. It is never split over GPUs, ranks of an llm step aside.
A `GpuCapacity` is the free memory of one GPU, with the processes that its loads need. Links between loads become
transfers when the loads are on different GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weftline.pipelines.placement.needs import Need
from weftline.pipelines.spec.graph import Step
from weftline.pipelines.spec.policy import GpuPolicy
from weftline.shm.device.names import is_gpu

AUTO = "auto"
"""A device that placement chooses."""


@dataclass(frozen=True, slots=True)
class Load:
    """Instances that are always on one GPU: a single one, or those that share a worker.

    pinned: stated GPU of one of them; '' for none.
    own:    they have a process of their own.
    work:   GPU time of one request, in ms by device: their shares of their steps' measured times; instances are assumed
            to share requests evenly. Empty: not measured.

    Derived:
    names:   their steps.
    open_kv: one of them uses the remainder of its device.
    ranks:   number of GPUs.
    """

    members: tuple[tuple[str, int], ...]
    needs: tuple[Need, ...]
    pinned: str
    own: bool
    work: Mapping[str, float] = field(default_factory=dict)
    names: frozenset[str] = field(init=False, compare=False)
    open_kv: bool = field(init=False, compare=False)
    ranks: int = field(init=False, compare=False)

    def __post_init__(self) -> None:  # stored, because they are read for every GPU and load
        object.__setattr__(self, "names", frozenset(name for name, _ in self.members))
        object.__setattr__(self, "open_kv", any(need.kv_bytes is None for need in self.needs))
        object.__setattr__(self, "ranks", max(need.ranks for need in self.needs))

    @property
    def known(self) -> bool:
        return any(need.bytes or need.kv_bytes for need in self.needs)

    @property
    def largest(self) -> int:
        return sum(max(need.bytes.values(), default=0) + (need.kv_bytes or 0) for need in self.needs)

    def on(self, device: str) -> int:
        return sum(need.bytes.get(device, 0) + (need.kv_bytes or 0) for need in self.needs)

    def ms(self, device: str) -> float:
        """Return the work on a GPU; one on which it was not measured counts as the slowest on which it was."""
        return self.work.get(device, max(self.work.values(), default=0.0))


@dataclass(slots=True)
class GpuCapacity:
    """Free capacity of one GPU, and its loads. `others`: bytes reserved by other pipelines."""

    device: str
    free: int
    context: int
    others: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    shared: int = 0  # processes that steps share
    fillers: int = 0  # llm steps that use the remainder
    plain: int = 0  # other loads
    sharing: Counter[str] = field(default_factory=Counter)  # copies in processes that steps share

    def cost(self, load: Load) -> int:
        slot = 1 + max(self.copies[name] for name in load.names)
        return load.on(self.device) + (self.context if load.own or slot > self.shared else 0)

    def add(self, load: Load) -> None:
        self.free -= self.cost(load)
        self.copies.update(load.names)
        self.fillers += load.open_kv
        self.plain += not load.open_kv
        if not load.own:
            self.sharing.update(load.names)
            self.shared = max(self.shared, *(self.copies[name] for name in load.names))

    def remove(self, load: Load) -> None:
        """Undo `add`, in any order."""
        _lessen(self.copies, load.names)
        self.fillers -= load.open_kv
        self.plain -= not load.open_kv
        if not load.own:
            _lessen(self.sharing, load.names)
            self.shared = max(self.sharing.values(), default=0)
        self.free += self.cost(load)


Capacities = dict[str, GpuCapacity]
"""The GPUs of a machine by name, in its order."""

Assignment = Mapping[tuple[str, int], str]
"""The GPU of each instance, by step and instance index."""


def all_fit(capacities: Capacities) -> bool:
    """Return True when the placed loads fit; GPUs without loads are not checked."""
    return all(capacity.free >= 0 or not capacity.copies for capacity in capacities.values())


def _lessen(counts: Counter[str], names: Collection[str]) -> None:
    for name in names:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


def share_ms(ms: Mapping[str, float], device: str, count: int) -> float:
    """Return the work on a GPU of one of `count` instances of a step for which `ms` was measured, 0 for nothing."""
    return ms.get(device, max(ms.values(), default=0.0)) / count


def loads_of(
    steps: Sequence[Step],
    written: Mapping[str, Sequence[str]],
    heavy: Mapping[str, bool],
    needs: Mapping[str, Need],
    gpu: GpuPolicy,
) -> list[Load]:
    """Return the loads for GPUs, by size and name: the order of steps in a file has no effect."""
    found: dict[tuple[bool, str, int], list[tuple[str, int, str]]] = {}
    for step in steps:
        for copy, device in enumerate(written[step.name]):
            if is_gpu(device) and (device != AUTO or heavy[step.name]):
                key = step.worker is not None, step.worker or step.name, copy
                found.setdefault(key, []).append((step.name, copy, device))
    loads = []
    for (shares, _, _), group in found.items():
        members = sorted(group)
        own = [needs.get(name, Need()) for name, _, _ in members]
        alone = gpu.processes == "separate" or any(need.alone for need in own)
        loads.append(
            Load(
                tuple((name, copy) for name, copy, _ in members),
                tuple(own),
                min((device for _, _, device in members if device != AUTO), default=""),
                shares or alone,
                _work([(need.ms, len(written[name])) for need, (name, _, _) in zip(own, members, strict=True)]),
            )
        )
    return sorted(loads, key=lambda load: (-load.largest, load.members))


def _work(steps: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Return the work of an instance of each of these steps by device, from what was measured and their instances."""
    devices = sorted({device for ms, _ in steps for device in ms})
    return {device: sum(share_ms(ms, device, count) for ms, count in steps) for device in devices}


Links = Mapping[int, Mapping[int, int]]
"""By load index: the loads that it exchanges tensors with, and the number of edges."""


def links_of(loads: Sequence[Load], written: Mapping[str, Sequence[str]], edges: Collection[tuple[str, str]]) -> Links:
    """Return the links between loads.

    edges: pairs of steps, writer and reader, whose tensors can stay on a device.

    Tensors of a step with instances on several devices are always transferred, and link nothing. Steps on `auto` that
    are not heavy follow their neighbours, so a tensor that passes through one links its writer with its final reader.
    """
    spots = _spots(loads, written)
    readers: dict[str, list[str]] = {}
    for giver, reader in sorted(edges):
        readers.setdefault(giver, []).append(reader)
    links: dict[int, dict[int, int]] = {}
    for giver in sorted(spots):
        for reader in _ends(giver, readers, spots, written):
            here, there = spots[giver], spots[reader]
            if here is not None and there is not None and here != there:
                for one, other in ((here, there), (there, here)):
                    own = links.setdefault(one, {})
                    own[other] = own.get(other, 0) + 1
    return links


def _spots(loads: Sequence[Load], written: Mapping[str, Sequence[str]]) -> dict[str, int | None]:
    """Return for each step the load that has all its instances; None where they may be on several devices."""
    spots: dict[str, int | None] = {}
    for index, load in enumerate(loads):
        for name, _ in load.members:
            first = spots.setdefault(name, index)
            apart = first is not None and first != index and not (load.pinned and load.pinned == loads[first].pinned)
            if apart or "cpu" in written[name]:
                spots[name] = None
    return spots


def _ends(
    giver: str,
    readers: Mapping[str, Sequence[str]],
    spots: Mapping[str, int | None],
    written: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    """Yield the readers of a step's outputs, past light steps without a stated device."""
    seen, waiting = {giver}, [*readers.get(giver, ())]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in spots:
            yield name
        elif AUTO in written.get(name, ()):
            waiting += readers.get(name, ())
