"""HTML report of a job in one self-contained file.

All text from data, models and users is bounded and sanitised here, and escaped by the template. Samples beyond
SAMPLES_BYTES_MAX are replaced by a note.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from weftline.engine.jobs.progress import ErrorKind, JobResult, Sample, bucket_of
from weftline.engine.jobs.report import plots
from weftline.engine.jobs.report.samples import SampleCell, SampleValue, small
from weftline.engine.jobs.report.summary import (
    HEADINGS,
    StepReport,
    cells,
    next_steps,
    outcome,
    rows_per_s,
    step_figures,
    tokens_per_s,
)
from weftline.engine.jobs.report.text import as_name, duration, one_line, rate

TEMPLATE = "report.html.j2"

SAMPLES_BYTES_MAX = 1_200_000
"""Bytes of samples in the page; plots and tables use the rest of 2 MB."""

SAMPLES_MAX, KINDS_MAX, STEPS_MAX, FACTS_MAX = 24, 51, 200, 100
IDS_MAX = 5
NAME_CHARS_MAX, ID_CHARS_MAX, REASON_CHARS_MAX, PATH_CHARS_MAX = 80, 80, 300, 500

LEFT_OUT = SampleValue((SampleCell("left out: the page would be too large"),), absent=True)


def report(end: JobResult) -> str:
    """Render the report. MissingPackage without matplotlib."""
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    page.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    end = replace(end, pipeline=as_name(end.pipeline, NAME_CHARS_MAX))
    steps = step_figures(end)
    return page.from_string(resources.files(__package__).joinpath(TEMPLATE).read_text("utf-8")).render(
        end=end,
        outcome=outcome(end),
        next_steps=next_steps(end),
        headlines=_headlines(end),
        plots=list(_plots(end, steps)),
        steps=[(as_name(one.name, NAME_CHARS_MAX), cells(one)) for one in steps[:STEPS_MAX]],
        step_headings=HEADINGS,
        kinds=[_kind(one) for one in end.kinds[:KINDS_MAX]],
        samples=_samples(end.samples),
        facts=list(_facts(end))[:FACTS_MAX],
    )


def _headlines(end: JobResult) -> list[tuple[str, str, bool]]:
    """Return (label, value, highlight as an error)."""
    headlines = [("rows", _grouped(end.rows), False), ("errors", _grouped(end.errors), end.errors > 0)]
    headlines += [("from earlier runs", _grouped(end.resumed), False)] if end.resumed else []
    headlines += [("time", duration(end.elapsed_s), False), ("rows/s", rate(rows_per_s(end)), False)]
    if "tokens" in end.figures:
        headlines += [("tokens", _grouped(end.figures["tokens"]), False), ("tokens/s", rate(tokens_per_s(end)), False)]
    return headlines


def _plots(end: JobResult, steps: Sequence[StepReport]) -> Iterator[tuple[str, Any]]:
    from markupsafe import Markup

    busy = [(one.name, one.busy, one.busy_s) for one in steps if one.busy is not None]
    longest = sorted(steps, key=lambda one: -one.busy_s)[: plots.PANELS_MAX]
    times = {one.name: end.tally.steps[one.name].run_ms for one in steps if one in longest}
    kinds = [(f"{place}  {one.step or one.error}", one.count) for place, one in enumerate(end.kinds, 1)]
    drawn = (
        ("Throughput", plots.throughput(end.rates)),
        ("Where the time goes", plots.utilisation(busy)),
        (
            "Time of a step, its items in brackets",
            plots.latencies(times),
        ),
        ("Length of text outputs, their number in brackets", plots.lengths(end.tally.lengths)),
        ("Errors by kind, as numbered in the table", plots.errors(kinds)),
    )
    for title, svg in drawn:
        if svg:
            yield title, Markup(svg)  # escaped by matplotlib


@dataclass(frozen=True, slots=True)
class _Kind:
    count: int
    step: str
    error: str
    reason: str
    ids: str


def _kind(kind: ErrorKind) -> _Kind:
    ids = [as_name(id, ID_CHARS_MAX) for id in kind.ids[:IDS_MAX]]
    return _Kind(
        kind.count,
        as_name(kind.step, NAME_CHARS_MAX),
        as_name(kind.error, NAME_CHARS_MAX),
        one_line(kind.reason, REASON_CHARS_MAX),
        ", ".join([*ids, "…"] if kind.count > len(ids) else ids),
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    id: str
    error: str
    values: list[tuple[str, SampleValue]]


def _samples(samples: Sequence[Sample]) -> list[_Sample]:
    """Return the samples of the page, with values up to SAMPLES_BYTES_MAX."""
    left, entries = SAMPLES_BYTES_MAX, []
    for sample in map(small, samples[:SAMPLES_MAX]):
        values = []
        for name, value in (*sample.inputs.items(), *sample.outputs.items()):
            if sample.error and value.absent and name in sample.outputs:
                continue  # failed rows have no outputs
            size = _bytes_of(value)
            if size > left:
                value, size = LEFT_OUT, 0
            left -= size
            values.append((name, value))
        entries.append(_Sample(sample.id, sample.error, values))
    return entries


def _bytes_of(value: SampleValue) -> int:
    """Estimate the bytes of a value in the page, with tags."""
    from markupsafe import escape

    pictures = sum(len(piece.picture.data) * 4 // 3 + 100 for piece in value.pieces if piece.picture is not None)
    return pictures + 60 + sum(len(escape(piece.text).encode()) for piece in value.pieces)


def _facts(end: JobResult) -> Iterator[tuple[str, str]]:
    """Yield the facts of the job: data, files, instances, reproducibility, settings, versions."""
    for name, value in (("data", ", ".join(end.data[:FACTS_MAX])), ("out", end.out), *end.files.items()):
        yield as_name(name, NAME_CHARS_MAX), as_name(value, PATH_CHARS_MAX)
    if end.instances:
        instances = list(end.instances.items())[:STEPS_MAX]
        yield "instances", ", ".join(f"{as_name(step, NAME_CHARS_MAX)} {count}" for step, count in instances)
    for output, kind in end.repeatable.items():
        text = {"exact": "the same bytes in every run", "rounding": "numbers may differ by rounding"}.get(kind, kind)
        yield f"output {as_name(output, NAME_CHARS_MAX)}", as_name(text, NAME_CHARS_MAX)
    for output, counts in end.tally.lengths.items():
        if empty := sum(count for bucket, count in counts.items() if bucket <= bucket_of(0)):
            yield f"output {as_name(output, NAME_CHARS_MAX)}", f"empty in {_grouped(empty)} rows"
    for name, value in end.settings.items():
        if value not in (None, [], {}):
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True, default=str)
            yield as_name(name, NAME_CHARS_MAX), as_name(shown, PATH_CHARS_MAX)
    for name, version in end.versions.items():
        yield as_name(name, NAME_CHARS_MAX), as_name(version, NAME_CHARS_MAX)


def _grouped(count: float) -> str:
    """Return a count with narrow spaces between thousands."""
    return f"{count:,.0f}".replace(",", "\u202f")
