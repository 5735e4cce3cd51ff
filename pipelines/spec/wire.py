"""Wires, and the builder's objects that make them.

A wire is the source of a value, such as `hear.text`. A constant wire carries the same value for every request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wire:
    """Source of a value: output `port` of `step`, or pipeline input `port` when `step` is None.

    Written `hear.text`, or `question` for a pipeline input.
    """

    step: str | None
    port: str

    def __str__(self) -> str:
        return self.port if self.step is None else f"{self.step}.{self.port}"


def parse_wire(text: str) -> Wire:
    """Return the wire written as `step.port`, or as the name of a pipeline input."""
    step, dot, port = text.partition(".")
    return Wire(step, port) if dot else Wire(None, text)


@dataclass(frozen=True, slots=True)
class ConstantWire(Wire):
    """A wire with the same value for every request: text, a number, true, false, None, a list or a mapping."""

    value: Any = None


def constant(value: Any) -> ConstantWire:
    """Return a constant wire for an input port: `p.step(..., size=constant(224))`."""
    return ConstantWire(None, "", value)


class StepHandle:
    """A step of a pipeline under construction: `see.detections`, or `see["detections"]`, is a wire."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, port: str) -> Wire:
        if port.startswith("__"):
            raise AttributeError(port)
        return Wire(self._name, port)

    def __getitem__(self, port: str) -> Wire:
        return Wire(self._name, port)

    def __str__(self) -> str:
        return self._name
