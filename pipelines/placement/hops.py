"""Transfers between steps on GPUs: source and destination memory for each reader.

A tensor stays where it is when its giver's port and its reader's are near on one GPU. Otherwise it comes to host
memory, and is brought to the reader's GPU from there. What a control hands on travels from who gave it to who reads it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from weftline.nodes.ports import PortType, list_of
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.placement.transfers import Readers, can_lie_near, handed_on, one_device
from weftline.pipelines.spec.wire import Wire
from weftline.shm.device.names import is_gpu
from weftline.shm.spec import ITEM_BYTES

HOST = "host"


@dataclass(frozen=True, slots=True)
class Hop:
    """A tensor on its way to one reader.

    giver:  the output or pipeline input that it comes from.
    reader: 'step.port', or 'outputs and conditions'.
    path:   the memories that it passes through: one GPU where it stays, ('host', 'cuda:0') where it is brought there.
            A reader whose instances are on several GPUs is written 'its GPU'.
    type:   what travels: an array, or a list of them.
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
    """Return how every array comes to its readers, where either end is on a GPU, in running order."""
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


def near_wires(plan: Plan) -> Collection[tuple[str, str]]:
    """Return the inputs, as step and port, whose wires carry tensors that stay on a GPU."""
    readers = Readers(plan.steps, ())
    given: dict[Wire, set[str]] = {}  # the GPUs on which a wire's tensors may lie
    found: set[tuple[str, str]] = set()
    for step in plan.steps:
        given |= {Wire(step.name, port): {one_device(step)} for port in step.near_outputs}
        for read in step.inputs:
            onward = handed_on(step, read.port) if step.control else None
            ends = [*readers.of(onward)] if onward else [(step, read.port)]
            taken = {one_device(end[0]) for end in ends if end is not None and end[1] in end[0].near_inputs}
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
        if can_lie_near(type):
            yield Wire(None, name), type, None
    for step in plan.steps:
        for port in step.outputs if not step.control else ():
            if can_lie_near(port.type):
                yield Wire(step.name, port.name), list_of(port.type) if step.map else port.type, step


def _path(giver: Wire, step: PlannedStep | None, reader: tuple[PlannedStep, str] | None) -> tuple[str, ...] | None:
    """Return the memories on the way; None where no GPU is involved."""
    made = _place(step) if step is not None else HOST
    to = _place(reader[0]) if reader is not None else HOST
    if made == to == HOST:
        return None
    taken = reader is not None and reader[1] in reader[0].near_inputs
    kept = step is not None and giver.port in step.near_outputs
    if taken and kept and made == to:
        return (made,)
    start = (made,) if made != HOST else ()
    return (*start, HOST, to) if taken else (*start, HOST)


def _place(step: PlannedStep) -> str:
    """Return where a step's instances are: a GPU, 'its GPU' of several, or the host."""
    gpus = [device for device in dict.fromkeys(step.devices) if is_gpu(device)]
    return (gpus[0] if len(gpus) == 1 else "its GPU") if gpus else HOST
