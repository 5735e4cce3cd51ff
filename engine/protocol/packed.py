"""Values ready to be sent, and the layout of several values in one block.

A Packed has one interface for all kinds. If `travels_inline`, `inline()` returns a Value that contains the bytes.
Otherwise the owner of a block of `size_bytes` writes the bytes (`write`) and makes the Value for their place (`at`).
`Layout` does the same for several values in one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from weftline.engine.protocol.messages import Value
from weftline.nodes.media import Encoded
from weftline.shm.block import ALIGN_BYTES, INLINE_BYTES_MAX, Place, align_up
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec
from weftline.shm.view import numpy_dtype

ENCODED_BYTES = 16 << 10
"""Size from which a server leaves a json value encoded: building, checking and encoding its objects takes some ms."""


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """Dense tensor with a deferred read, directly into the block that the first step reads.

    Bytes that another process could still change (a client's shared memory) are copied exactly once this way, into an
    arena, and validated only there.

    read_into: fills a buffer of exactly `spec.size_bytes`; called once, in the thread that submits the request.
               Raises InputError if the bytes are no longer available.
    """

    spec: TensorSpec
    read_into: Callable[[memoryview], None]

    def read(self) -> np.ndarray:
        """Return the tensor as a new array; a dtype that numpy lacks is stored as its numpy substitute."""
        array: np.ndarray = np.empty(self.spec.shape, numpy_dtype(self.spec.dtype))
        self.read_into(array.reshape(-1).data.cast("B"))
        return array


class Packed(msgspec.Struct, frozen=True):
    """A value ready to be sent.

    array:   contiguous array of a tensor, not copied.
    data:    bytes of any other kind except lists.
    pending: source of a tensor whose read is deferred until it is written or inlined.
    tensor:  a tensor on this worker's device; copied by DeviceWorker.
    placed:  in addition to `tensor`: the Value to send, for a tensor that is in a device arena already.
    items:   elements of a list; an element that is placed already, or absent, is a Value.
    encoded: source of an image or audio whose decoding is deferred until it is written or inlined.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    array: Any = None
    data: bytes = b""
    items: tuple[Packed | Value, ...] | None = None
    pending: PendingTensor | None = None
    tensor: DeviceTensor | None = None
    placed: Value | None = None
    encoded: Encoded | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the block that the bytes need; for a list, of all elements together."""
        if self.array is not None:
            return int(self.array.nbytes)
        if self.pending is not None:
            return self.pending.spec.size_bytes
        if self.encoded is not None:
            return self.encoded.size_bytes
        if self.tensor is not None:
            return self.tensor.nbytes
        return len(self.data) if self.items is None else Layout((self,)).size_bytes

    @property
    def working_bytes(self) -> int:
        """Peak scratch memory of writing it: its parts are decoded one after the other."""
        if self.encoded is not None:
            return self.encoded.working_bytes
        return max((one.working_bytes for one in self.items if isinstance(one, Packed)), default=0) if self.items else 0

    def sources(self) -> Iterator[Encoded]:
        """Yield all parts that are still to be decoded."""
        if self.encoded is not None:
            yield self.encoded
        for one in self.items or ():
            if isinstance(one, Packed):
                yield from one.sources()

    @property
    def measured(self) -> bool:
        """True if `size_bytes` is known."""
        return not self.working_bytes or all(one.measured for one in self.sources())

    def decoded(self) -> Packed:
        """Return an equal value with all encoded parts decoded."""
        if self.encoded is not None:
            array = np.empty(self.encoded.size_bytes, np.uint8)
            self.encoded.decode_into(array.data)
            return Packed(self.kind, self.dtype, self.encoded.shape, array.view(self.dtype).reshape(self.encoded.shape))
        if not self.working_bytes:
            return self
        items = tuple(one.decoded() if isinstance(one, Packed) else one for one in self.items or ())
        return Packed(self.kind, items=items)

    @property
    def travels_inline(self) -> bool:
        return self.size_bytes <= INLINE_BYTES_MAX

    def inline(self) -> Value:
        """Return a Value that contains the bytes."""
        if self.pending is not None:
            return Value(self.kind, self.dtype, self.shape, self.pending.read().tobytes())
        if self.array is not None:
            return Value(self.kind, self.dtype, self.shape, self.array.tobytes())
        if self.tensor is not None:
            if self.tensor.nbytes:
                raise RuntimeError(f"{self.tensor!r} must be copied to host memory before it is sent")
            return Value(self.kind, self.dtype, self.shape, b"")
        if self.encoded is not None:
            return self.decoded().inline()
        if self.items is None:
            return Value(self.kind, "", (), self.data)
        return Value(self.kind, items=tuple(item if isinstance(item, Value) else item.inline() for item in self.items))

    def at(self, place: Place) -> Value:
        """Return the Value for bytes written to `place` by `write`."""
        if self.items is not None:
            return Layout((self,)).at(place)[0]
        if self.encoded is not None:
            return Value(self.kind, self.dtype, self.encoded.shape, None, place)
        return Value(self.kind, self.dtype, self.shape, None, place)

    def write(self, buffer: memoryview) -> None:
        """Copy the bytes into `buffer`, which is exactly `size_bytes` long."""
        if self.pending is not None:
            self.pending.read_into(buffer)
        elif self.array is not None:
            np.copyto(np.frombuffer(buffer, self.array.dtype).reshape(self.array.shape), self.array)
        elif self.encoded is not None:
            self.encoded.decode_into(buffer)
        elif self.items is not None:
            Layout((self,)).write(buffer)
        else:  # numpy lets other threads run meanwhile
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(self.data, np.uint8))

    def leaves(self) -> Iterator[Packed]:
        """Yield every part with bytes to write."""
        if self.items is None:
            if self.size_bytes:
                yield self
            return
        for item in self.items:
            if isinstance(item, Packed):
                yield from item.leaves()


Source = Value | Packed
"""A value received in a message, or packed in this process."""

Row = list[Source]
"""Outputs of one item, one per output port."""


class Layout:
    """Layout of several values in one block of `size_bytes`.

    Parts of equal size are contiguous, so that the next step can view them as one array. Other parts start at multiples
    of `align_bytes`.
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
        """Copy all parts into `buffer`, which is `size_bytes` long."""
        for leaf, start, size in zip(self._leaves, self._starts, self._sizes, strict=True):
            leaf.write(buffer[start : start + size])

    def parts(self, place: Place) -> Iterator[tuple[Packed, Place]]:
        """Yield every part with bytes, and its place when the layout starts at `place`."""
        for leaf, start, size in zip(self._leaves, self._starts, self._sizes, strict=True):
            yield leaf, Place(place.arena, place.offset + start, size, place.block, place.generation)

    def at(self, place: Place) -> list[Value]:
        """Return the Values of a layout that starts at `place`."""
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
