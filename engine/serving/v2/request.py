"""Conversion of a v2 request to backend requests (Ask), one for each batch item.

A request is validated against the model and the server's limits in this order: counts, names, shapes and datatypes
against the available bytes, contents. Sizes are computed in Python's unbounded integers, and nothing is allocated for a
size that was only claimed. Values are views of the received message wherever possible. `datatypes.py` has the
representations of each port type, `parameters.py` the request parameters.

Batches. Port types describe one item, so the batch dimension is an extra one, in front:

    every input can be one item             one item; the response's tensors have the shapes of the ports
    else, every input can be a batch of N   N concurrent items; the response's tensors have N in front, and text, JSON
                                            and the like are BYTES [N, 1]
    anything else                           InputError

A tensor is one item if it has the port's shape, and a batch if it has one dimension more in front. BYTES of a port
whose values are single elements (text, json, bytes, encoded media) is one item as [] or [1], and a batch of N as [N] or
[N, 1]. So [1] is both, and the other inputs decide: text [1] beside an image [1, H, W, 3] is a batch of one, and text
[1] alone is one item. [1, 1] is a batch of one. Where both are possible for all inputs (a port for tensors of any
shape, or text as [1]), it is one item. A request of a sequence is one item, or a batch of one.

Shared memory. A dense tensor in a region stays there: the value is a PendingTensor, read once, into an arena. BYTES,
small tensors and booleans (whose bytes could be other than 0 and 1) are copied first and then validated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from weftline.engine.protocol.packed import Packed, PendingTensor
from weftline.engine.protocol.values import LIST_ITEMS_MAX
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.engine.serving.regions import Regions
from weftline.engine.serving.v2.classification import check_classes
from weftline.engine.serving.v2.datatypes import (
    BYTES,
    DTYPES,
    NUMPY,
    Numbers,
    ValueForm,
    array_of,
    form_of,
    number_of,
)
from weftline.engine.serving.v2.elements import JSON, decode_elements, value_of
from weftline.engine.serving.v2.messages import InferRequest, Region, Tensor, WantedOutput, check_version
from weftline.engine.serving.v2.parameters import (
    ID_CHARS_MAX,
    RequestParameters,
    check_sizes,
    read_parameters,
    shorter_deadline,
)
from weftline.errors import InputError, LimitReached
from weftline.nodes.values import fits
from weftline.shm.spec import TensorSpec, byte_size

PENDING_BYTES_MIN = 16 << 10
"""Size from which a tensor in a region becomes a PendingTensor; smaller ones are copied at once."""

Raw = bytes | bytearray | memoryview

T = TypeVar("T")

WHOLE = -1
"""Position of a tensor that is one item, without a batch dimension."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The backend requests of a v2 request.

    asks:        one, or one for each item of the batch.
    batch:       batch size; None: no batch, and no batch dimension in the response.
    empty_final: its stream ends with a separate response without outputs.
    """

    asks: tuple[Ask, ...]
    batch: int | None = None
    empty_final: bool = False

    def cost(self, info: ModelInfo) -> int:
        """Return as how many requests this one counts in the rate of its token."""
        return sum(info.cost(one.inputs) for one in self.asks)


def to_asks(
    request: InferRequest,
    info: ModelInfo,
    limits: ServeLimits,
    regions: Regions | None = None,
    *,
    deadline_ms: float | None = None,
    caller: str = "",
    protocol: str = "",
    traceparent: str = "",
    size_bytes: int = 0,
) -> ParsedRequest:
    """Convert a request; InputError if it is invalid, LimitReached if it exceeds a total.

    info:        metadata of the request's model.
    regions:     registered shared memory; None: not available.
    deadline_ms: time left of the call; the request's own `timeout` may be shorter.
    The other arguments are copied into every Ask.
    """
    plan = plan_request(request, info, limits, regions)
    contents = plan.contents(request.inputs, limits, regions)
    deadline_ms = shorter_deadline(plan.parameters.deadline_ms, deadline_ms)
    asks = [
        plan.ask(contents, place, request.id, deadline_ms, caller, protocol, traceparent, size_bytes)
        for place in ((WHOLE,) if plan.batch is None else range(plan.batch))
    ]
    return ParsedRequest(tuple(asks), plan.batch, plan.parameters.empty_final)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The part of a conversion that depends on the model and the head of a request: not on its id and contents.

    inputs: in the order of the request's tensors.
    batch:  as in ParsedRequest.
    """

    info: ModelInfo
    inputs: tuple[InputForm, ...]
    wanted: tuple[WantedOutput, ...]
    outputs: tuple[str, ...] | None
    version: str
    parameters: RequestParameters
    batch: int | None

    def contents(self, tensors: Sequence[Tensor], limits: ServeLimits, regions: Regions | None) -> list[Any]:
        """Return the validated contents of the request's tensors; InputError names the invalid input."""
        return [
            _named(form.port, _contents, form, tensor, limits, regions)
            for form, tensor in zip(self.inputs, tensors, strict=True)
        ]

    def raw_contents(self, raws: Sequence[bytes | memoryview]) -> list[Any]:
        """As `contents`, of tensors with raw contents; without any, the tensors have no elements."""
        contents = []
        for form, raw in zip(self.inputs, raws or (b"",) * len(self.inputs), strict=True):
            try:
                contents.append(form.read(raw))
            except InputError as error:
                raise _of_input(form.port, error) from None
        return contents

    def ask(
        self,
        contents: Sequence[Any],
        place: int,
        id: str,
        deadline_ms: float | None,
        caller: str,
        protocol: str,
        traceparent: str,
        size_bytes: int,
    ) -> Ask:
        """Return the backend request of one batch item, or of the one item for WHOLE."""
        if len(id) > ID_CHARS_MAX:
            raise InputError(f"id: found {len(id)} characters, expected at most {ID_CHARS_MAX}")
        parameters = self.parameters
        inputs: dict[str, Any] = {}
        for form, part in zip(self.inputs, contents, strict=True):
            try:
                inputs[form.port] = form.value_at(part, place)
            except InputError as error:
                raise _of_input(form.port, error) from None
        return Ask(
            self.info.name,
            inputs,
            self.outputs,
            deadline_ms,
            parameters.priority,
            parameters.sequence,
            self.version,
            id,
            caller,
            protocol,
            traceparent,
            size_bytes if place <= 0 else 0,  # one message, counted once
            parameters.job,
            parameters.seed,
        )


def plan_request(request: InferRequest, info: ModelInfo, limits: ServeLimits, regions: Regions | None) -> RequestPlan:
    """Check the head of a request; errors as `to_asks`."""
    ports = check_request(request, info, limits)
    parameters = read_parameters(request.parameters)
    outputs = _outputs(request.outputs, info, regions)
    for one in request.inputs:
        if one.parameters:
            check_sizes(one.parameters, f"input {one.name}")
    inputs = tuple(_named(one.name, _form, one, ports[one.name], limits, regions) for one in request.inputs)
    batch = _batch(inputs, limits)
    if batch is not None and batch > 1 and parameters.sequence is not None:
        raise InputError(f"found a batch of {batch} in a sequence, expected one item at a time")
    return RequestPlan(info, inputs, request.outputs, outputs, request.version, parameters, batch)


def _named(name: str, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work`; an InputError then names the input."""
    try:
        return work(*arguments)
    except InputError as error:
        raise _of_input(name, error) from None


def _of_input(name: str, error: InputError) -> InputError:
    return InputError(f"input {name}: {error}")


def check_request(request: InferRequest, info: ModelInfo, limits: ServeLimits) -> Mapping[str, PortInfo]:
    """Check names, counts and the bytes in regions, before any tensor is read; errors as `to_asks`.

    Returns the model's input ports by name.
    """
    _check_counts(request, info, limits)
    names = [one.name for one in request.inputs]
    ports = {port.name: port for port in info.inputs}
    _check_names("input", names, ports, [name for name, port in ports.items() if not port.optional])
    size_bytes = sum(one.region.size_bytes for one in request.inputs if one.region is not None)
    if size_bytes > info.request_bytes_max:
        raise LimitReached(f"the inputs take {size_bytes} bytes; limits.request_bytes_max is {info.request_bytes_max}")
    return ports


def tensor_bytes(tensor: Tensor, regions: Regions | None) -> bytes | bytearray | memoryview:
    """Return the bytes of a tensor; those in a region are copied once, before validation."""
    if tensor.region is None:
        return b"" if tensor.raw is None else tensor.raw
    memory = _available(regions)
    memory.check(tensor.region.name, tensor.region.offset, tensor.region.size_bytes)
    buffer = bytearray(tensor.region.size_bytes)
    memory.read_into(tensor.region.name, tensor.region.offset, memoryview(buffer))
    return buffer


# names, counts and batch size


def _check_counts(request: InferRequest, info: ModelInfo, limits: ServeLimits) -> None:
    """Check names and counts, before any tensor."""
    if request.model != info.name:
        raise InputError("the request names another model than the one it was sent to")
    check_version(request.version)
    for what, count in (("inputs", len(request.inputs)), ("outputs", len(request.outputs))):
        if count > limits.tensors_max:
            raise InputError(f"found {count} {what}, expected at most {limits.tensors_max}")


def _outputs(wanted: Sequence[WantedOutput], info: ModelInfo, regions: Regions | None) -> tuple[str, ...] | None:
    """Return the names of the selected outputs, None for all."""
    if not wanted:
        return None
    names = tuple(one.name for one in wanted)
    ports = {port.name: port for port in info.outputs}
    _check_names("output", names, ports)
    for one in wanted:
        check_sizes(one.parameters, f"output {one.name}")
        check_classes(one, ports[one.name])
        if one.region is not None:
            if regions is None:
                raise InputError(f"output {one.name}: found a shared-memory region, and this server shares no memory")
            regions.check(one.region.name, one.region.offset, one.region.size_bytes)
    return names


def _check_names(what: str, names: Sequence[str], known: Collection[str], required: Collection[str] = ()) -> None:
    """Raise InputError if a name is unknown or occurs twice, or a required one is missing."""
    distinct = set(names)
    if distinct.issuperset(required) and distinct <= set(known) and len(distinct) == len(names):
        return
    unknown = [f"unknown: {name!r:.80}" for name in names if name not in known][:1]
    twice = [f"twice: {name!r:.80}" for name, times in Counter(names).items() if times > 1][:1]
    left = [name for name in required if name not in distinct]
    missing = [f"missing: {', '.join(left)}"] if left else []
    problems = "; ".join(unknown + twice + missing)
    raise InputError(f"{what}s {problems}; the model's {what}s are {', '.join(known) or 'none'}")


def _batch(inputs: Sequence[InputForm], limits: ServeLimits) -> int | None:
    """Return the batch size, None if the inputs are one item without a batch dimension."""
    if all(one.item for one in inputs):
        return None
    sizes = Counter(one.batch for one in inputs)
    if len(sizes) != 1 or None in sizes:
        found = ", ".join(f"{one.port} {one}" for one in inputs)
        raise InputError(f"inputs disagree on the batch: {found}; expected one item each, or equally many")
    (size,) = sizes
    if not 1 <= (size or 0) <= limits.batch_max:
        raise InputError(f"found a batch of {size}, expected 1 to {limits.batch_max} items")
    return size


# tensors


@dataclass(frozen=True, slots=True)
class InputForm:
    """A tensor whose name, datatype and shape are valid, without its contents.

    item:     it can be one item.
    batch:    its size as a batch; None: it cannot be one.
    read:     validates raw contents, and returns them decoded.
    collect:  the same for elements one by one.
    value_at: returns the value of a batch item by position, or of the one item for WHOLE, from decoded contents.
    pending:  the contents are in a region and stay there; `value_at` ignores what was decoded.
    """

    port: str
    item: bool
    batch: int | None
    read: Callable[[Raw], Any]
    collect: Callable[[tuple[object, ...]], Any]
    value_at: Callable[[Any, int], Any]
    pending: bool = False

    def __str__(self) -> str:
        readings = ["one item"] if self.item else []
        readings += [f"a batch of {self.batch}"] if self.batch is not None else []
        return "has " + " or ".join(readings)


def _form(tensor: Tensor, port: PortInfo, limits: ServeLimits, regions: Regions | None) -> InputForm:
    """Validate a tensor's datatype and shape against `port`."""
    form = form_of(port.type)
    if (tensor.raw is not None) + (tensor.values is not None) + (tensor.region is not None) != 1:
        raise InputError("expected its data in one way: raw, typed, or in shared memory")
    if tensor.datatype == BYTES and form.element:
        return _bytes_form(tensor, form, port, limits)
    numbers = form.numbers
    if tensor.datatype not in DTYPES and tensor.datatype != BYTES:
        raise InputError(f"unknown datatype {tensor.datatype!r:.40}; known: {', '.join(DTYPES)}, {BYTES}")
    if tensor.datatype == BYTES or numbers is None or numbers.datatype not in (None, tensor.datatype):
        raise InputError(f"found {tensor.datatype}, expected {form}")
    return _dense_form(tensor, numbers, port, limits, regions)


def _contents(form: InputForm, tensor: Tensor, limits: ServeLimits, regions: Regions | None) -> Any:
    """Return the validated contents of a tensor."""
    if form.pending:
        return None
    if tensor.values is None:
        return form.read(tensor_bytes(tensor, regions))
    return form.collect(tensor.values)


def _bytes_form(tensor: Tensor, form: ValueForm, port: PortInfo, limits: ServeLimits) -> InputForm:
    shape = tensor.shape
    count = byte_size("uint8", shape)
    count_max = min(limits.elements_max, LIST_ITEMS_MAX)  # a longer list would be refused later
    if count > count_max:
        raise InputError(f"found {count} elements, expected at most {count_max}")
    rank = len(shape)
    per_item = 1
    kind = JSON if port.type == "any" and tensor.parameters.get(JSON) is True else form.element
    if form.listed:
        item, batch = rank == 1, shape[0] if rank == 2 else None
        per_item = shape[-1] if shape else 1
    else:
        item = rank == 0 or (rank == 1 and (shape[0] == 1 or port.type == "any"))
        batch = shape[0] if rank == 1 or (rank == 2 and shape[1] == 1) else None
    if not item and batch is None:
        raise InputError(f"found {BYTES} {list(shape)}, expected {form}, or one dimension more in front for a batch")

    def read(raw: Raw) -> Sequence[object]:
        return decode_elements(raw, count)

    def collect(elements: tuple[object, ...]) -> Sequence[object]:
        if len(elements) != count:
            raise InputError(f"found {len(elements)} elements, expected {count} for shape {list(shape)}")
        return elements

    def value_at(elements: Sequence[object], place: int) -> Any:
        part = elements if place == WHOLE else elements[place * per_item : (place + 1) * per_item]
        listed = form.listed or len(part) != 1
        values = [value_of(kind, one, port.type) for one in part]
        if listed and values and all(isinstance(one, Packed) for one in values):
            return Packed("list", items=tuple(values))
        return values if listed else values[0]

    return InputForm(port.name, item, batch, read, collect, value_at)


def _dense_form(
    tensor: Tensor, numbers: Numbers, port: PortInfo, limits: ServeLimits, regions: Regions | None
) -> InputForm:
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
    held = np.dtype(np.complex64) if dtype == "complex64" else NUMPY[datatype]
    dims = tensor.shape

    def read(raw: Raw) -> np.ndarray:
        if len(raw) != size:
            raise InputError(f"found {len(raw)} bytes, expected {size} for {datatype} {list(dims)}")
        array = np.frombuffer(raw, held).reshape(shape)
        if datatype == "BOOL" and array.size and int(array.view(np.uint8).max()) > 1:
            raise InputError("found bytes other than 0 and 1 in a BOOL tensor")
        return array

    def collect(elements: tuple[object, ...]) -> np.ndarray:
        count = byte_size("uint8", dims)
        if len(elements) != count:
            raise InputError(f"found {len(elements)} elements, expected {count} for shape {list(dims)}")
        if count > limits.elements_max:
            raise InputError(
                f"found {count} elements one by one, expected at most {limits.elements_max}; send them raw"
            )
        return array_of(datatype, elements).view(held).reshape(shape)

    def value_at(array: np.ndarray, place: int) -> Any:
        part = array if place == WHOLE else array[place, ...]
        if numbers.scalar:
            return number_of(datatype, part.reshape(-1))
        return [part[one, ...] for one in range(len(part))] if numbers.listed else part

    if region is not None and size >= PENDING_BYTES_MIN and plain and form_of(port.type).element == "":
        pending = _pending(region, dtype, shape, _available(regions))
        return InputForm(port.name, item, batch, read, collect, pending, True)
    return InputForm(port.name, item, batch, read, collect, value_at)


def _pending(
    region: Region, dtype: str, shape: tuple[int, ...], regions: Regions
) -> Callable[[Any, int], PendingTensor]:
    regions.check(region.name, region.offset, region.size_bytes)
    name, offset = region.name, region.offset

    def value_at(contents: None, place: int) -> PendingTensor:
        spec = TensorSpec(dtype, shape if place == WHOLE else shape[1:])
        return PendingTensor(spec, partial(regions.read_into, name, offset + max(place, 0) * spec.size_bytes))

    return value_at


def _available(regions: Regions | None) -> Regions:
    if regions is None:
        raise InputError("found a shared-memory region, and this server shares no memory; send the data itself")
    return regions
