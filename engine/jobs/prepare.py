"""Validation of a job before a model loads, and its dry run.

Checks pipeline, data set, column mapping and settings, and creates the manifest.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from weftline.engine.jobs.blocks import ResumePoint, cut, read_on
from weftline.engine.jobs.output.columns import Columns, columns_of
from weftline.engine.jobs.output.fingerprint import pipeline_parts, versions
from weftline.engine.jobs.output.folder import LOCAL
from weftline.engine.jobs.output.layout import SUFFIXES, format_of
from weftline.engine.jobs.output.manifest import Manifest
from weftline.engine.jobs.output.tables import check_columns, stored
from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.recorder import sample_of
from weftline.engine.jobs.rows import RowBlock, Source, Stop
from weftline.engine.jobs.runners.factory import RunnerFactory
from weftline.engine.jobs.runners.plans import required_steps, row_inputs
from weftline.engine.jobs.sources.cells import kept_field, shown_type
from weftline.engine.jobs.sources.formats import alternatives, expanded
from weftline.engine.jobs.sources.inputs import Binding, bind
from weftline.engine.jobs.sources.reader import HIDDEN
from weftline.engine.jobs.sources.source import open_loader, open_source
from weftline.engine.jobs.spec import JobSpec
from weftline.engine.machine import this_machine
from weftline.errors import InputError, PipelineError, Problem
from weftline.pipelines.check.problems import nearest
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.serialisation import to_yaml

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A validated job. Close it, or use it as a context manager.

    kept:        input columns that are copied to the output.
    columns:     of the results.
    format:      of the results; `single_file`: they become one file.
    part_rows, block_rows: the partition.
    manifest:    everything that determines the results.
    """

    spec: JobSpec
    plan: Plan
    source: Source
    binding: Binding
    kept: pa.Schema
    columns: Columns
    format: str
    single_file: bool
    part_rows: int
    block_rows: int
    manifest: Manifest

    @property
    def suffix(self) -> str:
        return SUFFIXES[self.format]

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> PreparedJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def prepare(spec: JobSpec, factory: RunnerFactory) -> PreparedJob:
    """Validate a job; PipelineError and InputError list its mistakes."""
    pipeline = load_file(spec.pipeline)
    plan = make_plan(pipeline, this_machine(), profile=profile_beside(pipeline))
    check_rows_stand_alone(plan, spec.out.outputs)
    format, single_file = format_of(spec.out.out, spec.out.format)
    types = {one.name: one.type for one in plan.outputs}
    names = _chosen("output", spec.out.outputs, list(types))
    if folder := data_around(spec.out.out, [name for one in spec.data.data for name in expanded(one)]):
        raise InputError(
            f"--out {spec.out.out}: is inside the data folder {folder}: the next run would read the results as rows\n"
            "    fix: write elsewhere, or below a name with a leading underscore, which is not read"
        )
    inputs, needed = row_inputs(plan)
    source = open_source(spec.data, optional=[name for name in inputs if name not in (*needed, *spec.data.maps)])
    try:
        binding = bind(source.schema, inputs, needed, spec.data.maps)
        kept = _kept(source.schema, binding, spec.out.keep, format)
        part_rows = spec.out.part_rows or factory.part_rows
        columns = columns_of({name: types[name] for name in names}, kept, "id", spec.out.media)
        check_columns(columns.schema, format)
        columns = replace(columns, schema=stored(columns.schema, format))
        manifest = Manifest(
            pipeline=pipeline_parts(plan) | {"text": to_yaml(pipeline)},
            input=dict(source.fingerprint()),
            settings={
                "columns": dict(binding.columns), "id": spec.data.id, "where": list(spec.data.where),
                "shuffle": spec.data.shuffle, "shard": spec.data.shard, "limit": spec.data.limit,
                "split": spec.data.split, "separator": spec.data.separator, "table_version": spec.data.table_version,
                "outputs": list(names), "keep": kept.names, "media": spec.out.media,
                "part_rows": part_rows, "block_rows": factory.block_rows, "seed": spec.seed, "mode": factory.mode,
            },
            versions=versions(plan),
            schema=str(columns.schema.remove_metadata()),
        )  # fmt: skip
        return PreparedJob(
            spec, plan, source, binding, kept, columns, format, single_file, part_rows, factory.block_rows, manifest
        )
    except BaseException:
        source.close()
        raise


def check_rows_stand_alone(plan: Plan, outputs: Sequence[str] | None) -> None:
    """Raise PipelineError for required steps with sequence state: rows belong to no sequence."""
    remember = [step.name for step in required_steps(plan, outputs) if step.sequence is not None]
    if remember:
        found = "keeps state between the requests of a sequence, and rows of a job belong to no sequence"
        fix = "choose outputs that do not need it, or send the rows to a session or server as sequences"
        raise PipelineError([Problem(f"steps.{name}", found, fix=fix, file=plan.file) for name in remember])


def data_around(out: str, data: Sequence[str]) -> str | None:
    """Return the data folder that contains the output path, None if none does.

    Checks local folders only. Names with a leading dot or underscore are not read as data.
    """
    place = _here(out)
    for argument in data:
        folder = _here(argument)
        if place is None or folder is None or not folder.is_dir() or not place.is_relative_to(folder):
            continue
        if not any(part.startswith((".", "_")) for part in place.relative_to(folder).parts):
            return argument
    return None


def _here(written: str) -> Path | None:
    """Return the resolved local path; None for a URL or no path."""
    protocol, _, path = written.rpartition("://")
    if protocol not in ("", *LOCAL) or not path:
        return None
    return Path(posixpath.expanduser(path)).resolve()


def _kept(schema: pa.Schema, binding: Binding, keep: Sequence[str] | None, format: str) -> pa.Schema:
    """Return the columns to copy, with their types in the results: the named ones, else all but media."""
    import pyarrow as pa

    known = [name for name in schema.names if name not in HIDDEN]
    names = tuple(binding.kept) if keep is None else _chosen("column", keep, known)
    fields = [kept_field(schema.field(name), format == "jsonl") for name in names]
    return pa.schema(fields, metadata=schema.metadata)


def _chosen(what: str, names: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    if names is None:
        return tuple(known)
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if unknown:
        near = [found for name in unknown if (found := nearest(name, known))]
        hint = f"\n    fix: did you mean {', '.join(near)}?" if near else ""
        raise InputError(f"no {what} is called {', '.join(unknown)}; {what}s: {', '.join(known) or 'none'}{hint}")
    return tuple(dict.fromkeys(names))


ROWS = 3


@dataclass(frozen=True, slots=True)
class InputMapping:
    """A pipeline input and the column it is read from, with types; '' if the input is absent."""

    input: str
    type: str
    column: str
    column_type: str


@dataclass(frozen=True, slots=True)
class Preview:
    """Result of a dry run.

    mode, why, block_rows, part_rows, repeatable: as in RunnerFactory.
    unused:   columns that are read for no input.
    kept:     input columns that are copied; `columns`: of the results, with their types.
    expected: number of selected rows; None while unknown.
    format:   of the results; `single_file`: they become one file.
    rows:     the first rows with their results.
    """

    plan: Plan
    mode: str
    why: str
    block_rows: int
    part_rows: int
    repeatable: Mapping[str, str]
    inputs: Sequence[InputMapping]
    unused: Sequence[str]
    kept: Sequence[str]
    columns: Mapping[str, str]
    expected: int | None
    format: str
    single_file: bool
    rows: Sequence[Sample]


def preview(spec: JobSpec, factory: RunnerFactory, rows: int = ROWS, stop: Stop = lambda: False) -> Preview:
    """Validate a job and execute its first rows, none after `stop`.

    Raises the validation errors of run_job, and ModelError.
    """
    with prepare(spec, factory) as job:
        ports, schema = row_inputs(job.plan)[0], job.binding.schema
        mapped = [
            InputMapping(name, str(port), column, _types(schema, column))
            for name, port in ports.items()
            for column in [job.binding.columns.get(name, "")]
        ]
        known = [name for name in schema.names if not name.startswith("weftline:")]
        return Preview(
            job.plan, factory.mode, factory.why, job.block_rows, job.part_rows, factory.repeatable, mapped,
            [name for name in known if name not in job.binding.used], list(job.kept.names),
            {field.name: str(field.type) for field in job.columns.schema}, job.source.expected, job.format,
            job.single_file, _execute_first(job, factory, rows, stop),
        )  # fmt: skip


def _types(schema: pa.Schema, column: str) -> str:
    """Return the type of a column, or of the alternatives `a;b`; '' for no column."""
    each = alternatives(column, schema.names) if column else ()
    return ", ".join(dict.fromkeys(shown_type(schema.field(one)) for one in each))


def _execute_first(job: PreparedJob, factory: RunnerFactory, rows: int, stop: Stop) -> list[Sample]:
    with open_loader(job.source, job.spec.data) as loader:
        first = next(islice(cut(read_on(job.source, ResumePoint(), 0), rows, rows), 1), None)
        if first is None or stop():
            return []
        block = RowBlock(0, 0, first.ids, job.binding.inputs(first.table, loader), first.table)
        runner = factory()
        try:
            answered = runner.submit(block).result()
        finally:
            runner.close()
        return [sample_of(block, answered, row) for row in range(len(block))]
