"""Metadata of a served model: ports, version and limits.

A *model* is what a client names: a pipeline, or a step of one that its operator exposed as `pipeline.step`. Servers
describe models and check requests with this metadata, which can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weftline.engine.protocol.packed import Packed
from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import find_config
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan

READY, LOADING, UNAVAILABLE = "ready", "loading", "unavailable"
"""States of a model in the index."""

LLM_NODES = "weftline.engine.llm."
"""Start of the dotted paths of nodes with an input `sampling`."""

ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Position encodings that the llm step runs within the length of their original model only."""

USAGE = "_usage"
"""Output of a served pipeline that only OpenAI's routes ask for (`exposed_models.py`); no client sees it."""

NOT_LOADED = "it is not loaded"
"""`why` of a model that was never loaded, or was unloaded by an admin."""


class PortInfo(msgspec.Struct, frozen=True):
    """One input or output of a model.

    type:     of one request's value, as a pipeline file writes it: `image`, `text`, `float32[3, H, W]`, `list[text]`.
    optional: an input that may be left out; an output that may be absent.
    pieces:   an output that can be streamed piece by piece.
    sampling: an input that is wired to the sampling options of an llm step, whose `n` is the number of answers.
    labels:   names of an output's classes, by index.
    """

    name: str
    type: str
    optional: bool = False
    pieces: bool = False
    about: str = ""
    sampling: bool = False
    labels: tuple[str, ...] = ()

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
    context_max:       most tokens of prompt and answer of its llm step; None: there is none, or several, or not known.
    usage:             an output with the counts of tokens that is not among `outputs`; '': none.
    """

    name: str
    version: int
    inputs: tuple[PortInfo, ...]
    outputs: tuple[PortInfo, ...]
    steps: tuple[str, ...] = ()
    items_max: int = 1
    stateful: bool = False
    request_bytes_max: int = 80 << 20
    deadline_ms: float | None = None
    about: str = ""
    context_max: int | None = None
    usage: str = ""

    @property
    def streams(self) -> bool:
        """True if an output comes in pieces in a stream."""
        return any(port.pieces for port in self.outputs)

    def cost(self, inputs: Mapping[str, Any]) -> int:
        """Return as how many requests one counts in the rate of its token: by its lists' elements and its answers."""
        cost = 1
        for name, value in inputs.items():
            port = self.input(name)
            if port is None:
                continue
            if port.sampling:
                cost += _answers(value) - 1
            elif port.type.startswith("list["):
                cost += max(_length(value) - 1, 0)
        return cost

    def input(self, name: str) -> PortInfo | None:
        return _port(self.inputs, name)

    def output(self, name: str) -> PortInfo | None:
        return _port(self.outputs, name)


class _Sampling(msgspec.Struct):
    n: Any = 1


def _answers(value: Any) -> int:
    """Return the number of answers that sampling options ask for; 1 where they are invalid, which the step reports."""
    if isinstance(value, Packed):
        if value.items is not None:
            return sum(map(_answers, value.items))
        try:
            value = {"n": msgspec.msgpack.decode(value.data, type=_Sampling).n}
        except msgspec.MsgspecError:
            return 1
    if isinstance(value, list | tuple):  # of `map`
        return sum(map(_answers, value))
    found = value.get("n", 1) if isinstance(value, Mapping) else 1
    return max(found, 1) if type(found) is int else 1


def _length(value: Any) -> int:
    """Return the number of elements of a list."""
    if isinstance(value, Packed):
        return len(value.items or ())
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else 1


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
    sampling = {
        one.wire.port
        for step in plan.steps
        for one in step.inputs
        if one.port == "sampling" and one.wire.step is None and step.node.startswith(LLM_NODES)
    }
    inputs = tuple(
        PortInfo(
            one.name,
            str(plan.input_types[one.name]),
            one.may_be_left_out,
            about=one.about,
            sampling=one.name in sampling,
        )
        for one in plan.inputs
        if not one.hidden
    )
    outputs = tuple(
        PortInfo(one.name, str(one.type), one.optional, one.pieces, labels=one.labels)
        for one in plan.outputs
        if one.name != USAGE
    )
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
        _context_max(plan),
        USAGE if any(one.name == USAGE for one in plan.outputs) else "",
    )


def _context_max(plan: Plan) -> int | None:
    """Return the context of the only llm step: its option, or what the model's config.json states."""
    steps = [step for step in plan.steps if step.node.startswith(LLM_NODES)]
    options = steps[0].options if len(steps) == 1 else {}
    if options.get("context_max") or not isinstance(options.get("model"), str):
        return options.get("context_max")
    try:
        config = find_config(options["model"], plan.base_dir) or {}
    except ConfigError:  # a GGUF file, or the name of a model on another server
        return None
    config = {**config, **(config.get("text_config") or {})}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    lengths = [config.get("max_position_embeddings")]
    if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ROPE_BY_LENGTH:
        lengths.append(rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings")))
    return min((one for one in lengths if type(one) is int), default=None)
