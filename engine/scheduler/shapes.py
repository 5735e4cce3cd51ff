"""Batch groups of a step: which of its items may share a call, by dtypes and shapes.

Under `shapes: same`, items share a batch when the dtypes and shapes of all their inputs are equal. Sizes that the step
pads count as the size they are padded to. The comparison itself is in `weftline.nodes.grouping`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from weftline.engine.protocol.messages import Value
from weftline.nodes.grouping import shape_key
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import PlannedStep


class Shapes:
    """The batch groups of one step.

    any: all items may share a batch; `group` then always returns None.
    """

    def __init__(self, step: PlannedStep) -> None:
        self.any = step.batch.shapes == "any" and not step.batch.pad
        pad = {name: tuple(sorted(sizes)) for name, sizes in step.batch.pad.items()}
        self._pads = tuple(_axis_pads(given.type, pad) for given in step.inputs)

    def group(self, inputs: Sequence[Value]) -> Hashable:
        """Return the key that is equal for all items of one batch; None when any items may share one.

        inputs: one value for each connected input, in the order of the plan.
        """
        if self.any:
            return None
        return tuple(shape_key(value, pads) for value, pads in zip(inputs, self._pads))


def _axis_pads(type: PortType, pad: dict[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes that each axis of a type is padded to; empty for an axis that is not padded."""
    return tuple(pad.get(dim, ()) if isinstance(dim, str) else () for dim in type.dims or ())
