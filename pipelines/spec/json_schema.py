"""JSON Schema (draft 2020-12) of pipeline files, for editors.

The file's own keys come from `schema`, each node's options from its Config. Editors check keys and values;
`check` also checks wires and types.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weftline.nodes.catalog import CATALOG, engines_of, resolve
from weftline.nodes.contract import ConfigError, Node
from weftline.pipelines.check.validation import json_schema_of
from weftline.pipelines.render.field_docs import summary
from weftline.pipelines.spec.schema import BESIDE_PIPELINE, PipelineFile

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEMPLATED = {"llm": "prompt"}
"""Options of a step that are not its node's: they create a template step before it."""


def json_schema(catalog: Mapping[str, str] = CATALOG) -> dict[str, Any]:
    """Return the schema of a pipeline file, with the options of catalog nodes."""
    schema = json_schema_of(PipelineFile)
    defs: dict[str, Any] = schema["$defs"]
    for title, one in [("PipelineFile", schema), *defs.items()]:
        one.pop("title", None)
        one["description"] = _first_line(one.get("description", title))
        for entry in one.get("properties", {}).values():
            entry.pop("title", None)
            _close(entry)
    step = defs["Step"]
    nodes = catalog_nodes(catalog)
    step["properties"]["node"]["anyOf"] = [{"enum": list(nodes)}, {"type": "string", "pattern": ":"}]
    step["oneOf"] = [{"required": ["node"]}, {"required": ["pipeline"]}]
    step["allOf"] = [_of_pipelines(), *(_branch(name, node, step, defs, catalog) for name, node in nodes.items())]
    return {"$schema": _DIALECT, "title": "Weftline pipeline", **schema}


def catalog_nodes(catalog: Mapping[str, str] = CATALOG) -> dict[str, type[Node]]:
    """Return the installed node classes of the catalog by name."""
    found = {}
    for name in catalog:
        try:
            found[name] = resolve(name, Path(), catalog)
        except ConfigError:
            continue
    return found


def node_options(node: type[Node]) -> dict[str, Any]:
    """Return the JSON Schema of a node's options, with the documentation of its Config's fields."""
    schema = json_schema_of(node.Config)
    schema.pop("title", None)
    for entry in schema.get("properties", {}).values():
        entry.pop("title", None)
    return schema


def _close(schema: Any) -> None:
    """Forbid keys that do not match the name pattern."""
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for one in [*inner]:
        _close(one)
    if isinstance(schema, dict) and "patternProperties" in schema:
        schema["additionalProperties"] = False


def _of_pipelines() -> dict[str, Any]:
    """Return the rule 'if it runs a pipeline file, then it has few other keys'."""
    then = {"properties": dict.fromkeys(BESIDE_PIPELINE, True), "additionalProperties": False}
    return {"if": {"required": ["pipeline"]}, "then": then}


def _branch(
    name: str, node: type[Node], step: dict[str, Any], defs: dict[str, Any], catalog: Mapping[str, str]
) -> dict[str, Any]:
    """Return the rule 'if the node is this one, then its options are these and no others'."""
    options = node_options(node)
    own: dict[str, Any] = {}
    for path in reversed(engines_of(name, catalog).values()):  # options of any engine; `check` sorts them
        own |= _take_definitions(name, node_options(resolve(path, Path(), catalog)), defs)
    own |= _take_definitions(name, options, defs)
    if name in _TEMPLATED:
        own[_TEMPLATED[name]] = {
            "type": "string",
            "description": "A template; makes a template step whose text is wired to the port of this name.",
        }
    allowed = {key: True for key in step["properties"] if key not in own}
    then: dict[str, Any] = {"properties": {**allowed, **own}, "additionalProperties": False}
    if options.get("required"):
        then["required"] = options["required"]
    if about := summary(node):
        then["description"] = about
    return {"if": {"properties": {"node": {"const": name}}, "required": ["node"]}, "then": then}


def _take_definitions(name: str, options: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of `options`; their definitions move to `defs`, under names of the node."""
    for inner, definition in options.pop("$defs", {}).items():
        defs[f"{name}.{inner}"] = _renamed(definition, name)
    return {key: _renamed(value, name) for key, value in options.get("properties", {}).items()}


def _renamed(schema: Any, prefix: str) -> Any:
    """Return the schema with its references pointing to the definitions of one node."""
    if isinstance(schema, dict):
        return {
            key: value.replace("#/$defs/", f"#/$defs/{prefix}.") if key == "$ref" else _renamed(value, prefix)
            for key, value in schema.items()
        }
    return [_renamed(one, prefix) for one in schema] if isinstance(schema, list) else schema


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
