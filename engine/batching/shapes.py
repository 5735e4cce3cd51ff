"""Which items of a step may share a batch, by the shapes of what they bring.

Two items share a call when their groups are equal. Under `shapes: same` a group is the dtypes and shapes of the
tensor-like inputs; sizes that the step pads count as the size they are padded to, so that 17 and 30 meet at 32.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence

from weftline.engine.messages import Value
from weftline.nodes.ports import PortType
from weftline.pipelines.plan import PlannedStep

_ABSENT = ("absent",)


class Shapes:
    """The grouping of one step.

    any: everything may share a batch, and `group` need not be asked.
    """

    def __init__(self, step: PlannedStep) -> None:
        self.any = step.batch.shapes == "any" and not step.batch.pad
        pad = {name: tuple(sorted(sizes)) for name, sizes in step.batch.pad.items()}
        self._buckets = tuple(_buckets(given.type, pad) for given in step.inputs)

    def group(self, inputs: Sequence[Value]) -> Hashable:
        """Return what items must have in common with this one; None when that is nothing.

        inputs: one value for each connected input, in the order of the plan.
        """
        if self.any:
            return None
        return tuple(_shape_of(value, buckets) for value, buckets in zip(inputs, self._buckets))


def _buckets(type: PortType, pad: dict[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return, for each axis of a type, the sizes it is padded to; none for an axis that is left alone."""
    return tuple(pad.get(dim, ()) if isinstance(dim, str) else () for dim in type.dims or ())


def _shape_of(value: Value, buckets: tuple[tuple[int, ...], ...]) -> Hashable:
    if value.kind == "absent":
        return _ABSENT
    if value.items is not None:
        return ("list", tuple(_shape_of(item, ()) for item in value.items))
    if not value.dtype:
        return None
    if not any(buckets) or len(buckets) != len(value.shape):
        return (value.dtype, value.shape)
    return (value.dtype, tuple(_padded(size, sizes) for size, sizes in zip(value.shape, buckets)))


def _padded(size: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of `sizes` that holds `size`; `size` itself above the last."""
    above = bisect_left(sizes, size)
    return sizes[above] if above < len(sizes) else size
