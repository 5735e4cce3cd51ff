"""Device work of one dispatch: uploads, stream order, downloads, and the memory it holds.

A file of its own beside device.py: that one holds the worker's long-lived device state, this one the state of one
dispatch. Host inputs are uploaded once per dispatch, whichever steps read them; inputs of one port are contiguous in
one block, so that a batch of them is one tensor. An output on the device that a later step reads as an array is
downloaded once. Memory that the device still reads or writes is kept until that work is done: `end` waits for it, or
records an event, and CompletionThread waits for that event.

    upload stream    ..copy in..copy in..
    a step's stream            wait...[ the node's call ][ copies into the arena ]
    download stream                                  wait...copy out..copy out..   <- waited for on the host
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftline.engine.protocol.messages import Value
from weftline.engine.protocol.packed import Packed, Source
from weftline.engine.protocol.values import ARRAYS, live, side_by_side
from weftline.engine.worker.device import ScratchBlock, WorkerDevice
from weftline.shm.arena import HostArena
from weftline.shm.block import INLINE_BYTES_MAX, Key, align_up
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.lease import DEVICE_ALIGN_BYTES
from weftline.shm.spec import TensorSpec
from weftline.shm.view import numpy_dtype


class DeviceDispatch:
    """The device work of one dispatch. For one thread of the worker.

    upload_stream, download_stream: the streams of its copies to the device and from it.
    stream:      the stream of the last step, 0 before the first; its work comes after all earlier steps.
    moved_bytes: bytes copied to the device and from it so far.
    blocks:      blocks of the worker's device arena that it writes.
    """

    def __init__(
        self, device: WorkerDevice, arenas: Mapping[int, HostArena], copies: tuple[int, int] | None = None
    ) -> None:
        """copies: the streams of copies to the device and from it; None: those of the main thread."""
        self.device = device
        self.upload_stream, self.download_stream = copies or (device.upload_stream, device.download_stream)
        self.stream = 0
        self.moved_bytes = 0
        self.written_blocks: set[Key] = set()
        self._arenas = arenas
        self._uploaded: dict[int, tuple[Source, DeviceTensor]] = {}  # by identity of the source
        self._downloaded: dict[int, tuple[Source, np.ndarray]] = {}
        self._scratch: list[ScratchBlock] = []
        self._held: list[Any] = []
        self._waited: set[tuple[int, Key]] = set()  # (stream, event) pairs already waited for
        self._uploads_pending = False  # uploads that no step's stream is ordered after yet
        self._downloads_pending = False  # downloads that were not waited for
        self._issued = 0  # operations queued so far, except downloads
        self._issued_before_downloads = 0  # of these, queued before the downloads
        self._awaited = 0  # of these, waited for
        self._earlier_streams: list[int] = []  # streams of earlier steps

    # inputs

    def begin_step(self, stream: int) -> None:
        """Begin a step's call on `stream`, ordered after the calls before it."""
        if self.stream and self.stream != stream:
            self.device.order(self.stream, stream)
            self._earlier_streams.append(self.stream)
        self.stream = stream
        self._issued += 1

    def device_column(self, sources: Sequence[Source], private: bool) -> list[Any]:
        """Return a port's values on the device, lists element by element; absent values stay None.

        private: return copies that the node may write.
        """
        leaves = [leaf for source in sources for leaf in _leaves(source)]
        self._upload([leaf for leaf in leaves if self._needs_upload(leaf)])
        found = iter([self._on_device(leaf) for leaf in leaves])
        values = [_rebuild(source, found) for source in sources]
        return [self._writable_copy(value) for value in values] if private else values

    def before_call(self) -> None:
        """Order the node's call after its inputs."""
        self._order_uploads()
        self.device.sync_before_call(self.stream)

    def stack(self, values: Sequence[DeviceTensor]) -> DeviceTensor:
        """Stack tensors of one shape to [items, ...]: a view if they are contiguous, else a copy."""
        first = values[0]
        spec = TensorSpec(first.dtype, (len(values), *first.shape))
        if any(one.spec != first.spec for one in values):
            raise ValueError(f"tensors of {first.spec} and of other shapes cannot be stacked")
        size, owner = first.nbytes, first.owner
        if all(one.owner is owner and one.address == first.address + at * size for at, one in enumerate(values)):
            return DeviceTensor(spec, first.device, first.address, owner)
        block = self._allocate(spec.size_bytes)
        self.copy_within([(one, block.address + at * size) for at, one in enumerate(values)])
        self.device.sync_before_call(self.stream)
        return DeviceTensor(spec, first.device, block.address, block, writable=True)

    # outputs

    def copy_within(self, pairs: Sequence[tuple[DeviceTensor, int]]) -> None:
        """Queue copies within the device, each tensor to an address, after the step's work."""
        for address, source, size in self._merged(pairs):
            self._copy(address, source, size, self.stream)

    def upload(self, array: np.ndarray, address: int) -> None:
        """Queue the upload of an array, after the step's work."""
        self._held.append(array)
        self._copy(address, array.ctypes.data, array.nbytes, self.stream)
        self.moved_bytes += array.nbytes

    def private_copies(self, tensors: Sequence[DeviceTensor]) -> list[DeviceTensor]:
        """Return copies in scratch memory, ordered before later writes of the node."""
        if not tensors:
            return []
        starts, size, _ = _block([tensor.nbytes for tensor in tensors])
        block = self._allocate(size)
        self.copy_within([(tensor, block.address + start) for tensor, start in zip(tensors, starts)])
        self.device.sync_before_call(self.stream)
        return [
            DeviceTensor(tensor.spec, tensor.device, block.address + start, block)
            for tensor, start in zip(tensors, starts)
        ]

    def download(self, pairs: Sequence[tuple[DeviceTensor, int]], received: Sequence[Value] = ()) -> None:
        """Queue downloads, each tensor to an address; complete after `wait_downloads`.

        received: received values among them that other workers may still be writing.
        """
        for value in received:
            self._wait_ready(self.download_stream, value)
        if self.stream:
            self.device.order(self.stream, self.download_stream)
            self._issued_before_downloads = self._issued
        for address, source, size in self._merged(pairs):
            self.device.driver.copy(address, source, size, self.download_stream)
            self.moved_bytes += size
            self._downloads_pending = True

    def wait_downloads(self) -> None:
        """Wait for the queued downloads."""
        if self._downloads_pending:
            self.device.synchronize(self.download_stream)
            self._downloads_pending = False
            self._awaited = self._issued_before_downloads

    def to_host(self, source: Source) -> np.ndarray:
        """Return a device-only value as an array; downloaded once per dispatch."""
        known = self._downloaded.get(id(source))
        if known is None:
            array: np.ndarray = np.empty(source.shape, numpy_dtype(source.dtype))
            if isinstance(source, Value):
                self.download([(self.device.view(source), array.ctypes.data)], [source])
            elif source.tensor is not None:
                self.download([(source.tensor, array.ctypes.data)])
            self.wait_downloads()
            array.flags.writeable = False
            known = self._downloaded[id(source)] = (source, array)
        return known[1]

    # end

    def end(self, ready: int | None = None) -> bool:
        """End the dispatch: wait for its work, or record `ready`; returns whether the work is unfinished.

        ready: the event to record, if the work may stay unfinished. After True, call `release` after that event.
        """
        if ready is not None and self.stream and self._awaited < self._issued and not self._uploads_pending:
            self.device.driver.record(ready, self.stream)
            for stream in self._earlier_streams:
                self.device.order(self.stream, stream)  # the next call there may write memory that is still read here
            return True
        self.wait()
        self.release()
        return False

    def wait(self) -> None:
        """Wait for all queued work of the dispatch."""
        if self._awaited < self._issued:
            if self._uploads_pending:
                self.device.synchronize(self.upload_stream)
                self._uploads_pending = False
            if self.stream:
                self.device.synchronize(self.stream)
            self._awaited = self._issued
        self.wait_downloads()

    @property
    def scratch_count(self) -> int:
        """Number of scratch blocks so far; see `free_scratch_since`."""
        return len(self._scratch)

    def free_scratch_since(self, taken: int) -> None:
        """Free scratch blocks allocated since `scratch_count` was `taken`, except uploads, which a retry reads.

        For a call that has failed, after its device work is done.
        """
        uploads = {id(tensor.owner) for _, tensor in self._uploaded.values()}
        late = self._scratch[taken:]
        self._scratch[taken:] = [block for block in late if id(block) in uploads]
        self.device.scratch.free(block for block in late if id(block) not in uploads)

    def release(self) -> None:
        """Free the memory of the dispatch; its device work is done."""
        self.device.scratch.free(self._scratch)
        self._scratch = []
        self._held.clear()
        self._uploaded.clear()
        self._downloaded.clear()

    # internals

    def _needs_upload(self, leaf: Source) -> bool:
        """Return whether a tensor is in host memory only."""
        if isinstance(leaf, Packed):
            return leaf.tensor is None
        return (
            leaf.kind in ARRAYS
            and not self.device.can_read(leaf)
            and (leaf.device_place is None or leaf.place is not None)
        )

    def _on_device(self, leaf: Source) -> DeviceTensor | None:
        known = self._uploaded.get(id(leaf))
        if known is not None:
            return known[1]
        if isinstance(leaf, Packed):
            # Computed on another step's stream: keep it, or its framework would reuse the memory.
            self._held.append(leaf.tensor)
            return _read_only(leaf.tensor)
        if leaf.kind not in ARRAYS:
            return None  # absent
        self._wait_ready(self.stream, leaf)
        return self.device.view(leaf)

    def _wait_ready(self, stream: int, value: Value) -> None:
        """Make a stream wait for a received value's ready event, once per event."""
        if value.ready is not None and (stream, value.ready.key) not in self._waited:
            self._waited.add((stream, value.ready.key))
            self.device.wait_ready(stream, value.ready)

    def _upload(self, leaves: Sequence[Source]) -> None:
        """Queue uploads of new values: in one block, values of one size contiguous."""
        new = {id(leaf): leaf for leaf in leaves if id(leaf) not in self._uploaded}
        if not new:
            return
        arrays = [np.asarray(live(leaf, self._arenas), order="C") for leaf in new.values()]
        starts, size, even = _block([array.nbytes for array in arrays])
        block = self._allocate(size)
        for start, array in _contiguous_runs(starts, arrays, even):
            self._held.append(array)
            self._copy(block.address + start, array.ctypes.data, array.nbytes, self.upload_stream)
            self.moved_bytes += array.nbytes
        self._uploads_pending = True
        for (key, leaf), start in zip(new.items(), starts):
            spec = TensorSpec(leaf.dtype, leaf.shape)
            self._uploaded[key] = (leaf, DeviceTensor(spec, self.device.name, block.address + start, block))

    def _order_uploads(self) -> None:
        if self._uploads_pending and self.stream:
            self.device.order(self.upload_stream, self.stream)
            self._uploads_pending = False
            self._issued += 1

    def _writable_copy(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._writable_copy(one) for one in value]
        if value is None:
            return None
        self._order_uploads()
        block = self._allocate(value.nbytes)
        self._copy(block.address, value.address, value.nbytes, self.stream)
        return DeviceTensor(value.spec, value.device, block.address, block, writable=True)

    def _merged(self, pairs: Sequence[tuple[DeviceTensor, int]]) -> list[tuple[int, int, int]]:
        """Return copies as (to, from, bytes); merges copies that are contiguous at both ends."""
        merged: list[tuple[int, int, int]] = []
        owner: Any = None
        for tensor, address in pairs:
            size = tensor.nbytes
            if not size:
                continue
            self._held.append(tensor)
            if merged and tensor.owner is owner is not None:
                to, source, known = merged[-1]
                if to + known == address and source + known == tensor.address:
                    merged[-1] = (to, source, known + size)
                    continue
            merged.append((address, tensor.address, size))
            owner = tensor.owner
        return merged

    def _allocate(self, size_bytes: int) -> ScratchBlock:
        block = self.device.scratch.allocate(size_bytes)
        self._scratch.append(block)
        return block

    def _copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        if size_bytes:
            self.device.driver.copy(to, source, size_bytes, stream)
            self._issued += 1


def _block(sizes: Sequence[int]) -> tuple[list[int], int, bool]:
    """Lay values out in one block: return the offsets, the block's size, and whether all have one size.

    Values of one size are contiguous. Others are aligned to DEVICE_ALIGN_BYTES.
    """
    even = len(set(sizes)) == 1
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size if even else align_up(size, DEVICE_ALIGN_BYTES)
    return starts, end, even


def _contiguous_runs(starts: list[int], arrays: list[np.ndarray], even: bool) -> list[tuple[int, np.ndarray]]:
    """Return the copies to queue: contiguous arrays as one, many small arrays joined on the host first."""
    if len(arrays) > 1 and even:
        whole = side_by_side(arrays)
        if whole is None and arrays[0].nbytes <= INLINE_BYTES_MAX:
            whole = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
        if whole is not None:
            return [(0, whole)]
    return list(zip(starts, arrays))


def _leaves(source: Source) -> list[Source]:
    """Return the leaves of a value: the elements of lists, recursively."""
    return [source] if source.items is None else [leaf for item in source.items for leaf in _leaves(item)]


def _rebuild(source: Source, found: Any) -> Any:
    """Rebuild a value from its leaves."""
    return next(found) if source.items is None else [_rebuild(item, found) for item in source.items]


def _read_only(tensor: DeviceTensor | None) -> DeviceTensor | None:
    if tensor is None or not tensor.writable:
        return tensor
    return DeviceTensor(tensor.spec, tensor.device, tensor.address, tensor.owner)
