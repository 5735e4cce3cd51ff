"""Output sizes that follow from the inputs, so that memory is allocated before a batch runs.

The size of an output is known in advance when each of its dimensions is a number or a name in the type of an input:
`float32[C, H, W] -> uint8[H, W]`. The worker requests all other output memory when it knows the size; see
engine/scheduler/allocations.py. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weftline.engine.protocol.messages import Item
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import PlannedStep
from weftline.shm.spec import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class _Rule:
    """Size of one output: `fixed_bytes` times the sizes of the bound (input, axis) pairs."""

    port: int
    fixed_bytes: int
    bound: tuple[tuple[int, int], ...]

    def item_bytes(self, item: Item) -> int:
        size = self.fixed_bytes
        for at, axis in self.bound:
            size *= item.inputs[at].shape[axis]
        return size


class OutputSizes:
    """The size rules of one step.

    any:  True if the size of at least one output follows from the inputs.
    device_ports: for each output port that is read on the device, 'device' or 'both'; see PlannedStep.
    """

    def __init__(self, step: PlannedStep) -> None:
        where: dict[str, tuple[int, int]] = {}
        for index, given in enumerate(step.inputs):
            for axis, dim in enumerate(given.type.dims or ()):
                if isinstance(dim, str) and dim != "?":
                    where.setdefault(dim, (index, axis))
        rules = (_rule(port, output.type, where) for port, output in enumerate(step.outputs))
        self._rules = tuple(rule for rule in rules if rule is not None)
        self.any = bool(self._rules)
        kinds = ((port, step.device_outputs.get(output.name)) for port, output in enumerate(step.outputs))
        self.device_ports = {port: kind for port, kind in kinds if kind is not None}

    def item_bytes(self, items: Sequence[Item]) -> dict[int, int]:
        """Return the bytes of one item by output port, where they are known and equal for all `items`."""
        sizes: dict[int, int] = {}
        for rule in self._rules:
            size = rule.item_bytes(items[0])
            if len(items) == 1 or all(rule.item_bytes(item) == size for item in items):
                sizes[rule.port] = size
        return sizes


def _rule(port: int, type: PortType, where: dict[str, tuple[int, int]]) -> _Rule | None:
    if type.kind != "tensor" or type.dtype is None or type.dims is None:
        return None
    named = [dim for dim in type.dims if isinstance(dim, str)]
    if any(dim not in where for dim in named):
        return None
    fixed = math.prod(dim for dim in type.dims if isinstance(dim, int)) * ITEM_BYTES[type.dtype]
    return _Rule(port, fixed, tuple(where[dim] for dim in named))
