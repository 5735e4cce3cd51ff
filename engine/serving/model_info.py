"""Metadata of a served model: ports, version and limits.

A *model* is what a client names: a pipeline, or a step of one that its operator exposed as `pipeline.step`. Servers
describe models and check requests with this metadata, which can be sent to another process.
"""

from __future__ import annotations

import msgspec

from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan

READY, LOADING, UNAVAILABLE = "ready", "loading", "unavailable"
"""States of a model in the index."""

NOT_LOADED = "it is not loaded"
"""`why` of a model that was never loaded, or was unloaded by an admin."""


class PortInfo(msgspec.Struct, frozen=True):
    """One input or output of a model.

    type:     of one request's value, as a pipeline file writes it: `image`, `text`, `float32[3, H, W]`, `list[text]`.
    optional: an input that may be left out; an output that may be absent.
    pieces:   an output that can be streamed piece by piece.
    """

    name: str
    type: str
    optional: bool = False
    pieces: bool = False
    about: str = ""

    @property
    def port_type(self) -> PortType:
        return PortType.parse(self.type)


class ModelInfo(msgspec.Struct, frozen=True):
    """A model as clients see it.

    version:           of what serves now; it rises with each reload.
    steps:             names of its steps, in running order.
    items_max:         most items that any of its steps takes in one call; what clients may hope to share.
    stateful:          it remembers between the requests of a sequence; every request must say which it belongs to.
    request_bytes_max: most bytes of one request's inputs.
    deadline_ms:       of a request that brings none; None: it has none.
    """

    name: str
    version: int
    inputs: tuple[PortInfo, ...]
    outputs: tuple[PortInfo, ...]
    steps: tuple[str, ...] = ()
    items_max: int = 1
    stateful: bool = False
    request_bytes_max: int = 64 << 20
    deadline_ms: float | None = None
    about: str = ""

    @property
    def streams(self) -> bool:
        """Whether an output comes in pieces to those who ask for a stream."""
        return any(port.pieces for port in self.outputs)

    def input(self, name: str) -> PortInfo | None:
        return _port(self.inputs, name)

    def output(self, name: str) -> PortInfo | None:
        return _port(self.outputs, name)


def _port(ports: tuple[PortInfo, ...], name: str) -> PortInfo | None:
    for port in ports:
        if port.name == name:
            return port
    return None


class ModelState(msgspec.Struct, frozen=True):
    """One line of the index.

    state: READY, LOADING or UNAVAILABLE.
    why:   what is wrong, for operators; '' when nothing is. Servers show it to admins only.
    """

    name: str
    version: int
    state: str
    why: str = ""

    @property
    def ready(self) -> bool:
        return self.state == READY


def model_info(name: str, version: int, plan: Plan) -> ModelInfo:
    """Return the metadata of a plan served as `name`."""
    inputs = tuple(
        PortInfo(one.name, str(plan.input_types[one.name]), one.may_be_left_out, about=one.about)
        for one in plan.inputs
        if not one.hidden
    )
    outputs = tuple(PortInfo(one.name, str(one.type), one.optional, one.pieces) for one in plan.outputs)
    return ModelInfo(
        name,
        version,
        inputs,
        outputs,
        tuple(step.name for step in plan.steps),
        max((step.batch.items_max for step in plan.steps), default=1),
        any(step.sequence is not None for step in plan.steps),
        plan.limits.request_bytes_max,
        plan.limits.deadline_ms,
        plan.about,
    )
