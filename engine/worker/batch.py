"""A batch as a node of this worker sees it: values on demand, and nothing made that the node does not ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.engine.messages import Brought, Item, Value
from weftline.engine.packed import Source
from weftline.engine.values import side_by_side, stacked
from weftline.engine.worker.outputs import Aside
from weftline.engine.worker.padding import Padded
from weftline.nodes.contract import Batch
from weftline.nodes.urgency import USUAL, SequencePart, Urgency, seed_of
from weftline.shm.spec import TensorSpec
from weftline.shm.view import numpy_dtype

if TYPE_CHECKING:
    from weftline.engine.worker.hosting import HostedStep


class HostedBatch(Batch):
    """A batch of items that came in a message, or from an earlier step of a chain."""

    __slots__ = ("_aside", "_items", "_padded", "_rows", "_step")

    def __init__(
        self,
        step: HostedStep,
        items: Sequence[Item],
        rows: Sequence[Sequence[Source]],
        values: Mapping[str, Sequence[Any]],
        aside: Aside,
        padded: Padded | None,
    ) -> None:
        self._step = step
        self._items = items
        self._rows = rows
        self._values = values
        self._aside = aside
        self._padded = padded

    @property
    def ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(item.id for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def stacked(self, port: str) -> Any:
        values = self._values[port]
        work = self._step.memory.work
        if work is not None and port in self._step.near:
            return values[0].reshape(1, *values[0].shape) if len(values) == 1 else work.stacked(values)
        if len(values) == 1:
            return np.asarray(values[0])[None]
        if self._padded is not None and port in self._padded.lengths:
            whole = self._padded.whole.get(port)
        elif self._step.copies_inputs:
            whole = None
        else:
            index = self._step.inputs.index(port)
            sources = [source for row in self._rows if isinstance(source := row[index], Value)]
            travelled = len(sources) == len(values)
            whole = stacked(sources, self._step.memory.arenas) if travelled else side_by_side(values)
        return np.stack(values) if whole is None else whole

    def room(self, port: str, dtype: str, shape: tuple[int, ...]) -> Any:
        index = next((i for i, (name, _) in enumerate(self._step.outputs) if name == port), -1)
        near = self._aside.near.get(index)
        if near is not None:
            return self._step.memory.tensor_in(near, TensorSpec(dtype, (len(self), *shape)))
        if index >= 0 and self._step.gives_near(index):
            return None  # there may be room in host memory, but not where it is read on the device
        place = self._aside.host.get(index)
        if place is None:
            return None
        return self._step.memory.array_in(place, numpy_dtype(dtype), (len(self), *shape))

    def cancelled(self, position: int) -> bool:
        return self._step.cancels.has(self._items[position].id)

    def lengths(self, port: str) -> Sequence[int]:
        if self._padded is None:
            raise KeyError(port)
        return self._padded.lengths[port]

    def urgency(self, position: int) -> Urgency:
        return urgency_of(self._items[position].brought, self._step.name)


def urgency_of(brought: Brought | None, step: str) -> Urgency:
    """Return what an item brings along, as nodes see it."""
    if brought is None:
        return USUAL
    sequence = SequencePart(brought.sequence, brought.start, brought.end) if brought.sequence else None
    seed = None if brought.seed is None else seed_of(brought.seed, step, brought.element)
    return Urgency(brought.priority, brought.left_ms, sequence, seed)
