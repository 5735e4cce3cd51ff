"""What is placed on GPUs as one, and how GPUs fill: loads and rooms.

A load is one instance, or the instances that share a worker; it never goes on two GPUs, ranks of an llm step aside. A
room is what is free of one GPU, with the processes that its loads begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftline.pipelines.graph import Step
from weftline.pipelines.needs import Need
from weftline.pipelines.policy import GpuPolicy
from weftline.shm.device.names import is_gpu

AUTO = "auto"
"""A device that is yet to be chosen."""


@dataclass(frozen=True, slots=True)
class Load:
    """Instances that are on one GPU whatever happens: one alone, or those that share a worker.

    pinned: the GPU that one of them names; '' for none.
    own:    they have a process to themselves, whoever else is on the GPU.
    """

    members: tuple[tuple[str, int], ...]
    needs: tuple[Need, ...]
    pinned: str
    own: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.members)

    @property
    def known(self) -> bool:
        return any(need.bytes or need.kv_bytes for need in self.needs)

    @property
    def open_kv(self) -> bool:
        """Whether it takes what is left of its device."""
        return any(need.kv_bytes is None for need in self.needs)

    @property
    def ranks(self) -> int:
        return max(need.ranks for need in self.needs)

    @property
    def largest(self) -> int:
        return sum(max(need.bytes.values(), default=0) + (need.kv_bytes or 0) for need in self.needs)

    def on(self, device: str) -> int:
        return sum(need.bytes.get(device, 0) + (need.kv_bytes or 0) for need in self.needs)


@dataclass(slots=True)
class Room:
    """One GPU while it fills: what is free of it, and who is on it. `others`: bytes that other pipelines have."""

    device: str
    free: int
    context: int
    others: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    shared: int = 0  # processes that steps share
    fillers: int = 0  # llm steps that take what is left

    def cost(self, load: Load) -> int:
        slot = 1 + max(self.copies[name] for name in load.names)
        return load.on(self.device) + (self.context if load.own or slot > self.shared else 0)

    def take(self, load: Load) -> None:
        self.free -= self.cost(load)
        self.copies.update(load.names)
        self.fillers += load.open_kv
        if not load.own:
            self.shared = max(self.shared, *(self.copies[name] for name in load.names))


def loads_of(
    steps: Sequence[Step],
    written: Mapping[str, Sequence[str]],
    heavy: Mapping[str, bool],
    needs: Mapping[str, Need],
    gpu: GpuPolicy,
) -> list[Load]:
    """Return what is to be on GPUs, by size and name: the order of steps in a file decides nothing."""
    found: dict[tuple[bool, str, int], list[tuple[str, int, str]]] = {}
    for step in steps:
        for copy, device in enumerate(written[step.name]):
            if is_gpu(device) and (device != AUTO or heavy[step.name]):
                key = step.worker is not None, step.worker or step.name, copy
                found.setdefault(key, []).append((step.name, copy, device))
    loads = []
    for (shares, _, _), members in found.items():
        own = [needs.get(name, Need()) for name, _, _ in members]
        alone = gpu.processes == "separate" or any(need.alone for need in own)
        loads.append(
            Load(
                tuple(sorted((name, copy) for name, copy, _ in members)),
                tuple(own),
                min((device for _, _, device in members if device != AUTO), default=""),
                shares or alone,
            )
        )
    return sorted(loads, key=lambda load: (-load.largest, load.members))
