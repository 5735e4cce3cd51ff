"""Generator of the reference page of pipeline files: `python -m weftline.pipelines.render.reference`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weftline.nodes.catalog import CATALOG, FAKES
from weftline.nodes.contract import Node
from weftline.nodes.control import Control
from weftline.nodes.ports import KINDS
from weftline.pipelines.render.field_docs import summary
from weftline.pipelines.spec.condition import ALLOWED, CHARS_MAX
from weftline.pipelines.spec.document import DEPTH_MAX, EVENTS_MAX, TEXT_BYTES_MAX
from weftline.pipelines.spec.entries import NAME_CHARS_MAX
from weftline.pipelines.spec.json_schema import catalog_nodes, json_schema, node_options

PAGE = Path("docs/reference/yaml.md")
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


def yaml_reference() -> str:
    """Return the page, in Markdown: every key of a pipeline file and every option of the built-in nodes."""
    schema = json_schema()
    defs = schema["$defs"]
    names = defs["StepEntry"]["properties"]["node"]["anyOf"][0]
    names["enum"] = [name for name in names["enum"] if name not in FAKES]
    parts = [_INTRO]
    for title, of in (
        ("The file", schema),
        ("Inputs, in long form", defs["Input"]),
        ("Steps", defs["StepEntry"]),
        ("`batch` of a step", defs["BatchPolicy"]),
        ("`retry` of a step, in long form", defs["Retry"]),
        ("`sequence` of a step", defs["SequencePolicy"]),
        ("`idle` of a step, in long form", defs["IdlePolicy"]),
        ("`limits`", defs["Limits"]),
        ("`slo`", defs["Slo"]),
        ("`gpu`", defs["GpuPolicy"]),
    ):
        parts += [f"## {title}\n", table(of, defs)]
    parts.append("## Options of the built-in nodes\n\nWritten beside the step's own keys.\n")
    listed = {name: path for name, path in CATALOG.items() if name not in FAKES}
    for name, node in catalog_nodes(listed).items():
        parts += [f"### `{name}`\n", _node(name, node)]
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


def main() -> None:
    """Write the page under the current folder, the root of the repository."""
    if not PAGE.parent.is_dir():
        sys.exit(f"there is no folder {PAGE.parent} here; run `{COMMAND}` at the root of the repository")
    PAGE.write_text(yaml_reference(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
