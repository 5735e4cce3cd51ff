"""Selection of tensors that stay on a GPU between steps and tensors copied to host memory.

An input is *near* when its node takes the port on its device (`Node.device_ports`) and every instance of its step is on
a GPU: whatever comes is given to it there. An output is kept near where somebody reads it on the very device it is made
on: alone there when all readers do ('device'), in host memory too when others read it as well ('both'). Conditions and
pipeline outputs read in host memory. What a control or a fallback hands on is read by whoever reads that.

Streams travel in host memory, and so does what is padded: both are cut and joined there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from weftline.nodes.control import BY, VALUE
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.spec.wire import Wire
from weftline.shm.device.names import is_gpu

KINDS = ("tensor", "image", "audio")
"""What is made of one array, and so can lie on a device."""


def with_transfers(plan: Plan, ports: Mapping[str, frozenset[str]], arena_bytes: int) -> Plan:
    """Return the plan with on-device inputs and outputs of every step, and device arenas for their writers.

    ports:       by step, the names of the ports that its node takes and gives on its device.
    arena_bytes: size of a process's arena on its device.
    """
    steps = [dataclasses.replace(step, near_inputs=_near_inputs(step, ports)) for step in plan.steps]
    readers = Readers(steps, [one.wire for one in plan.outputs])
    steps = [dataclasses.replace(step, near_outputs=_near_outputs(step, ports, readers)) for step in steps]
    givers = {index for step in steps if step.near_outputs for index in step.workers}
    workers = [
        dataclasses.replace(worker, device_arena_bytes=arena_bytes if index in givers else 0)
        for index, worker in enumerate(plan.workers)
    ]
    return dataclasses.replace(plan, steps=tuple(steps), workers=tuple(workers))


def near_edges(steps: Sequence[PlannedStep], ports: Mapping[str, frozenset[str]]) -> frozenset[tuple[str, str]]:
    """Return pairs of steps, giver and reader, whose tensors stay on a device that both are on.

    steps: all of a plan; where they are is not looked at.
    """
    readers = Readers(steps, ())
    return frozenset(
        (step.name, reader[0].name)
        for step in steps
        for port in step.outputs
        if port.name in _ports(step, ports) and can_lie_near(port.type)
        for reader in readers.of(Wire(step.name, port.name))
        if reader is not None and reader[1] in _ports(reader[0], ports)
    )


def can_lie_near(type: PortType) -> bool:
    """Return True for types that are arrays or lists of arrays."""
    return can_lie_near(type.item) if type.item is not None else type.kind in KINDS


def one_device(step: PlannedStep) -> str:
    """Return the GPU that all instances of a step are on; '' when there is none, or several."""
    device = step.devices[0] if step.devices else ""
    return device if is_gpu(device) and {*step.devices} == {device} else ""


def handed_on(control: PlannedStep, port: str) -> Wire | None:
    """Return the output on which a control hands on what comes in at `port`; None for what a switch decides by."""
    if control.control == "switch" and port == BY:
        return None
    return Wire(control.name, port if control.control == "passes" else VALUE)


class Readers:
    """Final readers of an output: controls and fallbacks are passed through.

    steps:   all of a plan, with their near inputs.
    outputs: wires that are read in host memory: the pipeline's outputs.
    """

    def __init__(self, steps: Sequence[PlannedStep], outputs: Sequence[Wire]) -> None:
        self._inputs: dict[Wire, list[tuple[PlannedStep, str]]] = {}
        self._host = {*outputs, *(wire for step in steps for wire in (step.when.wires if step.when else ()))}
        self._answers_for = {step.fallback: step.name for step in steps if step.fallback}
        for step in steps:
            for read in step.inputs:
                self._inputs.setdefault(read.wire, []).append((step, read.port))

    def of(self, wire: Wire) -> Iterator[tuple[PlannedStep, str] | None]:
        """Yield step and port of every reader of an output or an input; None for one outside of the steps."""
        yield from self._of(wire, set())

    def _of(self, wire: Wire, seen: set[Wire]) -> Iterator[tuple[PlannedStep, str] | None]:
        if wire in seen:  # two ways through controls lead to the same readers
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
        if wire.step in self._answers_for:
            yield from self._of(Wire(self._answers_for[wire.step], wire.port), seen)


def _near_inputs(step: PlannedStep, ports: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    on_gpus = bool(step.devices) and all(is_gpu(device) for device in step.devices)
    taken = _ports(step, ports) if on_gpus else frozenset()
    return tuple(read.port for read in step.inputs if read.port in taken and can_lie_near(read.type))


def _ports(step: PlannedStep, ports: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the ports that a step takes and gives on a device, when it is on one."""
    elsewhere = step.control or step.streams or step.batch.pad
    return frozenset() if elsewhere else ports.get(step.name, frozenset())


def _near_outputs(step: PlannedStep, ports: Mapping[str, frozenset[str]], readers: Readers) -> dict[str, str]:
    device = one_device(step)
    given = _ports(step, ports) if device else frozenset()
    found: dict[str, str] = {}
    for port in step.outputs:
        if port.name in given and can_lie_near(port.type):
            near = [_reads_near(reader, device) for reader in readers.of(Wire(step.name, port.name))]
            if any(near):
                found[port.name] = "device" if all(near) else "both"
    return found


def _reads_near(reader: tuple[PlannedStep, str] | None, device: str) -> bool:
    return reader is not None and reader[1] in reader[0].near_inputs and one_device(reader[0]) == device
