"""Copy outputs whose memory a node's code could still write (aliasing).

A node's output is packed by reference and copied once, when it is placed. A node's code may run again before that: for
the next item of a function, the next batch of a chain, another step of the chain, or the other half of a bisected
batch. An output that shares memory with anything the code can still reach would be overwritten. `copy_aliased` is
called at these points: it copies such outputs and leaves the others without a copy.

Guarantee: afterwards, no code of a node holds a reference to memory of these rows that it could write, unless it writes
through a pointer it does not own. The decision counts references, and copies in doubt. Not copied are:

    an array that owns its memory         only the row refers to it, weak references included
    views of such an array                only these rows refer to the array and to its views
    views of a torch tensor's storage     the same, and only these tensors use the storage
    a part of an input                    it is read-only, and leased or already copied
    memory of a `bytes` object            immutable

All other kinds (text, bytes, json, detections) are encoded when they are packed, which copies them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import getweakrefcount

import msgspec
import numpy as np

from weftline.engine.protocol.messages import Failure, Value
from weftline.engine.protocol.packed import Packed, Row, Source
from weftline.engine.protocol.values import side_by_side
from weftline.engine.worker.device import ScratchBlock
from weftline.engine.worker.memory import Memory
from weftline.shm.view import offset_in


def copy_aliased(rows: Sequence[Row | Failure], inputs: Sequence[Sequence[Source]], memory: Memory) -> None:
    """Replace aliased values in these rows by copies; `inputs`: the inputs of each row.

    The caller holds no reference to the outputs except these rows. Device tensors are copied on the device, on the
    stream of the last step.
    """
    doubtful: list[tuple[Packed, Sequence[Source]]] = []
    for row, sources in zip(rows, inputs, strict=True):
        if isinstance(row, Failure):
            continue
        for value in row:
            if value.__class__ is Packed and not value.data:
                _note_doubtful(value, sources, doubtful)
    if not doubtful:
        return
    replaced = _copies_on_device(doubtful, memory) | _copies(doubtful, memory)
    for row in rows:
        if isinstance(row, list):
            row[:] = [_with(value, replaced) for value in row]


def copies_of_aliased(leaves: Sequence[Packed], memory: Memory) -> Mapping[int, np.ndarray]:
    """Return copies of aliased arrays, by the identity of their Packed."""
    doubtful: list[tuple[Packed, Sequence[Source]]] = []
    for leaf in leaves:
        _note_doubtful(leaf, (), doubtful)
    return {key: packed.array for key, packed in _copies(doubtful, memory).items()}


def _note_doubtful(value: Packed, sources: Sequence[Source], doubtful: list[tuple[Packed, Sequence[Source]]]) -> None:
    """Collect the parts of a value that may be aliased."""
    if value.items is not None:
        for item in value.items:
            if item.__class__ is Packed:
                _note_doubtful(item, sources, doubtful)
    elif value.array is not None:
        # No local name for the array: it would be one more reference.
        if (
            value.array.base is not None
            or sys.getrefcount(value.array) > _REFERENCES
            or not value.array.flags.owndata
            or getweakrefcount(value.array)
        ):
            doubtful.append((value, sources))
    elif value.tensor is not None:
        doubtful.append((value, sources))


# arrays in host memory


def _copies(doubtful: Sequence[tuple[Packed, Sequence[Source]]], memory: Memory) -> dict[int, Packed]:
    """Return copies of aliased arrays, by identity of the old Packed; contiguous arrays stay contiguous."""
    on_host = [(leaf, sources) for leaf, sources in doubtful if leaf.array is not None]
    if not on_host:
        return {}
    alone = _Alone([leaf for leaf, _ in on_host])
    shared = [leaf for leaf, sources in on_host if not (alone.has(leaf) or _is_part_of(leaf.array, sources, memory))]
    copies: dict[int, Packed] = {}
    if len(shared) > 1 and (whole := side_by_side([leaf.array for leaf in shared])) is not None:
        arrays = list(whole.copy())
    else:
        arrays = [leaf.array.copy() for leaf in shared]
    for leaf, array in zip(shared, arrays, strict=True):
        copies[id(leaf)] = msgspec.structs.replace(leaf, array=array)
    return copies


class _Alone:
    """Reference counts of arrays and their bases: `has` finds arrays without another reference."""

    def __init__(self, leaves: Sequence[Packed]) -> None:
        self._holders = Counter(id(leaf.array) for leaf in leaves)
        views = {id(leaf.array): id(leaf.array.base) for leaf in leaves}
        self._views = Counter(views.values())  # arrays by what they are views of
        tensors = {id(leaf.array.base): leaf.array.base for leaf in leaves if _is_tensor(leaf.array.base)}
        self._tensors = Counter(_storage(tensor) for tensor in tensors.values())  # tensors by storage

    def has(self, leaf: Packed) -> bool:
        """Return whether only the leaves refer to an array's memory, or it is immutable."""
        base = type(leaf.array.base)
        if base is bytes:
            return True
        if sys.getrefcount(leaf.array) > _REFERENCES - 1 + self._holders[id(leaf.array)]:
            return False
        if getweakrefcount(leaf.array):
            return False
        if base is type(None):
            return bool(leaf.array.flags.owndata)
        views = self._views[id(leaf.array.base)]
        if sys.getrefcount(leaf.array.base) > _REFERENCES_TO_BASE - 1 + views or getweakrefcount(leaf.array.base):
            return False
        if base is np.ndarray:
            return leaf.array.base.base is None and bool(leaf.array.base.flags.owndata)
        return _is_tensor(leaf.array.base) and _is_tensor_alone(leaf.array.base, self._tensors)


def _is_part_of(array: np.ndarray, sources: Sequence[Source], memory: Memory) -> bool:
    """Return whether an array is part of an input, which is leased or was already copied."""
    if not array.flags.c_contiguous or not array.nbytes:
        return not array.nbytes
    for source in sources:
        if source.items is not None:
            if _is_part_of(array, source.items, memory):
                return True
        elif isinstance(source, Value):
            place = source.place
            if place is not None:
                offset = offset_in(memory.arenas[place.arena], array)
                if offset is not None and place.offset <= offset <= place.offset + place.size_bytes - array.nbytes:
                    return True
        elif source.array is not None and _is_inside(array, source.array):
            return True
    return False


def _is_inside(array: np.ndarray, whole: np.ndarray) -> bool:
    start = _address(array) - _address(whole)
    return 0 <= start <= whole.nbytes - array.nbytes


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _with(value: Source, replaced: Mapping[int, Packed]) -> Source:
    if not isinstance(value, Packed):
        return value
    if value.items is not None:
        items = tuple(_with(item, replaced) for item in value.items)
        same = all(one is other for one, other in zip(items, value.items, strict=True))
        return value if same else msgspec.structs.replace(value, items=items)
    return replaced.get(id(value), value)


# tensors


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is getattr(torch, "Tensor", None)


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_tensor_alone(tensor: Any, tensors: Mapping[int, int]) -> bool:
    """Return whether only `tensors`, counted by storage, use a tensor's storage."""
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)  # one per tensor, and one for the Python storage object
    return count is not None and count(_storage(tensor)) <= tensors[_storage(tensor)] + 1


def _copies_on_device(doubtful: Sequence[tuple[Packed, Sequence[Source]]], memory: Memory) -> dict[int, Packed]:
    """Return copies of aliased device tensors, by identity of the old Packed."""
    on_device = [(leaf, sources) for leaf, sources in doubtful if leaf.tensor is not None and leaf.placed is None]
    if not on_device or memory.dispatch is None:
        return {}
    owners = {id(leaf.tensor.owner): leaf.tensor.owner for leaf, _ in on_device if leaf.tensor is not None}
    storages = Counter(_storage(owner) for owner in owners.values() if _is_tensor(owner))
    shared = [leaf for leaf, sources in on_device if not _is_sole_owner(leaf, storages, sources)]
    copies = memory.dispatch.private_copies([leaf.tensor for leaf in shared if leaf.tensor is not None])
    return {id(leaf): msgspec.structs.replace(leaf, tensor=copy) for leaf, copy in zip(shared, copies, strict=True)}


def _is_sole_owner(leaf: Packed, storages: Mapping[int, int], sources: Sequence[Source]) -> bool:
    """Return whether a tensor's memory is the engine's, part of an input, or used by the rows' tensors only."""
    tensor = leaf.tensor
    if tensor is None or not tensor.nbytes or isinstance(tensor.owner, ScratchBlock):
        return True
    for source in sources:
        if isinstance(source, Packed) and source.tensor is not None:
            start = tensor.address - source.tensor.address
            if 0 <= start <= source.tensor.nbytes - tensor.nbytes:
                return True
    return _is_tensor(tensor.owner) and _is_tensor_alone(tensor.owner, storages)


# reference counts of an array that only one row holds, in this interpreter


def _references() -> tuple[int, int]:
    view = Packed("tensor", array=np.empty(2)[:1])
    return sys.getrefcount(view.array), sys.getrefcount(view.array.base)


_REFERENCES, _REFERENCES_TO_BASE = _references()
