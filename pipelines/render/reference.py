"""Generator of the reference pages of pipeline files and nodes: `python -m weftline.pipelines.render.reference`.

Keys, ports, options, extras and batch defaults are read from the schema and from the nodes. The rule for a node's ports
and the licence of the package that runs it are stated here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.fields import result_fields, written_fields
from weftline.nodes.catalog import CATALOG, FAKES, engines_of, resolve
from weftline.nodes.contract import BatchNode, Node, StepContext, StreamNode
from weftline.nodes.control import Control
from weftline.nodes.ports import KINDS, Port, Ports
from weftline.pipelines.check.options import option_classes, to_config
from weftline.pipelines.render.field_docs import summary
from weftline.pipelines.spec.condition import ALLOWED, CHARS_MAX
from weftline.pipelines.spec.document import DEPTH_MAX, EVENTS_MAX, TEXT_BYTES_MAX
from weftline.pipelines.spec.graph import Input, Step
from weftline.pipelines.spec.json_schema import catalog_nodes, json_schema, node_options
from weftline.pipelines.spec.policy import (
    NAME_CHARS_MAX,
    BatchPolicy,
    GpuPolicy,
    IdlePolicy,
    Limits,
    Retry,
    SequencePolicy,
    Slo,
)

YAML_PAGE = Path("docs/reference/yaml.md")
COMMAND = "python -m weftline.pipelines.render.reference"

_INTRO = f"""\
# Pipeline files

<!-- Written by `{COMMAND}`; do not edit by hand. -->

A pipeline file is YAML with the keys below. Unknown keys are refused, with file, line and the nearest known key.

```yaml
weftline: 1
name: shout
inputs:
  words: text
steps:
  say:
    node: echo
    inputs: {{value: words}}
    batch: {{items_max: 8, wait_max_ms: 2}}
outputs:
  said: say.value
```

- A wire is written as a wire: `say.value` is output `value` of step `say`, and `words` alone is a pipeline input.
- Names have letters, digits, `_` and `-`, start with a letter or `_`, and have at most {NAME_CHARS_MAX} characters.
- Scalars follow YAML 1.2: `yes`, `on` and `12:30` are text, `012` is twelve, and only `true` and `false` are booleans.
- Anchors, aliases, tags, merge keys, duplicate keys and second documents are refused, and so is a file of more than
  {TEXT_BYTES_MAX:,} bytes, {DEPTH_MAX} levels or {EVENTS_MAX:,} YAML events.
- Relative paths are relative to the file's folder.
- `${{NAME}}` in a value is the environment variable NAME, and `${{NAME:-default}}` has a default for one that is unset
  or empty; `$${{` is the text `${{`. An unset variable without a default is a problem. Use it for secrets, addresses
  and paths. A variable whose name contains KEY, TOKEN, SECRET, PASSWORD, PASSWD or CREDENTIAL is a secret: `check`,
  `plan`, job manifests and reports show its name instead of its value, and a job may go on after it changed; every
  other value is part of a job's fingerprint. Keys, `about`, `prompt`, `template` and `when` are never expanded.
- A `template` step, and the `prompt` of an `llm` step, names what it reads: `{{{{ see.detections | describe }}}}` is
  wired without being listed under `inputs`. A `prompt` makes a template step of its own, called `<step>_prompt`.
- A condition (`when`) is made of {ALLOWED}.
  It has at most {CHARS_MAX:,} characters.
- What [control flow](../guides/control-flow.md) and [batching](../guides/batching.md) do has guides of its own.

Port types are {", ".join(f"`{kind}`" for kind in KINDS)},
a tensor of one item such as `float32[3, H, W]`, or a list of one of these, such as `list[image]`. A name in a tensor is
a size that is the same wherever it occurs in one step, `?` is any size. `image` is the same as `uint8[H, W, 3]` and
`audio` the same as `float32[samples]`; `text`, `detections` and lists of text or json may be given where `json` is
taken.
"""


_SECTIONS: Mapping[str, type[Any]] = {
    "Inputs, in long form": Input,
    "Steps": Step,
    "`batch` of a step": BatchPolicy,
    "`retry` of a step, in long form": Retry,
    "`sequence` of a step": SequencePolicy,
    "`idle` of a step, in long form": IdlePolicy,
    "`limits`": Limits,
    "`slo`": Slo,
    "`gpu`": GpuPolicy,
}


def _compared(of: type[Any]) -> str:
    """Return the sentence on the keys that a job compares with those of its first run."""
    keys, results = [one.name for one in written_fields(of)], result_fields(of)
    compared = ", ".join(f"`{name}`" for name in keys if name in results)
    others = ", ".join(f"`{name}`" for name in keys if name not in results)
    lines = [f"A resumed job compares {compared or 'none of these'}."]
    lines += [f"It may have other values of {others}."] if compared and others else []
    return " ".join(lines) + "\n"


def yaml_reference() -> str:
    """Return the page, in Markdown: every key of a pipeline file and every option of the built-in nodes."""
    schema = json_schema()
    defs = schema["$defs"]
    names = defs["Step"]["properties"]["node"]["anyOf"][0]
    names["enum"] = [name for name in names["enum"] if name not in FAKES]
    parts = [_INTRO]
    parts += ["## The file\n", table(schema, defs)]
    for title, of in _SECTIONS.items():
        parts += [f"## {title}\n", table(defs[of.__name__], defs), _compared(of)]
    parts.append("## Options of the built-in nodes\n\nWritten beside the step's own keys.\n")
    listed = {name: path for name, path in CATALOG.items() if name not in FAKES}
    for name, node in catalog_nodes(listed).items():
        parts += [f"### `{name}`\n", _node(name, node)]
        for engine, path in engines_of(name).items():
            parts += [f"### `{name}` with `engine: {engine}`\n", _node(name, resolve(path, Path()))]
    return "\n".join(parts).rstrip() + "\n"


def _node(name: str, node: type[Node]) -> str:
    options = node_options(node)
    traits = [f"Extra: `weftline[{node.extra}]`."] if node.extra else []
    items, wait = node.batch_default
    if not issubclass(node, Control):
        traits.append(f"Default batch: up to {items}{f', waits {wait:g} ms' if wait else ''}.")
    about = " ".join([summary(node), *traits]).strip()
    if name == "llm":
        about += " `prompt` holds a template and makes a template step."
    options_table = table(options, options.get("$defs", {})) if options.get("properties") else "It has no options.\n"
    return f"{about}\n\n{options_table}"


def table(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """Return the properties of a JSON Schema as a Markdown table; `defs` are its `$defs`."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows += [f"| {' | '.join(_cell(text) for text in row)} |" for row in _rows(schema, defs, "")]
    return "\n".join(rows) + "\n"


def _rows(schema: Mapping[str, Any], defs: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, type, default and meaning of each property; nested values by dotted key."""
    for key, entry in schema.get("properties", {}).items():
        needed = "required" if key in schema.get("required", ()) else ""
        default = needed or (_default(entry["default"]) if entry.get("default") is not None else "")
        yield f"`{prefix}{key}`", _type(entry, defs), default, _sentence(entry.get("description", ""))
        inner = defs.get(entry.get("$ref", "").rpartition("/")[2])
        if inner and "properties" in inner:
            yield from _rows(inner, defs, f"{prefix}{key}.")


def _type(entry: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    if "$ref" in entry:
        inner = defs.get(entry["$ref"].rpartition("/")[2], {})
        return _type(inner, defs) if "enum" in inner else "mapping"
    alternatives = entry.get("anyOf", entry.get("oneOf"))
    if alternatives and "type" not in entry:
        kinds = [_type(one, defs) for one in alternatives if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in entry or "const" in entry:
        return ", ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in entry.get("enum", [entry.get("const")]))
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
    if entry.get("type") == "array":
        return f"list of {_type(entry['items'], defs)}" if entry.get("items") else "list"
    return words.get(entry.get("type", ""), "mapping" if entry.get("type") == "object" else "any") + _bounds(entry)


def _bounds(entry: Mapping[str, Any]) -> str:
    if "exclusiveMinimum" in entry:
        return f", more than {entry['exclusiveMinimum']:,}"
    return f", {entry['minimum']:,} to {entry['maximum']:,}" if {"minimum", "maximum"} <= entry.keys() else ""


def _default(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`" if value not in ({}, [], "") else ""


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


NODES_PAGE = Path("docs/reference/nodes.md")

MADE_UP: Mapping[str, Mapping[str, Any]] = {
    "whisper": {"model": "base.en", "timestamps": "word"},
    "classify": {"model": "organisation/model"},
    "embed": {"model": "organisation/model"},
    "rerank": {"model": "organisation/model"},
    "llm": {"model": "organisation/model"},
    "llm with engine: openai": {"model": "m", "url": "https://host/v1", "server": "vllm"},
}
"""Options that a node's ports depend on; nothing is opened with them."""

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
    "transformers": "Its inputs and outputs are those of its task; see [models](../models.md#models-of-transformers).",
    "yolo": "Its input is `image`, a picture; its outputs are those of its task; see [models](../models.md#yolo).",
    "template": "Its inputs are whatever the template names, wired without being listed; each takes any type. Its one "
    "output is `text` (text), the rendered text.",
    "first": "Its inputs are whatever is wired, under any names; its one output is `value`, of the type that fits them "
    "all.",
    "switch": "It decides by `by`: text, json, or a tensor of one element. Every other input is a case, except for "
    "`default`. Its one output is `value`, of the type that fits all cases.",
}
"""Rules for nodes whose ports depend on the step."""

LICENCES: Mapping[str, str] = {
    "torch": "Runs on torch (BSD-3-Clause and others).",
    "onnx": "Runs on onnxruntime (MIT).",
    "whisper": "Runs on openai-whisper (MIT) and torch; models of CTranslate2 on faster-whisper (MIT), with the extra "
    "`faster-whisper`.",
    "yolo": "Runs on **ultralytics, which is AGPL-3.0** (or a commercial licence of Ultralytics): a service built on "
    "this node takes on that licence's duties, among them offering its source to its users. No other node needs it.",
    "classify": "Runs on transformers (Apache-2.0) and torch. A folder with `model.onnx` runs on onnxruntime (MIT) "
    "instead and needs `weftline[onnx]` only.",
    "embed": "Runs on transformers (Apache-2.0) and torch.",
    "rerank": "Runs on transformers (Apache-2.0) and torch.",
    "transformers": "Runs on transformers (Apache-2.0), torch, torchvision and scipy (BSD-3-Clause).",
    "guardrail": "Rules need nothing. A `classifier` needs what the same model needs in a `classify` step.",
    "llm": "Runs on transformers (Apache-2.0) and torch.",
    "llm with engine: openai": "Runs on httpx2 (BSD-3-Clause); the server has the model.",
}
"""Package that runs the node, and its licence; other nodes need Weftline only."""

_NODES_INTRO = f"""\
# Built-in nodes

<!-- Written by `{COMMAND}`; do not edit by hand. -->

A step names one of these as its `node`; options are written beside the step's own keys, which
[the reference of pipeline files](yaml.md) lists. `weftline nodes NAME` prints the same for one node, and for a node of
your own. *Heavy* nodes divide the machine's cores among their processes, and `device: auto` puts them on the first GPU
where there is one; the others have one thread on the CPU. Nodes that *remember* keep something between the requests of
a sequence; a worker's death takes it along. A model has a licence of its own besides the one named here. Options are
part of what a worker loads, except for those that *apply to single items*.

"""


def node_reference() -> str:
    """Return the page in Markdown: ports, options and extras of every node of the catalog except the fakes."""
    nodes = {name: resolve(name, Path()) for name in CATALOG if name not in FAKES}
    heads = ["| node | extra | what it does |", "|---|---|---|"]
    rows = [f"| [`{name}`](#{name}) | {_extra(node)} | {summary(node)} |" for name, node in nodes.items()]
    parts = [_NODES_INTRO + "\n".join([*heads, *rows])]
    for name, node in nodes.items():
        parts.append(_section(name, node, CATALOG[name]))
        for engine, path in engines_of(name).items():
            parts.append(_section(f"{name} with engine: {engine}", resolve(path, Path()), path))
    return "\n\n".join(parts) + "\n"


def _extra(node: type[Node]) -> str:
    return f"`weftline[{node.extra}]`" if node.extra else "none"


def _section(name: str, node: type[Node], path: str) -> str:
    options = node_options(node)
    written = table(options, options.get("$defs", {})) if options.get("properties") else "It has no options."
    traits = [f"`{path}`", f"extra: {_extra(node)}", *_traits(node)]
    parts = [f"## {name}", summary(node), "; ".join(traits) + "."]
    parts += [LICENCES[name]] if name in LICENCES else []
    parts += [PORTS_FROM[name] if name in PORTS_FROM else _ports(name, node), written.rstrip(), *_classes(node)]
    return "\n\n".join(parts)


def _classes(node: type[Node]) -> list[str]:
    """Return a paragraph on the options whose class is not LOAD; none without any."""
    found = option_classes(node)
    request = [f"`{name}`" for name, of in found.items() if of.part == "request"]
    unseen = [f"`{name}`" for name, of in found.items() if not of.results]
    lines = [f"Apply to single items: {', '.join(request)}."] if request else []
    lines += [f"Without effect on results: {', '.join(unseen)}."] if unseen else []
    return [" ".join(lines)] if lines else []


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
    return "\n".join([*heads, *_port_rows("in", ports.inputs), *_port_rows("out", ports.outputs)])


def _port_rows(direction: str, ports: Sequence[Port]) -> list[str]:
    rows = []
    for one in ports:
        marks = [mark for mark, holds in (("optional", one.optional), ("in chunks", one.pieces)) if holds]
        meaning = ", ".join([*marks, *([one.about] if one.about else [])])
        rows.append(f"| {direction}: `{one.name}` | `{one.type}` | {meaning} |")
    return rows


def main() -> None:
    """Write both pages under the current folder, the root of the repository."""
    if not YAML_PAGE.parent.is_dir():
        sys.exit(f"there is no folder {YAML_PAGE.parent} here; run `{COMMAND}` at the root of the repository")
    for page, text in ((YAML_PAGE, yaml_reference()), (NODES_PAGE, node_reference())):
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
