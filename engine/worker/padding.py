"""Inputs of different sizes padded to one size, so that a batch is one array, and the outputs cut back.

Sizes are those of named dims: a step that pads `T` to 64 or 128 gets every input `float32[T, 80]` with the smallest of
these that its longest item fits into. A size above the last is padded to the batch's longest. What an output calls by
the same name is cut back to each item's own size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weftline.engine.messages import StepToOpen
from weftline.errors import ModelError
from weftline.nodes.ports import PortType


@dataclass(slots=True)
class Padded:
    """What was done to one batch.

    lengths: for each padded input port, every item's true size along its (first) padded axis.
    whole:   padded ports as one array [items, ...], where the items have one shape.
    sizes:   for each padded dim, every item's true size.
    axes:    for each output port with padded dims, (axis, dim).
    """

    axes: Mapping[str, Sequence[tuple[int, str]]]
    lengths: dict[str, list[int]] = field(default_factory=dict)
    whole: dict[str, np.ndarray] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)

    def cut(self, port: str, value: Any, position: int) -> Any:
        """Return one item's output at its own size."""
        for axis, dim in self.axes.get(port, ()):
            if dim in self.sizes and getattr(value, "ndim", 0) > axis:
                value = value[(slice(None),) * axis + (slice(self.sizes[dim][position]),)]
        return value


@dataclass(frozen=True, slots=True)
class Padding:
    """How one step pads. inputs, outputs: by port, the (axis, dim) that are padded."""

    buckets: Mapping[str, Sequence[int]]
    inputs: Mapping[str, Sequence[tuple[int, str]]]
    outputs: Mapping[str, Sequence[tuple[int, str]]]
    fill: Mapping[str, Any]

    @classmethod
    def of(cls, step: StepToOpen) -> Padding | None:
        """Return how `step` pads, None when it does not; ModelError for a filler that its dtype cannot hold."""
        if not step.pad:
            return None
        inputs = {name: axes for name, type in step.inputs if (axes := _axes(type, step.pad))}
        outputs = {name: axes for name, type in step.outputs if (axes := _axes(type, step.pad))}
        fill = {
            name: _filler(PortType.parse(type).dtype, step.pad_value) for name, type in step.inputs if name in inputs
        }
        return cls({dim: tuple(sizes) for dim, sizes in step.pad.items()}, inputs, outputs, fill)

    def pad(self, columns: dict[str, list[Any]]) -> Padded:
        """Pad these columns in place; values that are absent stay None, with a size of 0."""
        done = Padded(self.outputs)
        for port, axes in self.inputs.items():
            for axis, dim in axes:
                own = [0 if value is None else int(value.shape[axis]) for value in columns[port]]
                known = done.sizes.setdefault(dim, own)
                done.sizes[dim] = [max(pair) for pair in zip(known, own, strict=True)]
                done.lengths.setdefault(port, own)
        sizes = {dim: self._size(dim, max(found, default=0)) for dim, found in done.sizes.items()}
        for port, axes in self.inputs.items():
            whole = _pad(columns[port], [(axis, sizes[dim]) for axis, dim in axes], self.fill[port])
            if whole is not None:
                done.whole[port] = whole
        return done

    def _size(self, dim: str, largest: int) -> int:
        return next((size for size in self.buckets[dim] if size >= largest), largest)


def _pad(column: list[Any], wanted: Sequence[tuple[int, int]], fill: Any) -> np.ndarray | None:
    """Pad the arrays of a column along (axis, size); return them as one array where that is what they then are."""
    shapes = []
    for value in column:
        shape = [] if value is None else list(value.shape)
        for axis, size in wanted if value is not None else ():
            shape[axis] = size
        shapes.append(tuple(shape))
    if all(value is not None and value.shape == shape for value, shape in zip(column, shapes, strict=True)):
        return None  # all have the size already: they may lie side by side as they came
    if None in [None if value is None else 0 for value in column] or len(set(shapes)) > 1:
        column[:] = [
            None if value is None else _into(value, np.empty(shape, value.dtype), fill)
            for value, shape in zip(column, shapes, strict=True)
        ]
        return None
    whole = np.empty((len(column), *shapes[0]), column[0].dtype)
    column[:] = [_into(value, row, fill) for value, row in zip(column, whole, strict=True)]
    return whole


def _into(value: np.ndarray, room: np.ndarray, fill: Any) -> np.ndarray:
    room[...] = fill
    room[tuple(slice(size) for size in value.shape)] = value
    return room


def _axes(type: str, pad: Mapping[str, Sequence[int]]) -> list[tuple[int, str]]:
    dims = PortType.parse(type).dims or ()
    return [(axis, dim) for axis, dim in enumerate(dims) if isinstance(dim, str) and dim in pad]


def _filler(dtype: str | None, value: float) -> Any:
    """Return what an array that holds `dtype` is filled with: for a dtype that numpy does not have, its bits."""
    if dtype == "bfloat16":
        return np.float32(value).view(np.uint32) >> 16
    if dtype is not None and dtype.startswith("float8") and value:
        raise ModelError(f"batch.pad_value: {value} cannot be filled into {dtype}; only 0 can")
    return value if dtype is None or dtype.startswith(("float", "complex")) else int(value)
