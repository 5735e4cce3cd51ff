"""Result of a check: node, options and ports of every step, and the types of the wires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weftline.errors import Problem
from weftline.nodes.contract import Node
from weftline.nodes.control import Control
from weftline.nodes.ports import Port, Ports, PortType, list_of
from weftline.pipelines.check.ports import Sizes, loose
from weftline.pipelines.check.problem_collector import Origin
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.inlining import Constraint
from weftline.pipelines.spec.wire import Wire


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step with its node class, the dotted path to it, its Config and its ports.

    device_ports: names of the ports whose tensors its node takes and gives on its device.
    """

    step: Step
    node: type[Node]
    reference: str
    config: Any
    ports: Ports
    device_ports: frozenset[str] = frozenset()

    @property
    def control(self) -> str:
        """Control decision of the scheduler for this step; '' for a step that a worker runs."""
        return self.node.control if issubclass(self.node, Control) else ""

    def takes(self, port: str) -> PortType | None:
        """Return the type that an input takes from its wire: under `map:`, a list; None for a port it does not have."""
        found = self.ports.input(port)
        if found is None:
            return None
        return list_of(loose(found.type)) if port in self.step.map else found.type

    def does_without(self, port: Port) -> bool:
        """Return True when the step runs without this input. The list of a `map:` is always required."""
        return port.optional and port.name not in self.step.map


@dataclass(frozen=True, slots=True)
class Checked:
    """Results of a check.

    pipeline: as written, with prompts and constants made steps of their own, and names in conditions resolved.
    steps:    those whose node and options are sound, in run order; all of them when there are no problems.
    sizes:    what the wires say about named dims.
    origins, constraints: as in Expansion.
    constants: the types that constants are taken as, where what reads them wants another than `text` or `json`.
    """

    pipeline: Pipeline
    steps: Mapping[str, CheckedStep]
    sizes: Sizes
    problems: tuple[Problem, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()
    constants: dict[Wire, PortType] = field(default_factory=dict)

    def source(self, wire: Wire) -> tuple[PortType, str] | None:
        """Return the type a wire gives and the scope of its names; None when it leads nowhere.

        A step under `map:` gives lists, whose elements may differ in the sizes that its ports only name.
        """
        if wire in self.constants:
            return self.constants[wire], ""
        if wire.step is None:
            one = next((one for one in self.pipeline.inputs if one.name == wire.port), None)
            return (_input_type(one.type), "") if one else None
        giver = self.steps.get(wire.step)
        port = giver.ports.output(wire.port) if giver else None
        if giver is None or port is None:
            return None
        return (list_of(loose(self.sizes.settle(port.type, wire.step))) if giver.step.map else port.type), wire.step

    def type_of(self, wire: Wire) -> PortType | None:
        """Return the type a wire gives, as far as it is known by now; None when it leads nowhere."""
        source = self.source(wire)
        return self.sizes.settle(*source) if source else None


def _input_type(text: str) -> PortType:
    try:
        return PortType.parse(text)
    except ValueError:  # reported with its line already
        return PortType("any")
