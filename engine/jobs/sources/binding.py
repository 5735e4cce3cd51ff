"""Mapping of columns to pipeline inputs, and iteration over the bound values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.converting import converted
from weftline.engine.jobs.sources.fitting import MEDIA, holds_bytes, means, misfit
from weftline.engine.jobs.sources.loading import Loader
from weftline.engine.jobs.sources.piece import FOLDER, HIDDEN, UNUSABLE
from weftline.errors import InputError
from weftline.nodes.ports import PortType
from weftline.pipelines.check.problems import did_you_mean, listed


@dataclass(frozen=True, slots=True)
class Binding:
    """Columns by pipeline input; inputs that no column gives are not in it.

    schema: of the data set.
    ports:  types of the inputs in `columns`.
    needed: inputs that must have a value in every row.
    """

    columns: Mapping[str, str]
    schema: pa.Schema
    ports: Mapping[str, PortType]
    needed: Collection[str]

    @property
    def media(self) -> set[str]:
        """Columns that hold pictures, recordings or other bytes, bound or not: not kept in outputs unless asked for.

        Columns with names of files are none: they are short, and tell where a row came from.
        """
        return {field.name for field in self.schema if holds_bytes(field.type)}

    def inputs(self, table: pa.Table, loader: Loader) -> dict[str, list[Any]]:
        """Return for each bound input one value for each row: what Session.run takes, None, or Unusable.

        Files that rows name are all read here, so a table should be no larger than what is answered together.
        """
        folders = table.column(FOLDER).to_pylist() if FOLDER in table.schema.names else None
        found = {
            name: converted(table.column(column), self.schema.field(column), self.ports[name], loader, folders)
            for name, column in self.columns.items()
        }
        for name in self.columns:
            if name in self.needed:
                empty = Unusable(f"column {self.columns[name]} is empty")
                found[name] = [empty if value is None else value for value in found[name]]
        return _with_broken(found, table)


def bind(schema: pa.Schema, ports: Mapping[str, PortType], needed: Collection[str], maps: Mapping[str, str]) -> Binding:
    """Return which columns the inputs of a pipeline get; InputError with all that is wrong.

    ports:  types of all inputs; an input without a column of its name, or a mapping, is left out.
    needed: inputs that may not be left out.
    maps:   columns by input, for those that are called otherwise. The only picture, recording or text file of a row
            needs none where only one input of that kind lacks a column.
    """
    names = [name for name in schema.names if name not in HIDDEN]
    problems = []
    columns: dict[str, str] = {}
    for name, column in maps.items():
        if name not in ports:
            problems.append(f"--map {name}={column}: the pipeline has no input {name}{_near(name, ports)}")
        elif column not in names:
            problems.append(f"--map {name}={column}: there is no column {column}{_near(column, names)}")
    maps = {**_only_media(schema, names, ports, needed, maps), **maps}
    for name, port in ports.items():
        column = maps.get(name, name)
        if column in names:
            columns[name] = column
            if why := misfit(schema.field(column), port):
                problems.append(f"input {name} ({port}) from column {column}: {why}")
        elif name in needed and name not in maps:
            problems.append(f"input {name} ({port}): there is no column {name}{_near(name, names)}")
    if not problems and not columns:
        problems.append("no input gets a column")
    if problems:
        inputs = ", ".join(f"{name} ({port})" for name, port in ports.items()) or "none"
        problems += [f"    inputs: {inputs}", f"    columns: {listed(names)}", "    fix: --map INPUT=COLUMN"]
        raise InputError("\n".join(problems))
    return Binding(columns, schema, {name: ports[name] for name in columns}, frozenset(needed))


def _only_media(
    schema: pa.Schema,
    names: Collection[str],
    ports: Mapping[str, PortType],
    needed: Collection[str],
    maps: Mapping[str, str],
) -> dict[str, str]:
    """Return the column of each input that lacks one, where kind and number leave no choice."""
    taken = {maps.get(name, name) for name in ports}
    lacking = [name for name in ports if name in needed and name not in maps and name not in names]
    found: dict[str, str] = {}
    for name in lacking:
        kind = ports[name].kind
        alike = [one for one in lacking if ports[one].kind == kind]
        columns = [one for one in names if one not in taken and _is_of_kind(schema.field(one), kind)]
        if len(alike) == len(columns) == 1:
            found[name] = columns[0]
    return found


def _is_of_kind(field: pa.Field, kind: str) -> bool:
    """Return whether a column holds files of a port's kind: a folder's by its name, any other's by its type."""
    if means(field) == "path":
        return bool(field.name == kind)
    return kind in MEDIA and holds_bytes(field.type)


def _near(name: str, known: Collection[str]) -> str:
    hint = did_you_mean(name, known)
    return f"; {hint}" if hint else ""


def _with_broken(found: dict[str, list[Any]], table: pa.Table) -> dict[str, list[Any]]:
    """Return the values, with the reason in every input of rows that could not be read."""
    if UNUSABLE not in table.schema.names:
        return found
    column = table.column(UNUSABLE)
    if column.null_count == len(column):
        return found
    for row, reason in enumerate(column.to_pylist()):
        if reason is not None:
            for values in found.values():
                values[row] = Unusable(reason)
    return found
