"""Loader: pipeline file to validated `Pipeline`, with source lines.

Checked here: syntax, keys, types, bounds. `check` needs the nodes and checks their options and ports; it also checks
the valid rest of a file with problems, so that all problems are reported at once.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from weftline.errors import PipelineError, Problem
from weftline.nodes.catalog import CATALOG
from weftline.pipelines.check.checker import check
from weftline.pipelines.spec import condition
from weftline.pipelines.spec.constants import type_of
from weftline.pipelines.spec.document import Document, hide_secrets, read_document, read_file
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.policy import BatchPolicy, GpuPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.schema import ConstantEntry, PipelineFile, StepEntry, validate
from weftline.pipelines.spec.wire import Wire


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
        if one.found != "unknown key" and not _APART.match(one.path):
            return None
        *outer, key = one.path.split(".")
        place = value
        for part in outer:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or key not in place:  # a key with dots in it, or a shortened one
            return None
        del place[key]
    return validate(value)[0]


_APART = re.compile(
    r"^(about|limits|slo|gpu|inputs\.[^.]+\.(about|seconds_max|pixels_max|bytes_max)"
    r"|steps\.[^.]+\.(batch|worker|instances|reserved|device|threads|device_bytes|idle|run_max_ms|retry|timeout_ms|idempotent"
    r"|finite|sequence))(\.|$)"
)
"""Paths that no wire and no type depends on."""


def _pipeline(model: PipelineFile, document: Document, file: str, base_dir: Path) -> Pipeline:
    return Pipeline(
        name=model.name,
        about=model.about,
        inputs=(*(Input(name, **dict(entry)) for name, entry in model.inputs.items()), *_constants(model)),
        steps=tuple(_step(name, entry) for name, entry in model.steps.items()),
        outputs={name: parse_wire(text) for name, text in model.outputs.items()},
        limits=Limits(**_fields(model.limits)),
        slo=Slo(**_fields(model.slo)),
        gpu=GpuPolicy(**_fields(model.gpu)),
        file=file,
        base_dir=base_dir,
        lines=document.lines,
        secrets=document.secrets,
    )


def _constants(model: PipelineFile) -> Iterator[Input]:
    """Yield a hidden input for each constant on a port; `/` cannot occur in user-written names."""
    for step, entry in model.steps.items():
        for port, source in entry.inputs.items():
            if isinstance(source, ConstantEntry):
                yield Input(f"{step}/{port}", type_of(source.value), default=source.value, hidden=True)


def parse_wire(text: str) -> Wire:
    """Return the wire written as `step.port`, or as the name of a pipeline input."""
    step, dot, port = text.partition(".")
    return Wire(step, port) if dot else Wire(None, text)


def _step(name: str, entry: StepEntry) -> Step:
    retry, idle = entry.retry, entry.idle
    return Step(
        name=name,
        node=entry.node or "",
        pipeline=entry.pipeline or "",
        options=dict(entry.model_extra or {}),
        inputs={port: _source(name, port, source) for port, source in entry.inputs.items()},
        when=condition.parse(entry.when) if entry.when is not None else None,
        batch=BatchPolicy(**dict(entry.batch)) if entry.batch is not None else None,
        map=entry.map,
        retry=Retry(retry) if isinstance(retry, int) else Retry(**dict(retry)) if retry is not None else None,
        timeout_ms=entry.timeout_ms,
        fallback=entry.fallback,
        idempotent=entry.idempotent,
        finite=entry.finite,
        sequence=SequencePolicy(**dict(entry.sequence)) if entry.sequence is not None else None,
        worker=entry.worker,
        instances=entry.instances,
        reserved=entry.reserved,
        device=entry.device,
        threads=entry.threads,
        device_bytes=entry.device_bytes,
        idle=None if idle is None else IdlePolicy(**dict(idle)) if isinstance(idle, BaseModel) else IdlePolicy(idle),
        run_max_ms=entry.run_max_ms,
    )


def _source(step: str, port: str, written: str | ConstantEntry) -> Wire:
    return parse_wire(written) if isinstance(written, str) else Wire(None, f"{step}/{port}")


def _fields(model: BaseModel | None) -> dict[str, Any]:
    return {} if model is None else dict(model)


def line_of(path: str, lines: Mapping[str, int]) -> int:
    """Return the line of `path` or of its nearest known parent; 0 when unknown."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path, 0)
