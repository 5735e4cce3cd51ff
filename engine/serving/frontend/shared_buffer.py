"""Shared buffers of an ingress process, and the encoding of values in them.

Each ingress process has two buffers, both created by the engine and passed as inherited descriptors without a name, so
that a killed process leaves nothing behind:

    request buffer     written by the ingress process, mapped read-only in the engine
    response buffer    written by the engine, sealed against any other writer

The request buffer may change at any time. The engine copies each value once, into an arena that only the engine writes,
and validates the copy.

Values are encoded by their Python type: port types are unknown here. The engine checks a decoded value against its port
exactly as it checks the value itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftline.engine.protocol.messages import Value
from weftline.engine.protocol.packed import Layout, Packed, PendingTensor
from weftline.engine.protocol.values import encoded_json, owned_json, pack, unpack
from weftline.engine.result import owned
from weftline.engine.runtime.byte_budget import RETRY_S, WaitQueue
from weftline.engine.serving.frontend.messages import ARENA, NO_BLOCK
from weftline.errors import InputError, LimitReached, StepError
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType
from weftline.nodes.values import is_json
from weftline.shm.allocator import Allocator
from weftline.shm.arena import F_SEAL_FUTURE_WRITE, HostArena
from weftline.shm.block import ALIGN_BYTES, INLINE_BYTES_MAX, PAGE_BYTES, Place, align_up
from weftline.shm.spec import TensorSpec
from weftline.shm.view import bytes_view

THREAD_COPY_BYTES = 1 << 20
"""Size from which values are copied in a thread; a copy of 1 MiB takes about as long as the thread switch."""

WAITING_MAX = 4096
"""Most requests that wait for room in a buffer."""

PENDING = "pending"
"""Kind of an encoded PendingTensor; all other kinds are the engine's."""

DEPTH_MAX = 8
"""Deepest nesting of lists of values other than json."""

_TENSOR, _TEXT, _BYTES = PortType("tensor"), PortType("text"), PortType("bytes")
_DETECTIONS, _JSON = PortType("detections"), PortType("json")


# memory


def create_request_buffer(size_bytes: int) -> HostArena:
    """Create a buffer that another process writes, mapped read-only here.

    LimitReached without memory for it. It is sealed against resizing: a shrunk mapping would kill its reader.
    """
    size = align_up(size_bytes, PAGE_BYTES)
    fd = os.memfd_create("weftline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        buffer = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise LimitReached(f"this machine cannot reserve {size} bytes of memory for an ingress process") from None
        raise
    return HostArena(fd, buffer, size, writable=False)


def attach_request_buffer(fd: int) -> HostArena:
    """Map a request buffer for writing, as its only writer from now on, and own `fd`."""
    size = os.fstat(fd).st_size
    buffer = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    return HostArena(fd, buffer, size, writable=True)


def detach(arena: HostArena) -> None:
    """Close the descriptor of a buffer. Idempotent.

    The mapping ends with its last view, which a thread may still read.

    HostArena.close would not wait for arrays: numpy references the mapping's object, but does not keep it open.
    """
    fd, arena.fd = arena.fd, -1
    if fd >= 0:
        os.close(fd)


# writing


class SharedBuffer:
    """Writer's side of a buffer: allocates blocks and places values.

    For one thread, except `Placement.write`.
    """

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self._allocator = Allocator(arena.size_bytes - arena.size_bytes % ALIGN_BYTES)
        self._queue: WaitQueue[int] = WaitQueue(
            contextlib.nullcontext(), lambda ticket, block: self.free(block), WAITING_MAX, "the request buffer is full"
        )

    @property
    def taken_bytes(self) -> int:
        return self._allocator.taken_bytes

    def place(self, values: PackedValues) -> Placement:
        """Allocate a block for the large ones of `values`.

        Without a free block they travel inside the message: slower, with the socket's back-pressure.
        """
        return self._placement(values, self._allocator.try_take(values.size_bytes) if values.size_bytes else None)

    async def place_in_turn(self, values: PackedValues, caller: Hashable, wait_s: float) -> Placement:
        """Allocate a block, and wait for room where `values` are large; fair by caller.

        LimitReached when too many wait, or after `wait_s`. Values larger than the buffer do not wait, as in `place`.
        """
        size = values.size_bytes
        if not THREAD_COPY_BYTES <= size <= self.arena.size_bytes:
            return self.place(values)
        ticket = self._queue.enter(lambda: self._allocator.try_take(size), caller, size)
        try:
            return self._placement(values, await ticket.wait_async(wait_s))
        except TimeoutError:
            raise LimitReached(f"other requests took up all memory for inputs for {wait_s:g} s", RETRY_S) from None

    def _placement(self, values: PackedValues, offset: int | None) -> Placement:
        packed, layout = values.packed, values.layout
        if layout is None or offset is None:
            return Placement(packed, {}, None, None, NO_BLOCK)
        place = Place(ARENA, offset, layout.size_bytes, offset, 0)
        names = [name for name, one in packed.items() if not one.travels_inline]
        return Placement(
            packed, dict(zip(names, layout.at(place), strict=True)), layout, bytes_view(self.arena, place), offset
        )

    def free(self, block: int) -> None:
        """Free a block; no effect for NO_BLOCK. KeyError if it is not in use."""
        if block != NO_BLOCK:
            self._allocator.give_back(block)
            self._queue.stir()


class PackedValues:
    """Values encoded without a copy; InputError for an unsupported one. layout: of the large ones, None without any."""

    __slots__ = ("layout", "packed")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.packed = {name: pack_value(value, name) for name, value in values.items()}
        large = [one for one in self.packed.values() if not one.travels_inline]
        self.layout = Layout(large) if large else None

    @property
    def size_bytes(self) -> int:
        """Bytes of the large ones."""
        return self.layout.size_bytes if self.layout is not None else 0


class Placement:
    """Values with their places; `write` copies them there. `block` is freed once they have been read."""

    __slots__ = ("_buffer", "_layout", "_packed", "_placed", "block")

    def __init__(
        self,
        packed: Mapping[str, Packed],
        placed: Mapping[str, Value],
        layout: Layout | None,
        buffer: memoryview | None,
        block: int,
    ) -> None:
        self._packed = packed
        self._placed = placed
        self._layout = layout
        self._buffer = buffer
        self.block = block

    @property
    def size_bytes(self) -> int:
        """Bytes that `write` copies into the buffer."""
        return self._layout.size_bytes if self._layout is not None else 0

    async def awrite(self) -> dict[str, Value]:
        """Call `write`, in a thread for large values.

        A cancelled call raises only after the copy has ended.
        """
        if self.size_bytes < THREAD_COPY_BYTES:
            return self.write()
        copying = asyncio.ensure_future(asyncio.to_thread(self.write))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            while not copying.done():  # cancelled twice: the block must not be freed before the copy has ended
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            raise

    def write(self) -> dict[str, Value]:
        """Copy the bytes to their places, or into the values, and return the values to send."""
        if self._layout is not None and self._buffer is not None:
            self._layout.write(self._buffer)
            self._buffer = None
        placed = self._placed
        return {name: placed[name] if name in placed else one.inline() for name, one in self._packed.items()}


# values


def pack_value(value: Any, name: str, depth: int = 0) -> Packed:
    """Encode a value without copying it; InputError for an unsupported type."""
    try:
        if isinstance(value, np.ndarray | np.generic):
            return pack(value, _TENSOR, name)
        if isinstance(value, str):
            return pack(value, _TEXT, name)
        if isinstance(value, bytes | bytearray | memoryview):
            return _pack_bytes(value, name)
        if isinstance(value, PendingTensor):
            return Packed(PENDING, value.spec.dtype, value.spec.shape, pending=value)
        if isinstance(value, Packed):
            return value
        if isinstance(value, Detections):
            return pack(value, _DETECTIONS, name)
        if isinstance(value, list | tuple) and depth < DEPTH_MAX and not is_json(value):
            return Packed("list", items=tuple(pack_value(one, name, depth + 1) for one in value))
        return pack(value, _JSON, name)
    except StepError as error:
        raise InputError(f"input {error}") from None


def unpack_value(value: Value, arena: HostArena) -> Any:
    """Decode a value: arrays as read-only views of the buffer or the message, everything else copied.

    ValueError, KeyError, TypeError or msgspec's errors for an invalid one.
    """
    if value.kind != PENDING:
        return unpack(value, {ARENA: arena})
    spec = TensorSpec(value.dtype, value.shape)
    data = bytes_view(arena, value.place) if value.place is not None else memoryview(value.data or b"")
    if spec.size_bytes != len(data):
        raise ValueError(f"{spec} takes {spec.size_bytes} bytes, {len(data)} came")

    def read_into(buffer: memoryview) -> None:
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(data, np.uint8))

    return PendingTensor(spec, read_into)


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes in a buffer that its writer may change."""

    view: memoryview


async def own_bytes(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Copy all SharedBytes of inputs, in a thread, and return whether nothing of the inputs is in the buffer now."""
    shared = [part for value in values.values() for part in _parts(value)]
    if not any(isinstance(part, SharedBytes) for part in shared):
        return dict(values), False
    owned = await asyncio.to_thread(lambda: {name: _owned_bytes(value) for name, value in values.items()})
    return owned, not any(isinstance(part, PendingTensor | np.ndarray) for part in shared)


def _parts(value: Any) -> list[Any]:
    return [part for one in value for part in _parts(one)] if isinstance(value, list) else [value]


def _owned_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_owned_bytes(one) for one in value]
    if not isinstance(value, SharedBytes):
        return value
    copied = np.empty(len(value.view), np.uint8)
    np.copyto(copied, np.frombuffer(value.view, np.uint8))  # other threads run meanwhile
    return copied.data.toreadonly()


def unpack_outputs(values: Mapping[str, Value], arena: HostArena) -> dict[str, Any]:
    """Decode outputs; large json stays encoded, as in a BorrowedResult."""
    arenas = {ARENA: arena}
    return {name: encoded_json(value, arenas) or unpack_value(value, arena) for name, value in values.items()}


def unpack_inputs(values: Mapping[str, Value], arena: HostArena) -> dict[str, Any]:
    """Decode inputs; large json is copied and stays encoded, for `JsonParser.check`, large bytes are SharedBytes."""
    arenas = {ARENA: arena}
    return {name: owned_json(value, arenas, ("json",)) or _unpack_input(value, arena) for name, value in values.items()}


def _unpack_input(value: Value, arena: HostArena) -> Any:
    if value.kind == "list":
        return [_unpack_input(item, arena) for item in value.items or ()]
    if value.kind == "bytes" and value.place is not None and value.size_bytes >= THREAD_COPY_BYTES:
        return SharedBytes(bytes_view(arena, value.place))
    return unpack_value(value, arena)


def unpack_chunk(value: Value, arena: HostArena) -> Any:
    """Decode an item of a stream as the reader's own; large json stays encoded."""
    return owned_json(value, {ARENA: arena}) or owned(unpack_value(value, arena))


def _pack_bytes(value: bytes | bytearray | memoryview, name: str) -> Packed:
    """Encode bytes; large ones stay where they are until `Placement.write` copies them."""
    if isinstance(value, bytes) or len(value) <= INLINE_BYTES_MAX or not memoryview(value).c_contiguous:
        return pack(value, _BYTES, name)
    return Packed("bytes", data=memoryview(value).cast("B"))  # type: ignore[arg-type]
