"""Generator of the reference page of nodes: `python -m weftline.pipelines.render.node_reference`.

Ports, options, extras and batch defaults are read from the nodes themselves. What a node's ports depend on, and the
licence of the package that runs it, are stated here: no other file knows them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.nodes.catalog import CATALOG, FAKES, resolve
from weftline.nodes.contract import BatchNode, Node, StepContext, StreamNode
from weftline.nodes.control import Control
from weftline.nodes.ports import Port, Ports
from weftline.pipelines.check.options import to_config
from weftline.pipelines.render.field_docs import summary
from weftline.pipelines.render.reference import table
from weftline.pipelines.spec.json_schema import node_options

PAGE = Path("docs/reference/nodes.md")
COMMAND = "python -m weftline.pipelines.render.node_reference"

MADE_UP: Mapping[str, Mapping[str, Any]] = {
    "whisper": {"model": "base.en"},
    "yolo": {"model": "yolo11n.pt", "trust_pickle": True},
    "classify": {"model": "organisation/model"},
    "embed": {"model": "organisation/model"},
    "llm": {"model": "organisation/model"},
}
"""Options without which a node cannot say its ports; nothing is opened with them."""

PORTS_FROM: Mapping[str, str] = {
    "function": "Its inputs are the function's parameters and its outputs what the return annotation says: one output "
    "called `output`, or one for each key of a dict annotation. A parameter with a default may stay unwired. A class "
    "is made once, with `arguments`, and its `__call__` is the function; its `close()` and `end_sequence(id)` are "
    "called if it has them. JSON that is returned is held to the annotation: `dict`, `list[float]`, "
    "`tuple[int, str]`, `float | None`, `Literal`, a TypedDict, a dataclass, a pydantic model. See "
    "[a class, and arguments](../first-pipeline.md#a-class-and-arguments).",
    "torch": "Its inputs are the keys of `accepts` and its outputs those of `gives`, with the types written there.",
    "onnx": "Its inputs and outputs are those of the graph in the file; a free first dimension is the batch and no "
    "part of the type. Letters that a port name cannot hold become `_`.",
    "template": "Its inputs are whatever the template names, wired without being listed; each takes any type. Its one "
    "output is `text` (text), the rendered text.",
    "first": "Its inputs are whatever is wired, under any names; its one output is `value`, of the type that fits them "
    "all.",
    "switch": "It decides by `by`: text, json, or a tensor of one element. Every other input is a case, except for "
    "`default`. Its one output is `value`, of the type that fits all cases.",
}
"""For nodes whose ports follow from what the step says."""

LICENCES: Mapping[str, str] = {
    "torch": "Runs on torch (BSD-3-Clause and others).",
    "onnx": "Runs on onnxruntime (MIT).",
    "whisper": "Runs on openai-whisper (MIT) and torch.",
    "yolo": "Runs on **ultralytics, which is AGPL-3.0** (or a commercial licence of Ultralytics): a service built on "
    "this node takes on that licence's duties, among them offering its source to its users. No other node needs it.",
    "classify": "Runs on transformers (Apache-2.0) and torch. A folder with `model.onnx` runs on onnxruntime (MIT) "
    "instead and needs `weftline[onnx]` only.",
    "embed": "Runs on transformers (Apache-2.0) and torch.",
    "guardrail": "Rules need nothing. A `classifier` needs what the same model needs in a `classify` step.",
    "llm": "Runs on transformers (Apache-2.0) and torch.",
}
"""What runs the node and under which licence; nodes that are not here need no more than Weftline itself."""

_INTRO = f"""\
# Built-in nodes

<!-- Written by `{COMMAND}`; do not edit by hand. -->

A step names one of these as its `node`; options are written beside the step's own keys, which
[the reference of pipeline files](yaml.md) lists. `weftline nodes NAME` prints the same for one node, and for a node of
your own. *Heavy* nodes divide the machine's cores among their processes, and `device: auto` puts them on the first GPU
where there is one; the others have one thread on the CPU. Nodes that *remember* keep something between the requests of
a sequence; a worker's death takes it along. A model has a licence of its own besides the one named here.

"""


def node_reference() -> str:
    """Return the page in Markdown: ports, options and extras of every node of the catalog except the fakes."""
    nodes = {name: resolve(name, Path()) for name in CATALOG if name not in FAKES}
    heads = ["| node | extra | what it does |", "|---|---|---|"]
    rows = [f"| [`{name}`](#{name}) | {_extra(node)} | {summary(node)} |" for name, node in nodes.items()]
    parts = [_INTRO + "\n".join([*heads, *rows])]
    parts += [_section(name, node) for name, node in nodes.items()]
    return "\n\n".join(parts) + "\n"


def _extra(node: type[Node]) -> str:
    return f"`weftline[{node.extra}]`" if node.extra else "none"


def _section(name: str, node: type[Node]) -> str:
    options = node_options(node)
    written = table(options, options.get("$defs", {})) if options.get("properties") else "It has no options."
    traits = [f"`{CATALOG[name]}`", f"extra: {_extra(node)}", *_traits(node)]
    parts = [f"## {name}", summary(node), "; ".join(traits) + "."]
    parts += [LICENCES[name]] if name in LICENCES else []
    parts += [PORTS_FROM[name] if name in PORTS_FROM else _ports(name, node), written.rstrip()]
    return "\n\n".join(parts)


def _traits(node: type[Node]) -> list[str]:
    traits = [word for word, holds in (("heavy", node.heavy), ("remembers", node.stateful)) if holds]
    if issubclass(node, Control):
        return ["decided without a worker"]
    streams = issubclass(node, StreamNode)
    if streams and not issubclass(node, BatchNode):
        return [*traits, "streams, so that items join and leave between rounds and are never batched by the step"]
    items, wait_ms = node.batch_default
    traits.append(f"default batch: up to {items}" + (f", waits {wait_ms:g} ms" if wait_ms else ""))
    return [*traits, *(["streams instead where it is wired to a stream"] if streams else [])]


def _ports(name: str, node: type[Node]) -> str:
    ports: Ports = node.ports(to_config(node, MADE_UP.get(name, {})), StepContext(Path()))
    heads = ["| port | type | meaning |", "|---|---|---|"]
    return "\n".join([*heads, *_rows("in", ports.inputs), *_rows("out", ports.outputs)])


def _rows(direction: str, ports: Sequence[Port]) -> list[str]:
    rows = []
    for one in ports:
        marks = [mark for mark, holds in (("optional", one.optional), ("in pieces", one.pieces)) if holds]
        meaning = ", ".join([*marks, *([one.about] if one.about else [])])
        rows.append(f"| {direction}: `{one.name}` | `{one.type}` | {meaning} |")
    return rows


def main() -> None:
    """Write the page under the current folder, the root of the repository."""
    if not PAGE.parent.is_dir():
        sys.exit(f"there is no folder {PAGE.parent} here; run `{COMMAND}` at the root of the repository")
    PAGE.write_text(node_reference(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
