"""Output of `weftline batch --dry-run`: plan, column mapping, output files and sample rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.report.samples import shown
from weftline.engine.jobs.report.text import one_line
from weftline.engine.jobs.sources.formats import shown_url
from weftline.engine.jobs.spec import DataSpec, JobSpec
from weftline.pipelines.render.text import explain_text

if TYPE_CHECKING:
    from weftline.engine.jobs.prepare import Preview

VALUE_CHARS_MAX = 160
"""Longest value of a row that is shown."""

MODES = {
    "blocks": "whole blocks: each is one request, cut into batches inside the workers",
    "rows": "row by row",
    "server": "row by row, by a server that runs",
}
EQUAL = {"exact": "the same bytes in every run", "rounding": "the same in every run within rounding"}


def as_text(preview: Preview, spec: JobSpec) -> str:
    """Return a preview as lines for people."""
    parts = [
        explain_text(preview.plan).rstrip("\n"),
        _section("Rows", _rows(preview, spec.data)),
        _section("Columns that become inputs", _table(_mapping(preview), ("input", "type", "column", "type"))),
        _section("How they are answered", _how(preview)),
        _section(
            "Columns that are written", [*_table(list(preview.columns.items()), ("column", "type")), _format(preview)]
        ),
        *(_section(f"Row {_cut(row.id)}", _row(row)) for row in preview.rows),
    ]
    return "\n\n".join(parts) + "\n\nNothing was written.\n"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def _rows(preview: Preview, data: DataSpec) -> list[str]:
    """Return where rows come from and which of them are meant, in the order in which that is decided."""
    lines = [f"from {', '.join(map(shown_url, data.data))}"]
    lines += [f"where {condition}" for condition in data.where]
    lines += [f"shuffled with seed {data.shuffle}"] if data.shuffle is not None else []
    lines += [f"share {data.shard[0]} of {data.shard[1]}"] if data.shard is not None else []
    lines += [f"at most {data.limit}"] if data.limit is not None else []
    return [*lines, f"{preview.expected} in all" if preview.expected is not None else "how many is not known yet"]


def _mapping(preview: Preview) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (one.input, one.type, one.column or "left out", one.column_type) for one in preview.inputs
    ]
    unused = [name for name in preview.unused if name not in preview.kept]
    return rows + ([("", "", f"not read: {', '.join(unused)}", "")] if unused else [])


def _how(preview: Preview) -> list[str]:
    mode = MODES.get(preview.mode, preview.mode) + (f" ({preview.why})" if preview.why else "")
    return [
        mode,
        f"{preview.block_rows} rows to a block, {preview.part_rows} to a part, which is committed together",
        *(f"{name}: {EQUAL.get(how, how)}" for name, how in preview.repeatable.items()),
    ]


def _format(preview: Preview) -> str:
    return f"as {preview.format}, " + ("in one file" if preview.single_file else "a file for each part")


def _row(row: Sample) -> list[str]:
    lines = [*_values(row.inputs, "<-")]
    return lines + ([f"error: {_cut(row.error)}"] if row.error else [*_values(row.outputs, "->")])


def _values(values: Mapping[str, Any], arrow: str) -> Iterator[str]:
    for name, value in values.items():
        texts = [piece.text for piece in shown(value).pieces]
        yield f"{arrow} {name}: {_cut('; '.join(texts))}"


def _cut(text: str) -> str:
    return one_line(text, VALUE_CHARS_MAX)


def _table(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> list[str]:
    """Return aligned lines, the heads first."""
    every = [tuple(heads), *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]
