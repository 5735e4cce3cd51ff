"""How many bytes a step's outputs will take, worked out before it runs.

An output's size is known beforehand when each of its dimensions is a number, or a name that an input's type has too:
`float32[C, H, W] -> uint8[H, W]` needs no question. Everything else is asked for when the worker knows (see rooms).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weftline.engine.messages import Item
from weftline.nodes.ports import PortType
from weftline.pipelines.plan import PlannedStep
from weftline.shm.spec import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class _Rule:
    """One output's size: a fixed part in bytes, times the sizes of (input, axis) pairs."""

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

    any:  whether the size of any output follows from the inputs'.
    near: of output ports that are read on the device: 'device' or 'both'; see PlannedStep.
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
        kinds = ((port, step.near_outputs.get(output.name)) for port, output in enumerate(step.outputs))
        self.near = {port: kind for port, kind in kinds if kind is not None}

    def item_bytes(self, items: Sequence[Item]) -> dict[int, int]:
        """Return the bytes of one item for every output port whose size is known and the same for all `items`."""
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
