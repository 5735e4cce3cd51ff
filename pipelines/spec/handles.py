"""Builder handles: steps whose attributes are wires, and constant wires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weftline.pipelines.spec.wire import Wire


@dataclass(frozen=True, slots=True)
class ConstantWire(Wire):
    """A wire that carries the same for every request: text, a number, true, false, None, a list or a mapping."""

    value: Any = None


def constant(value: Any) -> ConstantWire:
    """Return a wire that always carries `value`, for an input port: `p.step(..., size=constant(224))`."""
    return ConstantWire(None, "", value)


class StepHandle:
    """A step of a pipeline that is being built: `see.detections`, or `see["detections"]`, is a wire."""

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
