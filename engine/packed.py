"""A value that is ready to travel, and how the bytes of several lie side by side in one block.

A Packed has the same face whatever it holds: `travels_inline` says whether it goes inside the message, `inline()` puts
it there; otherwise whoever owns a block of `size_bytes` writes it (`write`) and says where it lies (`at`). `Layout`
does the same for many values that share a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from weftline.engine.messages import Value
from weftline.engine.pending import PendingTensor
from weftline.shm.block import ALIGN_BYTES, INLINE_BYTES_MAX, Place, align_up
from weftline.shm.device.tensor import DeviceTensor


class Packed(msgspec.Struct, frozen=True):
    """A value ready to travel.

    array: of a tensor, its contiguous array, not copied.
    data:  of all other kinds but lists, the bytes.
    pending: of a tensor that is read when it is written or put inline, where it comes from.
    near:  of a tensor on this worker's device, where it is; it is copied by whoever has the device (see giving).
    lies:  beside `near`, the value as others see it there: it lies in a device arena already.
    items: of a list, its elements; one that lies somewhere already, or is absent, is a Value.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    array: Any = None
    data: bytes = b""
    items: tuple[Packed | Value, ...] | None = None
    pending: PendingTensor | None = None
    near: DeviceTensor | None = None
    lies: Value | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes that need a place; for a list the elements side by side."""
        if self.array is not None:
            return int(self.array.nbytes)
        if self.pending is not None:
            return self.pending.spec.size_bytes
        if self.near is not None:
            return self.near.nbytes
        return len(self.data) if self.items is None else Layout((self,)).size_bytes

    @property
    def travels_inline(self) -> bool:
        return self.size_bytes <= INLINE_BYTES_MAX

    def inline(self) -> Value:
        """Return the value with its bytes inside."""
        if self.pending is not None:
            return Value(self.kind, self.dtype, self.shape, self.pending.read().tobytes())
        if self.array is not None:
            return Value(self.kind, self.dtype, self.shape, self.array.tobytes())
        if self.near is not None:
            if self.near.nbytes:
                raise RuntimeError(f"{self.near!r} was not brought to host memory before it travels")
            return Value(self.kind, self.dtype, self.shape, b"")
        if self.items is None:
            return Value(self.kind, "", (), self.data)
        return Value(self.kind, items=tuple(item if isinstance(item, Value) else item.inline() for item in self.items))

    def at(self, place: Place) -> Value:
        """Return the value whose bytes lie at `place`, as `write` lays them."""
        if self.items is not None:
            return Layout((self,)).at(place)[0]
        return Value(self.kind, self.dtype, self.shape, None, place)

    def write(self, buffer: memoryview) -> None:
        """Copy the bytes into `buffer`, which is exactly `size_bytes` long."""
        if self.pending is not None:
            self.pending.read_into(buffer)
        elif self.array is not None:
            np.copyto(np.frombuffer(buffer, self.array.dtype).reshape(self.array.shape), self.array)
        elif self.items is not None:
            Layout((self,)).write(buffer)
        else:
            buffer[:] = self.data

    def leaves(self) -> Iterator[Packed]:
        """Yield every part that has bytes to be placed."""
        if self.items is None:
            if self.size_bytes:
                yield self
            return
        for item in self.items:
            if isinstance(item, Packed):
                yield from item.leaves()


Source = Value | Packed
"""A value as it came in a message, or as a step of this process gave it."""

Row = list[Source]
"""What one item answers, one for each output port."""


class Layout:
    """Values side by side in one block of `size_bytes`.

    Parts of equal size touch, so that the next step sees one array; others start at multiples of `align_bytes`.
    """

    def __init__(self, values: Sequence[Packed], align_bytes: int = ALIGN_BYTES) -> None:
        self._values = values
        self._leaves = [leaf for value in values for leaf in value.leaves()]
        self._sizes = [leaf.size_bytes for leaf in self._leaves]
        step = 1 if len(set(self._sizes)) == 1 else align_bytes
        self._starts: list[int] = []
        self.size_bytes = 0
        for size in self._sizes:
            self._starts.append(self.size_bytes)
            self.size_bytes += align_up(size, step)

    def write(self, buffer: memoryview) -> None:
        """Copy all bytes into `buffer`, which is `size_bytes` long."""
        for leaf, start, size in zip(self._leaves, self._starts, self._sizes, strict=True):
            leaf.write(buffer[start : start + size])

    def parts(self, place: Place) -> Iterator[tuple[Packed, Place]]:
        """Yield every part that has bytes, and where it lies when the first byte is that of `place`."""
        for leaf, start, size in zip(self._leaves, self._starts, self._sizes, strict=True):
            yield leaf, Place(place.arena, place.offset + start, size, place.block, place.generation)

    def at(self, place: Place) -> list[Value]:
        """Return every value as it lies when the first byte is that of `place`."""
        offsets = iter(zip(self._starts, self._sizes, strict=True))
        return [_placed(value, place, offsets) for value in self._values]


def _placed(value: Packed, place: Place, offsets: Iterator[tuple[int, int]]) -> Value:
    if value.items is not None:
        items = (item if isinstance(item, Value) else _placed(item, place, offsets) for item in value.items)
        return Value(value.kind, items=tuple(items))
    if not value.size_bytes:
        return value.inline()
    start, size = next(offsets)
    return value.at(Place(place.arena, place.offset + start, size, place.block, place.generation))
