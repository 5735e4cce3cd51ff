"""Transfers: tensors that stay on a GPU between steps, and tensors copied through host memory.

An input is *on the device* when its node accepts the port there (`Node.device_ports`) and every instance of its step is
on a GPU. An output is kept on its device when a reader reads it there: only there when all readers do ('device'), in
host memory too when others read it as well ('both'). Conditions and pipeline outputs read host memory. The readers of a
control step or of a fallback count as readers of its input.

Streams travel in host memory, and so do padded tensors: both are split and joined there. A tensor that is not kept on
the device is copied to host memory, and from there to the reader's GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weftline.nodes.control import BY, VALUE
from weftline.nodes.ports import PortType, list_of
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.spec.wire import Wire
from weftline.shm.device.names import is_gpu
from weftline.shm.spec import ITEM_BYTES

KINDS = ("tensor", "image", "audio")
"""Port kinds that are one array, which can be in device memory."""


def with_transfers(plan: Plan, ports: Mapping[str, frozenset[str]], arena_bytes: int) -> Plan:
    """Return the plan with on-device inputs and outputs of every step, and device arenas for their writers.

    ports:       by step, the ports in `Node.device_ports`.
    arena_bytes: size of a process's arena on its device.
    """
    steps = [dataclasses.replace(step, device_inputs=_device_inputs(step, ports)) for step in plan.steps]
    readers = Readers(steps, [one.wire for one in plan.outputs])
    steps = [dataclasses.replace(step, device_outputs=_device_outputs(step, ports, readers)) for step in steps]
    return with_device_arenas(dataclasses.replace(plan, steps=tuple(steps)), arena_bytes)


def with_device_arenas(plan: Plan, arena_bytes: int) -> Plan:
    """Return the plan with device arenas for the processes whose outputs are read on their device, and for no other."""
    writers = {index for step in plan.steps if step.device_outputs for index in step.workers}
    workers = [
        dataclasses.replace(worker, device_arena_bytes=arena_bytes if index in writers else 0)
        for index, worker in enumerate(plan.workers)
    ]
    return dataclasses.replace(plan, workers=tuple(workers))


def device_edges(steps: Sequence[PlannedStep], ports: Mapping[str, frozenset[str]]) -> frozenset[tuple[str, str]]:
    """Return pairs of steps, writer and reader, whose tensors can stay on a common device.

    steps: all of a plan; their placement is ignored.
    """
    readers = Readers(steps, ())
    return frozenset(
        (step.name, reader[0].name)
        for step in steps
        for port in step.outputs
        if port.name in _ports(step, ports) and can_be_on_device(port.type)
        for reader in readers.of(Wire(step.name, port.name))
        if reader is not None and reader[1] in _ports(reader[0], ports)
    )


def can_be_on_device(type: PortType) -> bool:
    """Return True for types that are arrays or lists of arrays."""
    return can_be_on_device(type.item) if type.item is not None else type.kind in KINDS


def one_device(step: PlannedStep) -> str:
    """Return the common GPU of all instances of a step; '' if there is none."""
    device = step.devices[0] if step.devices else ""
    return device if is_gpu(device) and {*step.devices} == {device} else ""


def handed_on(control: PlannedStep, port: str) -> Wire | None:
    """Return the output on which a control step passes on `port`; None for the `by` input of a switch."""
    if control.control == "switch" and port == BY:
        return None
    return Wire(control.name, port if control.control == "passes" else VALUE)


class Readers:
    """Final readers of an output: control steps and fallbacks are passed through.

    steps:   all of a plan, with their device inputs.
    outputs: wires of the pipeline's outputs, which are read in host memory.
    """

    def __init__(self, steps: Sequence[PlannedStep], outputs: Sequence[Wire]) -> None:
        self._inputs: dict[Wire, list[tuple[PlannedStep, str]]] = {}
        self._host = {*outputs, *(wire for step in steps for wire in (step.when.wires if step.when else ()))}
        self._replaces = {step.fallback: step.name for step in steps if step.fallback}
        for step in steps:
            for read in step.inputs:
                self._inputs.setdefault(read.wire, []).append((step, read.port))

    def of(self, wire: Wire) -> Iterator[tuple[PlannedStep, str] | None]:
        """Yield step and port of every reader of a wire; None for a reader in host memory."""
        yield from self._of(wire, set())

    def _of(self, wire: Wire, seen: set[Wire]) -> Iterator[tuple[PlannedStep, str] | None]:
        if wire in seen:  # two paths through control steps lead to the same readers
            return
        seen.add(wire)
        if wire in self._host:
            yield None
        for step, port in self._inputs.get(wire, ()):
            if not step.control:
                yield step, port
            elif onward := handed_on(step, port):
                yield from self._of(onward, seen)
            else:
                yield None
        if wire.step in self._replaces:
            yield from self._of(Wire(self._replaces[wire.step], wire.port), seen)


def _device_inputs(step: PlannedStep, ports: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    on_gpus = bool(step.devices) and all(is_gpu(device) for device in step.devices)
    taken = _ports(step, ports) if on_gpus else frozenset()
    return tuple(read.port for read in step.inputs if read.port in taken and can_be_on_device(read.type))


def _ports(step: PlannedStep, ports: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the ports that a step reads and writes on its device."""
    elsewhere = step.control or step.streams or step.batch.pad
    return frozenset() if elsewhere else ports.get(step.name, frozenset())


def _device_outputs(step: PlannedStep, ports: Mapping[str, frozenset[str]], readers: Readers) -> dict[str, str]:
    device = one_device(step)
    given = _ports(step, ports) if device else frozenset()
    found: dict[str, str] = {}
    for port in step.outputs:
        if port.name in given and can_be_on_device(port.type):
            reads = [_reads_on_device(reader, device) for reader in readers.of(Wire(step.name, port.name))]
            if any(reads):
                found[port.name] = "device" if all(reads) else "both"
    return found


def _reads_on_device(reader: tuple[PlannedStep, str] | None, device: str) -> bool:
    return reader is not None and reader[1] in reader[0].device_inputs and one_device(reader[0]) == device


HOST = "host"


@dataclass(frozen=True, slots=True)
class Hop:
    """The path of a tensor to one reader.

    giver:  the output or pipeline input that it comes from.
    reader: 'step.port', or 'outputs and conditions'.
    path:   the memories on the path: one GPU where it stays, ('host', 'cuda:0') where it is copied there.
            A reader whose instances are on several GPUs is written 'its GPU'.
    type:   an array, or a list of arrays.
    """

    giver: Wire
    reader: str
    path: tuple[str, ...]
    type: PortType

    @property
    def stays(self) -> bool:
        """Return True when the transfer never touches host memory."""
        return self.path != (HOST,) and len(self.path) == 1


def hops(plan: Plan) -> tuple[Hop, ...]:
    """Return the path of every array with an end on a GPU, for each reader, in running order."""
    readers = Readers(plan.steps, [one.wire for one in plan.outputs])
    hidden = {one.name for one in plan.inputs if one.hidden}
    found: dict[tuple[Wire, str], Hop] = {}
    for giver, type, step in _given(plan):
        if step is None and giver.port in hidden:
            continue
        for reader in readers.of(giver):
            name = "outputs and conditions" if reader is None else f"{reader[0].name}.{reader[1]}"
            path = _path(giver, step, reader)
            if path is not None:
                found.setdefault((giver, name), Hop(giver, name, path, type))
    return tuple(found.values())


def hop_rows(plan: Plan) -> list[list[list[str]]]:
    """Return a row for each array transfer that involves a GPU: ends, path and size."""
    rows = []
    for hop in hops(plan):
        where = f"stays on {hop.path[0]}" if hop.stays else " -> ".join(hop.path)
        size = size_of(hop.type)
        each = " each" if hop.type.item is not None else ""
        rows.append(
            [
                [str(hop.giver)],
                [f"-> {hop.reader}"],
                [where],
                [f"{size_text(size)}{each}" if size else "size by request"],
            ]
        )
    return rows


def device_wires(plan: Plan) -> Collection[tuple[str, str]]:
    """Return the inputs, as step and port, whose wires carry tensors that stay on a GPU."""
    readers = Readers(plan.steps, ())
    given: dict[Wire, set[str]] = {}  # the GPUs that may hold a wire's tensors
    found: set[tuple[str, str]] = set()
    for step in plan.steps:
        given |= {Wire(step.name, port): {one_device(step)} for port in step.device_outputs}
        for read in step.inputs:
            onward = handed_on(step, read.port) if step.control else None
            ends = [*readers.of(onward)] if onward else [(step, read.port)]
            taken = {one_device(end[0]) for end in ends if end is not None and end[1] in end[0].device_inputs}
            if stays := given.get(read.wire, set()) & taken:
                found.add((step.name, read.port))
                if onward:
                    given[onward] = given.get(onward, set()) | stays
    return found


def size_of(type: PortType) -> int | None:
    """Return the bytes of one array of a type; None when they depend on the request."""
    if type.item is not None:
        return size_of(type.item)
    if type.kind != "tensor" or type.dtype is None or type.dims is None:
        return None
    sizes = [dim for dim in type.dims if isinstance(dim, int)]
    return math.prod(sizes) * ITEM_BYTES[type.dtype] if len(sizes) == len(type.dims) else None


def _given(plan: Plan) -> Iterator[tuple[Wire, PortType, PlannedStep | None]]:
    """Yield every array output: its wire, its type, and the step; None for an input."""
    for name, type in plan.input_types.items():
        if can_be_on_device(type):
            yield Wire(None, name), type, None
    for step in plan.steps:
        for port in step.outputs if not step.control else ():
            if can_be_on_device(port.type):
                yield Wire(step.name, port.name), list_of(port.type) if step.map else port.type, step


def _path(giver: Wire, step: PlannedStep | None, reader: tuple[PlannedStep, str] | None) -> tuple[str, ...] | None:
    """Return the memories on the path; None if no GPU is involved."""
    made = _place(step) if step is not None else HOST
    to = _place(reader[0]) if reader is not None else HOST
    if made == to == HOST:
        return None
    taken = reader is not None and reader[1] in reader[0].device_inputs
    kept = step is not None and giver.port in step.device_outputs
    if taken and kept and made == to:
        return (made,)
    start = (made,) if made != HOST else ()
    return (*start, HOST, to) if taken else (*start, HOST)


def _place(step: PlannedStep) -> str:
    """Return the memory of a step's instances: a GPU, 'its GPU' of several, or the host."""
    gpus = [device for device in dict.fromkeys(step.devices) if is_gpu(device)]
    return (gpus[0] if len(gpus) == 1 else "its GPU") if gpus else HOST
