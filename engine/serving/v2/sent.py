"""Validation and decoding of one input tensor to port values.

Whether a tensor is one item or a batch depends on its companions, so it first says what it could be (`Understood`), and
gives values when the request has decided. Every number in it is held against the bytes there are, in Python's unbounded
integers, before anything is made of it.

Dense tensors in a region stay there: the value is a PendingTensor, which is read once, into its place. BYTES, small
tensors and booleans (any byte of which could be something else than 0 or 1) are copied out first and then looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weftline.engine.protocol.packed import Packed, PendingTensor
from weftline.engine.protocol.values import LIST_ITEMS_MAX
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.face import PortFace
from weftline.engine.serving.regions import Regions
from weftline.engine.serving.v2 import bytes_tensor
from weftline.engine.serving.v2.datatypes import BYTES, DTYPES, NUMPY, array_of, number_of
from weftline.engine.serving.v2.element import value_of
from weftline.engine.serving.v2.forms import Numbers, ValueForm, form_of
from weftline.engine.serving.v2.nouns import Tensor
from weftline.errors import InputError
from weftline.nodes.values import fits
from weftline.shm.spec import TensorSpec, byte_size

PENDING_BYTES_MIN = 16 << 10
"""From this size on a tensor in a region is read straight into its place; smaller ones are copied out at once."""

WHOLE = -1
"""What `take` is given for a tensor that is one item."""


@dataclass(slots=True)
class Understood:
    """What a tensor can be.

    item:  the value of one item.
    batch: of so many items, each with a value of its own; None: it cannot be a batch.
    take:  returns the value of an item of the batch by its place, of the one item for WHOLE; InputError when its
           contents are wrong.
    """

    item: bool
    batch: int | None
    take: Callable[[int], Any]


def understand(tensor: Tensor, port: PortFace, limits: ServeLimits, regions: Regions | None) -> Understood:
    """Return what a tensor for `port` can be; InputError, which names the input, when it can be nothing."""
    form = form_of(port.type)
    try:
        if (tensor.raw is not None) + (tensor.values is not None) + (tensor.region is not None) != 1:
            raise InputError("expected its data in one way: raw, typed, or in shared memory")
        if tensor.datatype == BYTES and form.element:
            return _elements(tensor, form, port, limits, regions)
        numbers = form.numbers
        if tensor.datatype not in DTYPES and tensor.datatype != BYTES:
            raise InputError(f"unknown datatype {tensor.datatype!r:.40}; known: {', '.join(DTYPES)}, {BYTES}")
        if tensor.datatype == BYTES or numbers is None or numbers.datatype not in (None, tensor.datatype):
            raise InputError(f"found {tensor.datatype}, expected {form}")
        return _dense(tensor, numbers, port, limits, regions)
    except InputError as error:
        raise InputError(f"input {port.name}: {error}") from None


def _elements(
    tensor: Tensor, form: ValueForm, port: PortFace, limits: ServeLimits, regions: Regions | None
) -> Understood:
    shape = tensor.shape
    count = byte_size("uint8", shape)
    count_max = min(limits.elements_max, LIST_ITEMS_MAX)  # no longer list may travel, so none need be taken apart
    if count > count_max:
        raise InputError(f"found {count} elements, expected at most {count_max}")
    rank = len(shape)
    each = 1
    if form.listed:
        item, batch = rank == 1, shape[0] if rank == 2 else None
        each = shape[-1] if shape else 1
    else:
        item = rank == 0 or (rank == 1 and (shape[0] == 1 or port.type == "any"))
        batch = shape[0] if rank == 1 or (rank == 2 and shape[1] == 1) else None
    if not item and batch is None:
        raise InputError(f"found {BYTES} {list(shape)}, expected {form}, or one dimension more in front for a batch")
    elements: Sequence[object]
    if tensor.values is not None:
        elements = tensor.values
        if len(elements) != count:
            raise InputError(f"found {len(elements)} elements, expected {count} for shape {list(shape)}")
    else:
        elements = bytes_tensor.decode(bytes_of(tensor, regions), count)

    def take(place: int) -> Any:
        part = elements if place == WHOLE else elements[place * each : (place + 1) * each]
        listed = form.listed or len(part) != 1
        try:
            values = [value_of(form.element, one, port.type) for one in part]
        except InputError as error:
            raise InputError(f"input {port.name}: {error}") from None
        if listed and values and all(isinstance(one, Packed) for one in values):
            return Packed("list", items=tuple(values))
        return values if listed else values[0]

    return Understood(item, batch, take)


def _dense(
    tensor: Tensor, numbers: Numbers, port: PortFace, limits: ServeLimits, regions: Regions | None
) -> Understood:
    shape, datatype = tensor.shape, tensor.datatype
    size = byte_size(DTYPES[datatype], shape)
    rank = len(shape)
    if numbers.scalar:
        item = rank == 0 or shape == (1,)
        batch = shape[0] if rank == 1 or (rank == 2 and shape[1] == 1) else None
    elif numbers.dims is None:
        lists = 1 if numbers.listed else 0
        item, batch = rank >= lists, shape[0] if rank > lists else None
    else:
        item = fits(numbers.dims, shape)
        batch = shape[0] if rank and fits(numbers.dims, shape[1:]) else None
    if not item and batch is None:
        raise InputError(
            f"found {datatype} {list(shape)}, expected {form_of(port.type)}, or one dimension more in front for a batch"
        )
    dtype = numbers.dtype or DTYPES[datatype]
    if dtype == "complex64":
        shape = shape[:-1]
    region = tensor.region
    if region is not None and region.size_bytes != size:
        raise InputError(f"found {region.size_bytes} bytes, expected {size} for {datatype} {list(tensor.shape)}")
    plain = port.type != "any" and not (numbers.listed or numbers.scalar) and dtype != "bool"
    if region is not None and size >= PENDING_BYTES_MIN and plain and form_of(port.type).element == "":
        return Understood(item, batch, _pending(tensor, dtype, shape, _known(regions)))
    array = _array(tensor, size, limits, regions).view(NUMPY[datatype])
    if datatype == "BOOL" and array.size and int(array.view(np.uint8).max()) > 1:
        raise InputError("found bytes other than 0 and 1 in a BOOL tensor")
    if dtype == "complex64":
        array = array.view(np.complex64)
    array = array.reshape(shape)

    def take(place: int) -> Any:
        part = array if place == WHOLE else array[place, ...]
        if numbers.scalar:
            try:
                return number_of(datatype, part.reshape(-1))
            except InputError as error:
                raise InputError(f"input {port.name}: {error}") from None
        return [part[one, ...] for one in range(len(part))] if numbers.listed else part

    return Understood(item, batch, take)


def _array(tensor: Tensor, size: int, limits: ServeLimits, regions: Regions | None) -> np.ndarray:
    """Return a dense tensor's bytes as a flat array, not copied where they were sent raw."""
    if tensor.values is not None:
        count = byte_size("uint8", tensor.shape)
        if len(tensor.values) != count:
            raise InputError(f"found {len(tensor.values)} elements, expected {count} for shape {list(tensor.shape)}")
        if count > limits.elements_max:
            raise InputError(
                f"found {count} elements one by one, expected at most {limits.elements_max}; send them raw"
            )
        return array_of(tensor.datatype, tensor.values)
    if tensor.raw is not None and len(tensor.raw) != size:
        shape = list(tensor.shape)
        raise InputError(f"found {len(tensor.raw)} bytes, expected {size} for {tensor.datatype} {shape}")
    return np.frombuffer(bytes_of(tensor, regions), np.uint8)


def bytes_of(tensor: Tensor, regions: Regions | None) -> bytes | bytearray | memoryview:
    """Return the bytes of a tensor; those in a region copied out of it, so that nobody changes them any more."""
    if tensor.region is None:
        return b"" if tensor.raw is None else tensor.raw
    held = _known(regions)
    held.check(tensor.region.name, tensor.region.offset, tensor.region.size_bytes)
    buffer = bytearray(tensor.region.size_bytes)
    held.read_into(tensor.region.name, tensor.region.offset, memoryview(buffer))
    return buffer


def _pending(tensor: Tensor, dtype: str, shape: tuple[int, ...], regions: Regions) -> Callable[[int], PendingTensor]:
    region = tensor.region
    if region is None:
        raise InputError("expected a region")
    regions.check(region.name, region.offset, region.size_bytes)
    name, offset = region.name, region.offset

    def take(place: int) -> PendingTensor:
        spec = TensorSpec(dtype, shape if place == WHOLE else shape[1:])
        return PendingTensor(spec, partial(regions.read_into, name, offset + max(place, 0) * spec.size_bytes))

    return take


def _known(regions: Regions | None) -> Regions:
    if regions is None:
        raise InputError("found a shared-memory region, and this server shares no memory; send the data itself")
    return regions
