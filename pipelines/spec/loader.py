"""Loader: pipeline file to validated `Pipeline`, with source lines.

Checked here: syntax, keys, types, bounds. `check` needs the nodes and checks their options and ports; it also checks
the valid rest of a file with problems, so that all problems are reported at once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from weftline.errors import PipelineError, Problem
from weftline.fields import markers, written_fields
from weftline.nodes.catalog import CATALOG
from weftline.pipelines.check.checker import check
from weftline.pipelines.spec.constants import type_of
from weftline.pipelines.spec.document import Document, hide_secrets, read_document, read_file
from weftline.pipelines.spec.graph import STRUCTURAL, Input, Pipeline, Step
from weftline.pipelines.spec.policy import GpuPolicy, Limits, Slo
from weftline.pipelines.spec.schema import PipelineFile, validate
from weftline.pipelines.spec.wire import ConstantWire, Wire


def load_file(path: str | Path, catalog: Mapping[str, str] = CATALOG) -> Pipeline:
    """Return the pipeline in the YAML file at `path`; raise PipelineError when it is unreadable or invalid.

    Relative paths inside it are relative to its folder.
    """
    return to_pipeline(read_file(path), str(path), Path(path).parent, catalog)


def load_yaml(
    text: str,
    file: str,
    base_dir: Path,
    catalog: Mapping[str, str] = CATALOG,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Pipeline:
    """Return the pipeline in `text`. PipelineError lists all its problems.

    file:     its name in problems.
    base_dir: the folder that relative paths in it are relative to.
    catalog:  nodes by short name; only used when there are problems, to include those of the nodes.
    environment: values of `${NAME}`.
    """
    return to_pipeline(read_document(text, file, environment), file, base_dir, catalog)


def to_pipeline(document: Document, file: str, base_dir: Path, catalog: Mapping[str, str] = CATALOG) -> Pipeline:
    """Return the pipeline of a document. PipelineError lists all its problems."""
    model, problems = validate(document.value)
    if not document.problems and model is not None:
        return _pipeline(model, document, file, base_dir)
    fresh = [one for one in problems if one.path not in document.unread]
    placed = [dataclasses.replace(one, file=file, line=line_of(one.path, document.lines)) for one in fresh]
    rest = _without(document, problems)
    more = check(_pipeline(rest, document, file, base_dir), catalog) if rest is not None else []
    raise PipelineError(hide_secrets(one, document.secrets) for one in [*document.problems, *placed, *more])


def _without(document: Document, problems: list[Problem]) -> PipelineFile | None:
    """Return the document without invalid keys, so that the rest can be checked as well.

    None when one of them contains wires or names: removing it would cause further problems.
    """
    if document.unread:
        return None
    value = copy.deepcopy(document.value)
    for one in problems:
        if one.found != "unknown key" and not _apart(one.path):
            return None
        *outer, key = one.path.split(".")
        place = value
        for part in outer:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or key not in place:  # a key with dots in it, or a shortened one
            return None
        del place[key]
    return validate(value)[0]


def _apart(path: str) -> bool:
    """Return True if no wire, no type and no other key depends on the key at `path`."""
    outer, _, rest = path.partition(".")
    owner = {"inputs": Input, "steps": Step}.get(outer)
    if owner is None:
        return outer in ("about", "limits", "slo", "gpu")
    keys = {one.name for one in written_fields(owner)}
    key = rest.partition(".")[2].partition(".")[0]
    return key in keys and STRUCTURAL not in markers(owner)[key]


def _pipeline(written: PipelineFile, document: Document, file: str, base_dir: Path) -> Pipeline:
    constants = [
        Input(f"{name}/{port}", type_of(wire.value), default=wire.value, hidden=True)  # no written name has a `/`
        for name, step in written.steps.items()
        for port, wire in step.inputs.items()
        if isinstance(wire, ConstantWire)
    ]
    return Pipeline(
        name=written.name,
        about=written.about,
        inputs=(*(dataclasses.replace(one, name=name) for name, one in written.inputs.items()), *constants),
        steps=tuple(_step(name, step) for name, step in written.steps.items()),
        outputs=dict(written.outputs),
        limits=written.limits or Limits(),
        slo=written.slo or Slo(),
        gpu=written.gpu or GpuPolicy(),
        file=file,
        base_dir=base_dir,
        lines=document.lines,
        secrets=document.secrets,
    )


def _step(name: str, step: Step) -> Step:
    inputs = {
        port: Wire(None, f"{name}/{port}") if isinstance(wire, ConstantWire) else wire
        for port, wire in step.inputs.items()
    }
    return dataclasses.replace(step, name=name, inputs=inputs)


def line_of(path: str, lines: Mapping[str, int]) -> int:
    """Return the line of `path` or of its nearest known parent; 0 when unknown."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path, 0)
