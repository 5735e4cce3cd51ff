"""Output placement: check a node's outputs against its ports, and copy them to where their readers are.

`OutputPorts` checks and packs what a node returned. An input that is returned unchanged is passed on without a copy. A
part of an input, or an output that the node wrote into a preallocated block, is referenced where it is. On a GPU,
tensors of any library stay on the device.

`OutputPlacement` turns packed rows into ItemResults. Small values travel inside the message. Large values of one output
port are stored contiguously in one block, preallocated or requested now: in the host arena, in the device arena, or in
both, as the plan says for each port. A value that is already in the right memory stays there. Every other value is
copied once.

    where       a device tensor                     an array
    'host'      downloaded, or inline               copied, or inline
    'device'    copied within the device            uploaded
    'both'      within the device, and downloaded   uploaded, and copied

`is_finite` checks outputs of steps with `finite: true`: tensors of floating-point types in any memory and library, list
elements, detections, and numbers in JSON. Integers, text and bytes are always finite. A tensor on a GPU is checked
there, on the stream that computed it. In a worker without torch it is downloaded first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weftline.engine.protocol.messages import Failure, ItemResult, Value
from weftline.engine.protocol.packed import Layout, Packed, Row, Source
from weftline.engine.protocol.values import ARRAYS, OnDevice, is_of, pack
from weftline.engine.worker.device_dispatch import DeviceDispatch
from weftline.engine.worker.faults import failure, out_of_memory
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.ownership import copies_of_aliased, copy_aliased
from weftline.errors import InputError, LimitReached, StepError
from weftline.nodes.contract import Outputs
from weftline.nodes.detections import Detections
from weftline.nodes.json_value import to_json
from weftline.nodes.out_of_memory import is_out_of_memory
from weftline.nodes.ports import PortType
from weftline.pipelines.spec.policy import CallPolicy
from weftline.shm.block import INLINE_BYTES_MAX, Block, Key, Place
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.lease import DEVICE_ALIGN_BYTES
from weftline.shm.view import bytes_view, numpy_dtype

_PASSED_ON = (*ARRAYS, "text", "bytes")
"""Kinds whose input values are immutable: one that is returned unchanged is passed on without a copy."""

_INERT = (list, tuple, np.ndarray, DeviceTensor)
"""Containers whose elements are read without running code of the node."""

_NOT_FINITE = "{}: found NaN or an infinite number, expected none: the step says `finite: true`"


class Preallocated(NamedTuple):
    """Preallocated blocks for the outputs of some items, by output port: in host memory, and on the device."""

    host: Mapping[int, Place]
    device: Mapping[int, Place]

    @classmethod
    def of_blocks(cls, host: Mapping[int, Block], device: Mapping[int, Block]) -> Preallocated:
        return cls(
            {port: block.place(0, block.size_bytes) for port, block in host.items()},
            {port: block.place(0, block.size_bytes) for port, block in device.items()},
        )

    def slice(self, at: int, count: int, of: int) -> Preallocated:
        """Return the parts of items at..at+count of the `of` items of these blocks."""
        return Preallocated(_slices(self.host, at, count, of), _slices(self.device, at, count, of))


NOT_PREALLOCATED = Preallocated({}, {})


class OutputPorts:
    """The output ports of one hosted step.

    ran_out_of_memory: the node returned an out-of-memory error for an item since this was last set to False.
    finite: whether outputs are checked for NaN and infinite numbers, for all items or for each of the current call.
    """

    def __init__(
        self,
        ports: Sequence[tuple[str, PortType]],
        memory: Memory,
        device: bool,
        copies_inputs: bool,
        policy: CallPolicy,
    ) -> None:
        self.ports = ports
        self.finite: bool | Sequence[bool] = policy.finite
        self.ran_out_of_memory = False
        self._memory = memory
        self._on_device: OnDevice | None = self._as_tensor if device else None
        self._copies_inputs = copies_inputs

    def check_columns(self, outputs: Outputs, count: int) -> Mapping[str, Sequence[Any]]:
        """Return the node's outputs by port; StepError unless each has one value for each of `count` items."""
        for name, _ in self.ports:
            if name not in outputs:
                raise StepError(f"the node returned no {name}; it returned {', '.join(outputs) or 'nothing'}")
            if len(outputs[name]) != count:
                raise StepError(f"{name}: the node returned {len(outputs[name])} values for {count} items")
        if self._on_device is None:
            return outputs
        return {name: self._as_tensors(outputs[name], self._on_device) for name, _ in self.ports}

    def check_rows(
        self,
        outputs: Mapping[str, Sequence[Any]],
        rows: Sequence[Sequence[Source]],
        call_inputs: Sequence[tuple[Any, ...]],
        preallocated: Preallocated,
    ) -> list[Row | Failure]:
        """Return each item's outputs, or the first failure among them.

        rows: the inputs as received, by item and port. call_inputs: the inputs as passed to the node, by port and item.
        """
        made: list[Row | Failure] = [[] for _ in rows]
        for port, (name, _) in enumerate(self.ports):
            values = outputs[name]
            computed = type(outputs) is not dict or not _is_inert(values)
            for position, row in enumerate(rows):
                row_out, value = made[position], values[position]
                if isinstance(row_out, Failure):
                    continue
                if isinstance(value, BaseException):
                    made[position] = self._failed(value)
                    continue
                try:
                    row_out.append(self.check_value(value, port, position, row, call_inputs, preallocated))
                except (StepError, InputError) as error:
                    made[position] = failure(error)
                if computed:
                    del value
                    copy_aliased([made[position]], [row], self._memory)
        return made

    def check_value(
        self,
        value: Any,
        port: int,
        position: int,
        row: Sequence[Source],
        call_inputs: Sequence[tuple[Any, ...]],
        preallocated: Preallocated,
    ) -> Source:
        """Check one output: returns it packed, or a Value if it is already in shared memory; StepError when invalid."""
        if value.__class__ is Packed or value.__class__ is Value:
            return value  # packed by Batch.settle
        name, type = self.ports[port]
        found: Source | None = None
        if not self._copies_inputs:
            for column, source in zip(call_inputs, row):
                if value is column[position] and source.kind in _PASSED_ON and is_of(source, type):
                    found = source
                    break
        if found is None:
            found = self._pack(value, type, name, port, position, row, call_inputs, preallocated)
        finite = self.finite
        if finite and (finite is True or finite[position]) and not is_finite(value, found, self._readable):
            raise StepError(_NOT_FINITE.format(name))
        return found

    def _failed(self, error: BaseException) -> Failure:
        """Return the failure of an item whose output is an exception."""
        if not is_out_of_memory(error):
            return failure(error)
        self.ran_out_of_memory = True
        return out_of_memory(error)

    def _as_tensors(self, values: Any, on_device: OnDevice) -> Any:
        """Return the output of all items as one device tensor, if it is one: its items are contiguous."""
        if isinstance(values, list | tuple | np.ndarray):
            return values
        try:
            whole = on_device(values)
        except ValueError:
            return values  # its items are checked one by one
        return values if whole is None else whole

    def _as_tensor(self, value: Any) -> DeviceTensor | None:
        device, dispatch = self._memory.device, self._memory.dispatch
        return None if device is None or dispatch is None else device.as_tensor(value, dispatch.stream)

    def _readable(self, value: Any) -> Any:
        """Return an output tensor as a numpy array or torch tensor."""
        tensor = value if self._on_device is None else self._on_device(value)
        if not isinstance(tensor, DeviceTensor):
            return value
        device, dispatch = self._memory.device, self._memory.dispatch
        return tensor.torch() if device is None or dispatch is None else device.readable(tensor, dispatch.stream)

    def _pack(
        self,
        value: Any,
        type: PortType,
        name: str,
        port: int,
        position: int,
        row: Sequence[Source],
        call_inputs: Sequence[tuple[Any, ...]],
        preallocated: Preallocated,
    ) -> Source:
        """Pack an output, or find it in shared memory; StepError when it does not match its port's type."""
        on_device = self._on_device
        if type.kind == "list":
            return pack(value, type, name, self._lookup(position, row, call_inputs, on_device), on_device)
        packed = pack(value, type, name, None, on_device)
        if packed.size_bytes <= INLINE_BYTES_MAX:
            return packed
        if packed.tensor is not None:
            return self._memory.find_on_device(packed, row, preallocated.device.get(port)) or packed
        return self._memory.find_in_host(packed, row, preallocated.host.get(port)) or packed

    def _lookup(
        self, position: int, row: Sequence[Source], call_inputs: Sequence[tuple[Any, ...]], on_device: OnDevice | None
    ) -> Any:
        """Return a function that finds an element of an output list in shared memory."""
        held: dict[int, tuple[Any, Value]] = {}
        if not self._copies_inputs:
            for column, source in zip(call_inputs, row):
                _index(column[position], source, held)

        def lookup(value: Any, type: PortType) -> Value | None:
            found = held.get(id(value))
            if found is not None and found[0] is value and is_of(found[1], type):
                return found[1]
            if type.kind not in ARRAYS:
                return None
            if isinstance(value, np.ndarray):
                large = value.nbytes > INLINE_BYTES_MAX
                return self._memory.find_in_host(pack(value, type, "an element"), row) if large else None
            if on_device is None or on_device(value) is None:
                return None
            packed = pack(value, type, "an element", None, on_device)
            return self._memory.find_on_device(packed, row) if packed.size_bytes > INLINE_BYTES_MAX else None

        return lookup


def _is_inert(values: Any) -> bool:
    """Return whether reading one item's values runs no code of the node, which could change another item's."""
    return isinstance(values, _INERT) or hasattr(values, "detach")


def _slices(host_buffers: Mapping[int, Place], at: int, count: int, of: int) -> dict[int, Place]:
    return {
        port: place._replace(
            offset=place.offset + at * (place.size_bytes // of), size_bytes=count * (place.size_bytes // of)
        )
        for port, place in host_buffers.items()
    }


def _index(value: Any, source: Source, held: dict[int, tuple[Any, Value]]) -> None:
    """Index values in shared memory by identity, and lists by their elements."""
    if source.items is not None:
        for one, item in zip(value, source.items):
            _index(one, item, held)
    elif isinstance(source, Value) and (source.place or source.device_place) is not None and source.kind in _PASSED_ON:
        held[id(value)] = (value, source)


HOST, DEVICE, BOTH = "host", "device", "both"
"""Memory that an output is placed in."""

_NOTHING: Mapping[int, Place] = {}


class OutputPlacement:
    """Places the outputs of one step or one chain; `where`: host, device or both, by output."""

    def __init__(self, memory: Memory, where: Sequence[str]) -> None:
        self._memory = memory
        self._where = tuple(where)

    def place(
        self,
        rows: Sequence[Row | Failure],
        host_buffers: Mapping[int, Place] = _NOTHING,
        device_buffers: Mapping[int, Place] = _NOTHING,
    ) -> list[ItemResult | Failure]:
        """Return the items' results: small values inline, large values placed in shared memory.

        host_buffers, device_buffers: preallocated blocks by output. Where there is no memory for all
        together, each item gets its own or fails.
        """
        if self._memory.dispatch is not None:
            self._download_small(rows, self._memory.dispatch)
        values: list[ItemResult | Failure] = []
        large = False
        for row in rows:
            if isinstance(row, Failure):
                values.append(row)
                continue
            for index, value in enumerate(row):
                if value.__class__ is Packed:
                    if value.travels_inline:
                        row[index] = value.inline()
                    else:
                        large = True
            values.append(ItemResult(tuple(row)))  # type: ignore[arg-type]
        if not large:
            return values
        try:
            self._place_large([row for row in rows if isinstance(row, list)], host_buffers, device_buffers)
        except LimitReached:
            return [row if isinstance(row, Failure) else self._place_row(row) for row in rows]
        return [row if isinstance(row, Failure) else _to_result(row) for row in rows]

    def place_value(self, packed: Packed) -> Value:
        """Place one value; LimitReached when there is no memory for it."""
        row: Row = [packed]
        if self._memory.dispatch is not None:
            self._download_small([row], self._memory.dispatch)
            packed = row[0]  # type: ignore[assignment]
        if packed.travels_inline:
            return packed.inline()
        self._place_large([row], _NOTHING, _NOTHING)
        return _to_result(row).outputs[0]

    def _place_row(self, row: Row) -> ItemResult | Failure:
        try:
            self._place_large([row], _NOTHING, _NOTHING)
        except LimitReached as error:
            return Failure("LimitReached", str(error))
        return _to_result(row)

    def placement_of(self, index: int) -> str:
        """Return where an output is placed; 'host' while readers cannot attach the device arena."""
        device = self._memory.device
        return self._where[index] if device is not None and device.shares_outputs and index < len(self._where) else HOST

    # small values, and values on the device only

    def _download_small(self, rows: Sequence[Row | Failure], dispatch: DeviceDispatch) -> None:
        """Download small tensors, and mark large ones that must also be placed in host memory."""
        small: list[Packed] = []
        for row in rows:
            if isinstance(row, list):
                for index, value in enumerate(row):
                    row[index] = self._unplaced(value, self.placement_of(index))
                    _collect_small(row[index], small)
        if not small:
            return
        arrays = _downloaded(small, dispatch)
        for row in rows:
            if isinstance(row, list):
                row[:] = [_with_arrays(value, arrays) for value in row]

    def _unplaced(self, value: Source, where: str) -> Source:
        """Return a device-only value as not yet placed, if it has readers on the host."""
        if value.items is not None:
            items = tuple(self._unplaced(item, where) for item in value.items)
            if all(one is other for one, other in zip(items, value.items)):
                return value
            return Packed("list", items=items)
        if where == DEVICE or isinstance(value, Packed) or value.device_place is None or value.place is not None:
            return value
        device = self._memory.device
        if device is None or not device.can_read(value):
            return value
        return Packed(value.kind, value.dtype, value.shape, tensor=device.view(value), placed=value)

    # large values

    def _place_large(
        self, rows: Sequence[Row], host_buffers: Mapping[int, Place], device_buffers: Mapping[int, Place]
    ) -> None:
        """Copy every Packed in these rows to its blocks; values of one output are contiguous."""
        host: dict[int, Layout] = {}
        device: dict[int, Layout] = {}
        for index in range(len(rows[0])):
            leaves = [leaf for row in rows if isinstance(value := row[index], Packed) for leaf in value.leaves()]
            if not leaves:
                continue
            where = self.placement_of(index)
            if where != DEVICE:
                host[index] = Layout(leaves)
            if where != HOST:
                leaves_to_copy = [leaf for leaf in leaves if leaf.placed is None]
                if leaves_to_copy:
                    device[index] = Layout(leaves_to_copy, DEVICE_ALIGN_BYTES)
        host_places, device_places = self._output_buffers(host, device, host_buffers, device_buffers)
        places = self._copy_to_host(host, host_places), self._copy_to_device(device, device_places)
        for row in rows:
            row[:] = [_placed(value, *places) for value in row]

    def _output_buffers(
        self,
        host: Mapping[int, Layout],
        device: Mapping[int, Layout],
        host_buffers: Mapping[int, Place],
        device_buffers: Mapping[int, Place],
    ) -> tuple[dict[int, Place], dict[int, Place]]:
        """Return the host and device buffers of the outputs; requests missing ones in one message."""
        host_places, missing = _matching(host, host_buffers)
        device_places, missing_on_device = _matching(device, device_buffers) if device else ({}, [])
        if missing or missing_on_device:
            sizes = (
                [host[index].size_bytes for index in missing],
                [device[index].size_bytes for index in missing_on_device],
            )
            blocks, device_blocks = self._memory.allocate(*sizes)
            host_places |= _of_blocks(missing, blocks, sizes[0])
            if missing_on_device:
                device_places |= _of_blocks(missing_on_device, device_blocks, sizes[1])
        return host_places, device_places

    def _copy_to_host(self, host: Mapping[int, Layout], host_places: Mapping[int, Place]) -> dict[int, Place]:
        """Copy to host memory, and queue downloads from the device; returns the place of each part."""
        memory = self._memory
        places: dict[int, Place] = {}
        downloads: list[tuple[DeviceTensor, int]] = []
        received: list[Value] = []
        for index, place in host_places.items():
            for leaf, at in host[index].parts(place):
                places[id(leaf)] = at
                buffer = bytes_view(memory.own_arena, at)
                if leaf.tensor is None:
                    leaf.write(buffer)
                    continue
                downloads.append((leaf.tensor, int(np.frombuffer(buffer, np.uint8).ctypes.data)))
                if leaf.placed is not None:
                    received.append(leaf.placed)
            memory.copied_bytes += place.size_bytes
        if downloads and memory.dispatch is not None:
            memory.dispatch.download(downloads, received)
        return places

    def _copy_to_device(self, device: Mapping[int, Layout], device_places: Mapping[int, Place]) -> dict[int, Place]:
        """Queue copies to the device arena, then wait for downloads; returns the place of each part."""
        memory, dispatch = self._memory, self._memory.dispatch
        if dispatch is None:
            return {}
        places: dict[int, Place] = {}
        device_copies: list[tuple[DeviceTensor, int]] = []
        base = memory.device.arena.address if memory.device is not None and memory.device.arena is not None else 0
        for index, place in device_places.items():
            dispatch.written_blocks.add(place.key)
            # The upload may still read an array when the node's next call writes it.
            copies = copies_of_aliased([leaf for leaf, _ in device[index].parts(place) if leaf.tensor is None], memory)
            for leaf, at in device[index].parts(place):
                places[id(leaf)] = at
                if leaf.tensor is not None:
                    device_copies.append((leaf.tensor, base + at.offset))
                else:
                    dispatch.upload(copies.get(id(leaf), leaf.array), base + at.offset)
            memory.copied_bytes += place.size_bytes
        dispatch.copy_within(device_copies)
        dispatch.wait_downloads()  # last, so that copies within the device are not waited for
        return places


def with_ready_event(
    results: Sequence[ItemResult | Failure], own: set[Key], ready: Place
) -> tuple[ItemResult | Failure, ...]:
    """Return results with the ready event set on tensors in the blocks `own`, which are still being written."""

    def mark(value: Value) -> Value:
        if value.items is not None:
            return msgspec.structs.replace(value, items=tuple(map(mark, value.items)))
        if value.device_place is None or value.device_place.key not in own:
            return value
        return msgspec.structs.replace(value, ready=ready)

    return tuple(ItemResult(tuple(map(mark, one.outputs))) if isinstance(one, ItemResult) else one for one in results)


def _matching(layouts: Mapping[int, Layout], host_buffers: Mapping[int, Place]) -> tuple[dict[int, Place], list[int]]:
    """Return the buffers of the right size, and the outputs without one."""
    if not host_buffers:
        return {}, list(layouts)
    found = {index: host_buffers[index] for index in layouts if index in host_buffers}
    found = {index: place for index, place in found.items() if place.size_bytes == layouts[index].size_bytes}
    return found, [index for index in layouts if index not in found]


def _of_blocks(indexes: Sequence[int], blocks: Sequence[Block], sizes: Sequence[int]) -> dict[int, Place]:
    return {index: block.place(0, size) for index, block, size in zip(indexes, blocks, sizes, strict=True)}


def _placed(value: Source, host: Mapping[int, Place], device: Mapping[int, Place]) -> Source:
    """Return a placed value, with its elements if it is a list."""
    if isinstance(value, Value):
        return value
    if value.items is not None:
        items = (_placed(item, host, device) for item in value.items)
        return Value(value.kind, items=tuple(items))  # type: ignore[arg-type]
    if not value.size_bytes:
        return value.inline()
    placed = value.placed
    device_place = device.get(id(value)) if placed is None else placed.device_place
    ready = None if placed is None else placed.ready
    return Value(value.kind, value.dtype, value.shape, None, host.get(id(value)), None, device_place, ready)


def _collect_small(value: Source, small: list[Packed]) -> None:
    """Collect the device tensors that travel inside the message."""
    if isinstance(value, Packed) and value.travels_inline:
        small.extend(leaf for leaf in value.leaves() if leaf.tensor is not None)


def _downloaded(small: Sequence[Packed], dispatch: DeviceDispatch) -> dict[int, Packed]:
    """Return device tensors as arrays, by identity; waits once for all downloads."""
    starts, size = [], 0
    for leaf in small:
        starts.append(size)
        size += leaf.size_bytes
    staged = np.empty(size, np.uint8)
    pairs = [(leaf.tensor, staged.ctypes.data + start) for leaf, start in zip(small, starts) if leaf.tensor is not None]
    dispatch.download(pairs, [leaf.placed for leaf in small if leaf.placed is not None])
    dispatch.wait_downloads()
    found = {}
    for leaf, start in zip(small, starts):
        raw = staged[start : start + leaf.size_bytes]
        array = np.frombuffer(raw.tobytes(), numpy_dtype(leaf.dtype)).reshape(leaf.shape)
        found[id(leaf)] = Packed(leaf.kind, leaf.dtype, leaf.shape, array)
    return found


def _with_arrays(value: Source, arrays: Mapping[int, Packed]) -> Source:
    if not isinstance(value, Packed):
        return value
    if value.items is not None:
        return msgspec.structs.replace(value, items=tuple(_with_arrays(item, arrays) for item in value.items))
    return arrays.get(id(value), value)


def _to_result(row: Row) -> ItemResult:
    return ItemResult(tuple(value if isinstance(value, Value) else value.inline() for value in row))


Reader = Callable[[Any], Any]
"""Return a tensor of any library as a numpy array or torch tensor."""

_EXPONENTS = {"bfloat16": 0x7F80, "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F}
"""For dtypes that numpy holds as unsigned integers: the exponent bits, all set in a non-finite number."""


def is_finite(value: Any, made: Source, read: Reader | None = None) -> bool:
    """Return whether an output has neither NaN nor infinite numbers.

    made: the packed value; it has the dtype of tensors that numpy holds as integers.
    read: converts tensors; None: they are numpy arrays or torch tensors.
    """
    if made.items is not None:
        return all(is_finite(one, item, read) for one, item in zip(value, made.items, strict=True))
    if made.kind in ARRAYS:
        return _is_finite_tensor(value if read is None else read(value), made.dtype)
    return _is_finite_plain(to_json(value) if made.kind == "json" else value)


def _is_finite_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite_plain, value))
    if isinstance(value, Detections):
        return bool(np.isfinite(value.boxes).all() and np.isfinite(value.scores).all())
    return True


def _is_finite_tensor(value: Any, dtype: str) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        array, bits = np.asarray(value), _EXPONENTS.get(dtype)
        if bits is not None:
            return not bool(((array & bits) == bits).any())
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    if not (value.is_floating_point() or value.is_complex()):
        return True
    return bool((value.float() if value.element_size() == 1 else value).isfinite().all())
