"""Command `weftline nodes`: the catalog, or one node's ports and options."""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weftline.engine.flags import Flag
from weftline.errors import ModelError
from weftline.fields import annotation_text, plain
from weftline.nodes.catalog import CATALOG, FAKES, dotted, engines_of, resolve
from weftline.nodes.contract import ConfigError, Node, StepContext
from weftline.nodes.ports import Port, Ports
from weftline.pipelines.check.options import option_classes
from weftline.pipelines.render.field_docs import field_docs, summary

TEXT_COLUMNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOptions:
    """Options of `weftline nodes`."""

    name: Annotated[str, Flag("NAME")] = ""
    """Show the ports and options of this node."""

    as_json: Annotated[bool, Flag("--json")] = False
    """Print json."""


def nodes(options: NodesOptions) -> None:
    """List the nodes that steps can run, or show one with its ports and options.

    \b
    Examples:
      weftline nodes
      weftline nodes onnx
      weftline nodes my_nodes.py:Crop --json
    """
    typer.echo(describe_node(options.name, options.as_json) if options.name else list_nodes(options.as_json))


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a node: type as written, default (None when required), purpose, and class (`weftline.fields`)."""

    name: str
    type: str
    required: bool
    default: Any
    about: str
    part: str
    results: bool


def list_nodes(as_json: bool) -> str:
    """Return the catalog's nodes without fakes: name, extra that installs the framework, purpose."""
    found = [(name, *_brief(name)) for name in CATALOG if name not in FAKES]
    if as_json:
        rows = [{"name": name, "extra": extra, "about": about} for name, extra, about in found]
        return json.dumps(rows, indent=2, ensure_ascii=False)
    table = [(name, f"weftline[{extra}]" if extra else "", about) for name, extra, about in found]
    closing = "One in detail: weftline nodes NAME. Your own: file.py:Class, or package.module:Class."
    return "\n".join([*_table([("node", "needs", "purpose"), *table]), "", closing])


def _brief(name: str) -> tuple[str, str]:
    try:
        node = resolve(name, Path())
    except ConfigError as error:
        return "", f"({error.found})"
    return node.extra, summary(node)


def describe_node(reference: str, as_json: bool) -> str:
    """Return one node's documentation, ports and options."""
    try:
        node = resolve(reference, Path())
    except ConfigError as error:
        raise typer.BadParameter(". ".join(part for part in (error.found, error.fix) if part)) from None
    ports, why = static_ports(node)
    if as_json:
        return json.dumps(_described(reference, node, ports), indent=2, ensure_ascii=False)
    lines = [reference, "", *inspect.cleandoc(node.__doc__ or "").splitlines(), ""]
    lines += [f"Needs: pip install 'weftline[{node.extra}]'", ""] if node.extra else []
    if ports is None:
        lines += [f"Ports depend on the options ({why})."]
    else:
        lines += ["Inputs", *_port_lines(ports.inputs), "", "Outputs", *_port_lines(ports.outputs)]
    lines += ["", "Options", *(_option_lines(options_of(node)) or ["  none"])]
    for engine, path in engines_of(reference).items() if reference in CATALOG else ():
        lines += ["", f"Options with engine: {engine}", *_option_lines(options_of(resolve(path, Path())))]
    return "\n".join(lines)


def static_ports(node: type[Node]) -> tuple[Ports | None, str]:
    """Return the ports of a node with default options, or None and the reason when they depend on its options."""
    required = [option.name for option in options_of(node) if option.required]
    if required:
        return None, f"{', '.join(required)} must be given"
    try:
        return node.ports(node.Config(), StepContext(Path())), ""
    except (ValueError, ModelError) as error:
        return None, str(error).partition("\n")[0]


def options_of(node: type[Node]) -> list[Option]:
    """Return a node's options, read from its Config."""
    if not dataclasses.is_dataclass(node.Config):
        return []
    docs, of = field_docs(node.Config), option_classes(node)
    options = []
    for field in dataclasses.fields(node.Config):
        default, required = field.default, False
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif default is dataclasses.MISSING:
            default, required = None, True
        type, found = annotation_text(field.type), of[field.name]
        options.append(Option(field.name, type, required, default, docs.get(field.name, ""), found.part, found.results))
    return options


def _described(reference: str, node: type[Node], ports: Ports | None) -> dict[str, Any]:
    options = [{**dataclasses.asdict(one), "default": plain(one.default)} for one in options_of(node)]
    return {
        "name": reference,
        "node": dotted(reference),
        "extra": node.extra,
        "about": inspect.cleandoc(node.__doc__ or ""),
        "inputs": None if ports is None else [_port(one) for one in ports.inputs],
        "outputs": None if ports is None else [_port(one) for one in ports.outputs],
        "options": options,
    }


def _port(one: Port) -> dict[str, Any]:
    shown = {**dataclasses.asdict(one), "type": str(one.type)}
    if one.listed is not None:
        shown["listed"] = str(one.listed)
    return {key: value for key, value in shown.items() if key not in ("labels", "listed") or value}


def _port_lines(ports: Sequence[Port]) -> list[str]:
    rows = []
    for one in ports:
        marks = [mark for mark, holds in (("optional", one.optional), ("in chunks", one.pieces)) if holds]
        rows.append((one.name, str(one.type), ", ".join([*marks, *([one.about] if one.about else [])])))
    return [f"  {line}" for line in _table(rows)] or ["  any wired input"]


def _option_lines(options: Sequence[Option]) -> list[str]:
    lines = []
    for option in options:
        value = "required" if option.required else f"default {_short(option.default)}"
        value += ", of single items" if option.part == "request" else ""
        lines.append(f"  {option.name}: {option.type}, {value}")
        lines += textwrap.wrap(option.about, TEXT_COLUMNS, initial_indent="      ", subsequent_indent="      ")
    return lines


def _short(default: Any) -> str:
    return textwrap.shorten(json.dumps(plain(default), ensure_ascii=False), 60, placeholder=" ...")


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
