"""What one dispatch does on its worker's device, from its first upload until nothing of it is left there.

Inputs that lie on the host are put on their way once, whoever of the dispatch's steps reads them, those of one port
side by side in one block, so that a batch of them is one tensor. What a step gave on the device and a step that takes
arrays reads is brought down once. Everything that the device still reads or writes is kept until it is done: `end`
waits for that, or leaves the work to an event and to whoever waits for that (see completion).

    upload stream    ..copy in..copy in..
    a step's stream            wait...[ the node's call ][ copies into the arena ]
    download stream                                  wait...copy out..copy out..   <- waited for on the host
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftline.engine.messages import Value
from weftline.engine.packed import Packed, Source
from weftline.engine.values import ARRAYS, live, side_by_side
from weftline.engine.worker.near import NearMemory
from weftline.engine.worker.scratch import ScratchPiece
from weftline.shm.arena import HostArena
from weftline.shm.block import INLINE_BYTES_MAX, Key, align_up
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.lease import DEVICE_ALIGN_BYTES
from weftline.shm.spec import TensorSpec
from weftline.shm.view import numpy_dtype


class DeviceWork:
    """One dispatch on one device. For the worker's own thread alone.

    stream:      that of the step whose call was last, 0 before the first; what is done there comes after all of it.
    moved_bytes: copied to the device and from it so far.
    blocks:      what it writes in the worker's device arena.
    """

    def __init__(self, near: NearMemory, arenas: Mapping[int, HostArena]) -> None:
        self.near = near
        self.stream = 0
        self.moved_bytes = 0
        self.blocks: set[Key] = set()
        self._arenas = arenas
        self._uploaded: dict[int, tuple[Source, DeviceTensor]] = {}  # by identity of what was uploaded
        self._brought: dict[int, tuple[Source, np.ndarray]] = {}
        self._pieces: list[ScratchPiece] = []
        self._held: list[Any] = []
        self._waited: set[tuple[int, Key]] = set()  # (stream, event) that was waited for already
        self._coming = False  # uploads that no step's stream waits for yet
        self._going = False  # downloads that nobody has waited for
        self._put = 0  # how much was put on streams, but for downloads
        self._covered = 0  # how much of that comes before the downloads
        self._done = 0  # how much of that was waited for
        self._before: list[int] = []  # streams of the steps before the last one

    # inputs

    def begin(self, stream: int) -> None:
        """A step's call is next, whose work goes on `stream`: it comes after the calls before it."""
        if self.stream and self.stream != stream:
            self.near.order(self.stream, stream)
            self._before.append(self.stream)
        self.stream = stream
        self._put += 1

    def column(self, sources: Sequence[Source], private: bool) -> list[Any]:
        """Return a port's values on the device, lists by their elements; what is absent stays None.

        private: they are copies that the node may write into.
        """
        leaves = [leaf for source in sources for leaf in _leaves(source)]
        self._upload([leaf for leaf in leaves if self._is_to_come(leaf)])
        found = iter([self._found(leaf) for leaf in leaves])
        values = [_built(source, found) for source in sources]
        return [self._private(value) for value in values] if private else values

    def launch(self) -> None:
        """The node is called now: what it reads is there, or comes before its work on the stream."""
        self._meet_uploads()
        self.near.meet(self.stream)

    def stacked(self, values: Sequence[DeviceTensor]) -> DeviceTensor:
        """Return tensors of one shape as one [items, ...]: in place where they lie side by side, else copied."""
        first = values[0]
        spec = TensorSpec(first.dtype, (len(values), *first.shape))
        if any(one.spec != first.spec for one in values):
            raise ValueError(f"tensors of {first.spec} and of other shapes cannot be stacked")
        size, owner = first.nbytes, first.owner
        if all(one.owner is owner and one.address == first.address + at * size for at, one in enumerate(values)):
            return DeviceTensor(spec, first.device, first.address, owner)
        piece = self._take(spec.size_bytes)
        self.copy_near([(one, piece.address + at * size) for at, one in enumerate(values)])
        self.near.meet(self.stream)
        return DeviceTensor(spec, first.device, piece.address, piece, writable=True)

    # outputs

    def copy_near(self, pairs: Sequence[tuple[DeviceTensor, int]]) -> None:
        """Put copies within the device on their way, each tensor to an address, after the step's work."""
        for address, source, size in self._merged(pairs):
            self._copy(address, source, size, self.stream)

    def copy_up(self, array: np.ndarray, address: int) -> None:
        """Put a copy of an array to the device on its way, after the step's work."""
        self._held.append(array)
        self._copy(address, array.ctypes.data, array.nbytes, self.stream)
        self.moved_bytes += array.nbytes

    def copy_down(self, pairs: Sequence[tuple[DeviceTensor, int]], came: Sequence[Value] = ()) -> None:
        """Put copies to host memory on their way, each tensor to an address; they are there after `wait_down`.

        came: values that some of them came as in messages, and that other workers may still be writing.
        """
        for value in came:
            self._wait_ready(self.near.out, value)
        if self.stream:
            self.near.order(self.stream, self.near.out)
            self._covered = self._put
        for address, source, size in self._merged(pairs):
            self.near.driver.copy(address, source, size, self.near.out)
            self.moved_bytes += size
            self._going = True

    def wait_down(self) -> None:
        """Wait until everything that was copied down is there."""
        if self._going:
            self.near.driver.synchronize(self.near.out)
            self._going = False
            self._done = self._covered

    def brought(self, source: Source) -> np.ndarray:
        """Return an array of what lies on the device alone; copied once, and waited for."""
        known = self._brought.get(id(source))
        if known is None:
            array: np.ndarray = np.empty(source.shape, numpy_dtype(source.dtype))
            if isinstance(source, Value):
                self.copy_down([(self.near.view(source), array.ctypes.data)], [source])
            elif source.near is not None:
                self.copy_down([(source.near, array.ctypes.data)])
            self.wait_down()
            array.flags.writeable = False
            known = self._brought[id(source)] = (source, array)
        return known[1]

    # the end

    def end(self, ready: int | None = None) -> bool:
        """Be done with the dispatch: wait for all of it, or mark it by `ready`; whether it goes on on the device.

        ready: an event to mark it with, if it may go on. After True, `release` is to be called once that has come.
        """
        if ready is not None and self.stream and self._done < self._put and not self._coming:
            self.near.driver.record(ready, self.stream)
            for stream in self._before:
                self.near.order(self.stream, stream)  # the next call there may write what is still read here
            return True
        self.wait()
        self.release()
        return False

    def wait(self) -> None:
        """Wait for everything that the dispatch has put on the device."""
        if self._done < self._put:
            if self._coming:
                self.near.driver.synchronize(self.near.into)
                self._coming = False
            if self.stream:
                self.near.driver.synchronize(self.stream)
            self._done = self._put
        self.wait_down()

    @property
    def taken(self) -> int:
        """How many pieces of memory it has taken so far; see `give_up`."""
        return len(self._pieces)

    def give_up(self, taken: int) -> None:
        """Give back the memory taken since there were `taken` pieces, but for uploads, which whoever tries again reads.

        For a call that has failed, once nothing of it is left on the device.
        """
        uploads = {id(tensor.owner) for _, tensor in self._uploaded.values()}
        late = self._pieces[taken:]
        self._pieces[taken:] = [piece for piece in late if id(piece) in uploads]
        self.near.scratch.give_back(piece for piece in late if id(piece) not in uploads)

    def release(self) -> None:
        """Let go of what the device was using; nothing of the dispatch is left there."""
        self.near.scratch.give_back(self._pieces)
        self._pieces = []
        self._held.clear()
        self._uploaded.clear()
        self._brought.clear()

    # inside

    def _is_to_come(self, leaf: Source) -> bool:
        """Whether a tensor that is wanted on the device lies on the host alone."""
        if isinstance(leaf, Packed):
            return leaf.near is None
        return leaf.kind in ARRAYS and not self.near.sees(leaf) and (leaf.near is None or leaf.place is not None)

    def _found(self, leaf: Source) -> DeviceTensor | None:
        known = self._uploaded.get(id(leaf))
        if known is not None:
            return known[1]
        if isinstance(leaf, Packed):
            # Made on another step's stream: whoever made it would use its memory anew as soon as nobody held it.
            self._held.append(leaf.near)
            return _to_read(leaf.near)
        if leaf.kind not in ARRAYS:
            return None  # absent
        self._wait_ready(self.stream, leaf)
        return self.near.view(leaf)

    def _wait_ready(self, stream: int, value: Value) -> None:
        """Have a stream wait until a value that came is whole; once for each event."""
        if value.ready is not None and (stream, value.ready.key) not in self._waited:
            self._waited.add((stream, value.ready.key))
            self.near.wait_ready(stream, value.ready)

    def _upload(self, leaves: Sequence[Source]) -> None:
        """Put what is not on its way yet there: in one block, values of one size touching each other."""
        new = {id(leaf): leaf for leaf in leaves if id(leaf) not in self._uploaded}
        if not new:
            return
        arrays = [np.asarray(live(leaf, self._arenas), order="C") for leaf in new.values()]
        even = len({array.nbytes for array in arrays}) == 1
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += array.nbytes if even else align_up(array.nbytes, DEVICE_ALIGN_BYTES)
        piece = self._take(size)
        for start, array in _runs(starts, arrays, even):
            self._held.append(array)
            self._copy(piece.address + start, array.ctypes.data, array.nbytes, self.near.into)
            self.moved_bytes += array.nbytes
        self._coming = True
        for (key, leaf), start in zip(new.items(), starts):
            spec = TensorSpec(leaf.dtype, leaf.shape)
            self._uploaded[key] = (leaf, DeviceTensor(spec, self.near.device, piece.address + start, piece))

    def _meet_uploads(self) -> None:
        if self._coming and self.stream:
            self.near.order(self.near.into, self.stream)
            self._coming = False
            self._put += 1

    def _private(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._private(one) for one in value]
        if value is None:
            return None
        self._meet_uploads()
        piece = self._take(value.nbytes)
        self._copy(piece.address, value.address, value.nbytes, self.stream)
        return DeviceTensor(value.spec, value.device, piece.address, piece, writable=True)

    def _merged(self, pairs: Sequence[tuple[DeviceTensor, int]]) -> list[tuple[int, int, int]]:
        """Return (to, from, bytes): what lies side by side at both ends is copied at a time."""
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

    def _take(self, size_bytes: int) -> ScratchPiece:
        piece = self.near.scratch.take(size_bytes)
        self._pieces.append(piece)
        return piece

    def _copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        if size_bytes:
            self.near.driver.copy(to, source, size_bytes, stream)
            self._put += 1


def _runs(starts: list[int], arrays: list[np.ndarray], even: bool) -> list[tuple[int, np.ndarray]]:
    """Return what is copied at a time: neighbours together, many small ones joined on the host first."""
    if len(arrays) > 1 and even:
        whole = side_by_side(arrays)
        if whole is None and arrays[0].nbytes <= INLINE_BYTES_MAX:
            whole = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
        if whole is not None:
            return [(0, whole)]
    return list(zip(starts, arrays))


def _leaves(source: Source) -> list[Source]:
    """Return a value's parts, a list's elements one by one."""
    return [source] if source.items is None else [leaf for item in source.items for leaf in _leaves(item)]


def _built(source: Source, found: Any) -> Any:
    """Return a value made of its parts, as they come."""
    return next(found) if source.items is None else [_built(item, found) for item in source.items]


def _to_read(tensor: DeviceTensor | None) -> DeviceTensor | None:
    if tensor is None or not tensor.writable:
        return tensor
    return DeviceTensor(tensor.spec, tensor.device, tensor.address, tensor.owner)
