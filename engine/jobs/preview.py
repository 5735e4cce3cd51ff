"""Dry run of a job: mapping, settings and its first rows, without output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from weftline.engine.jobs.blocks import Mark, cut, read_on
from weftline.engine.jobs.preparing import Prepared, prepare
from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.rows import RowBlock, Stop
from weftline.engine.jobs.runners.opening import AnswererFactory
from weftline.engine.jobs.sources.source import open_loader
from weftline.engine.jobs.spec import JobSpec
from weftline.engine.jobs.telling import sample_of
from weftline.pipelines.placement.plan import Plan

ROWS = 3


@dataclass(frozen=True, slots=True)
class Mapped:
    """A pipeline input, its type, and the column it is given with that one's type; '' where it is left out."""

    input: str
    type: str
    column: str
    column_type: str


@dataclass(frozen=True, slots=True)
class Preview:
    """What a job would do.

    mode, why, block_rows, part_rows, repeatable: as in Opening.
    unused:   columns that give no input.
    kept:     input columns that are written too; `columns` are those of the results, with their types.
    expected: rows that are selected; None while unknown.
    format:   of the results; `single_file` when they become one file.
    rows:     the first rows, answered.
    """

    plan: Plan
    mode: str
    why: str
    block_rows: int
    part_rows: int
    repeatable: Mapping[str, str]
    inputs: Sequence[Mapped]
    unused: Sequence[str]
    kept: Sequence[str]
    columns: Mapping[str, str]
    expected: int | None
    format: str
    single_file: bool
    rows: Sequence[Sample]


def preview(spec: JobSpec, opening: AnswererFactory, rows: int = ROWS, stop: Stop = lambda: False) -> Preview:
    """Return what a job would do, with its first rows answered; none when `stop` says so before they are.

    Raises what run_job raises for mistakes in what it was told, and ModelError.
    """
    with prepare(spec, opening) as job:
        ports, schema = job.plan.input_types, job.binding.schema
        mapped = [
            Mapped(name, str(ports[name]), column, str(schema.field(column).type) if column else "")
            for name in (one.name for one in job.plan.inputs if not one.hidden)
            for column in [job.binding.columns.get(name, "")]
        ]
        known = [name for name in schema.names if not name.startswith("weftline:")]
        return Preview(
            job.plan, opening.mode, opening.why, job.block_rows, job.part_rows, opening.repeatable, mapped,
            [name for name in known if name not in job.binding.columns.values()], list(job.kept.names),
            {field.name: str(field.type) for field in job.columns.schema}, job.source.expected, job.format,
            job.single_file, _answered(job, opening, rows, stop),
        )  # fmt: skip


def _answered(job: Prepared, opening: AnswererFactory, rows: int, stop: Stop) -> list[Sample]:
    with open_loader(job.source, job.spec.data) as loader:
        first = next(islice(cut(read_on(job.source, Mark(), 0), rows, rows), 1), None)
        if first is None or stop():
            return []
        block = RowBlock(0, 0, first.ids, job.binding.inputs(first.table, loader), first.table)
        answerer = opening()
        try:
            answered = answerer.ask(block).result()
        finally:
            answerer.close()
        return [sample_of(block, answered, row) for row in range(len(block))]
