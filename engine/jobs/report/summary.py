"""Outcome of a job in one phrase, and suggested next steps."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weftline.engine.jobs.progress import JobResult
from weftline.engine.jobs.report.text import as_name, counted, duration, milliseconds, one_line, percent, rate

WHY_CHARS_MAX = 400


def outcome(end: JobResult) -> str:
    """Return 'finished', 'finished, 3 rows with errors' or 'stopped: reason'."""
    if not end.finished:
        return f"stopped: {one_line(end.why, WHY_CHARS_MAX) or 'unknown reason'}"
    return f"finished, {counted(end.errors, 'row')} with errors" if end.errors else "finished"


def next_steps(end: JobResult) -> list[str]:
    """Return the suggested next steps, the most urgent first."""
    steps = []
    if not end.finished:
        steps.append("run the same command again: it resumes where this run stopped, and writes every row once")
        if end.errors:
            steps.append(f"after it has finished, --retry-errors runs the {_error_rows(end)} again")
    elif end.errors:
        steps.append(f"run the same command with --retry-errors: it runs only the {_error_rows(end)} again")
    return steps


def _error_rows(end: JobResult) -> str:
    return counted(end.errors, "error row")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step.

    items:      successful items; elements of a `map:` count one by one.
    batches:    calls; batch_mean: items in one, 0 without any.
    p50_ms, p99_ms: time from dispatch to result; None without items.
    busy_s:     compute time of its node in all runs of the job.
    busy:       utilisation of an instance in this run; None for a run without rows.
    """

    name: str
    items: int
    failed: int
    skipped: int
    batches: float
    batch_mean: float
    p50_ms: float | None
    p99_ms: float | None
    busy_s: float
    busy: float | None


def step_figures(end: JobResult) -> list[StepReport]:
    """Return the statistics of all steps, in the tally's order."""
    spent = end.tally if end.spent is None else end.spent
    fresh = end.rows > end.resumed
    found = []
    for name, tally in end.tally.steps.items():
        available_ms = end.elapsed_s * 1000 * max(end.instances.get(name, 1), 1)
        found.append(
            StepReport(
                name=name,
                items=tally.rows,
                failed=tally.failed,
                skipped=tally.skipped,
                batches=tally.batches,
                batch_mean=tally.rows / tally.batches if tally.batches > 0 else 0.0,
                p50_ms=tally.quantile_ms(0.5) if tally.run_ms else None,
                p99_ms=tally.quantile_ms(0.99) if tally.run_ms else None,
                busy_s=tally.busy_ms / 1000,
                busy=min(1.0, spent.of(name).busy_ms / available_ms) if available_ms > 0 and fresh else None,
            )
        )
    return found


def rows_per_s(end: JobResult) -> float:
    """Return the rate of this run."""
    return (end.rows - end.resumed) / end.elapsed_s if end.elapsed_s > 0 else 0.0


def tokens_per_s(end: JobResult) -> float:
    """Return tokens over the time of this run; 0 without tokens."""
    return end.figures.get("tokens", 0.0) / end.elapsed_s if end.elapsed_s > 0 else 0.0


WIDTH = 100
"""Width of the table in characters; long step names are wrapped."""

HEADINGS = ("items", "failed", "skipped", "batches", "mean batch", "p50 ms", "p99 ms", "busy")
"""Headings of the table after the step's name."""

KINDS_SHOWN = 5
IDS_SHOWN = 3
ID_CHARS_MAX = 40
REASON_CHARS_MAX = 160
NAME_CHARS_MAX = 48
PATH_CHARS_MAX = 1000


def summary(end: JobResult, width: int = WIDTH) -> str:
    """Return the summary as plain text, without a line feed at its end."""
    lines = [f"{as_name(end.pipeline, NAME_CHARS_MAX)}: {outcome(end)}", *_headlines(end)]
    steps = step_figures(end)
    if steps:
        lines += ["", *_table(steps, width)]
    for title, found in (("errors", _errors(end)), ("files", _files(end)), ("next", next_steps(end))):
        if listed := [f"  {one}" for one in found]:
            lines += ["", title, *listed]
    return "\n".join(lines)


def _headlines(end: JobResult) -> Iterator[str]:
    resumed = f" ({end.resumed} of them from earlier runs)" if end.resumed else ""
    yield f"  rows    {end.rows}{resumed}: {end.rows - end.errors} ok, {counted(end.errors, 'error')}"
    yield f"  time    {duration(end.elapsed_s)}, {rate(rows_per_s(end))} rows/s"
    if "tokens" in end.figures:
        yield f"  tokens  {end.figures['tokens']:.0f}, {rate(tokens_per_s(end))} tokens/s"


def _table(steps: Iterable[StepReport], width: int) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("step", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in steps:
        table.add_row(one_line(one.name, NAME_CHARS_MAX), *cells(one))
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False, markup=False, emoji=False, color_system=None)
    console.print(table)
    return [f"  {line}".rstrip() for line in text.getvalue().splitlines()]


def cells(one: StepReport) -> tuple[str, ...]:
    """Return the table cells of a step, empty without a figure."""
    return (
        str(one.items),
        str(one.failed),
        str(one.skipped),
        f"{one.batches:.0f}",
        f"{one.batch_mean:.1f}" if one.batches > 0 else "",
        "" if one.p50_ms is None else milliseconds(one.p50_ms),
        "" if one.p99_ms is None else milliseconds(one.p99_ms),
        "" if one.busy is None else percent(one.busy),
    )


def _errors(end: JobResult) -> Iterator[str]:
    """Yield the most frequent kinds with some ids, and how many kinds are left out."""
    for kind in end.kinds[:KINDS_SHOWN]:
        where = " ".join(part for part in (one_line(kind.step, NAME_CHARS_MAX), one_line(kind.error, 80)) if part)
        ids = ", ".join(one_line(id, ID_CHARS_MAX) for id in kind.ids[:IDS_SHOWN])
        more = ", ..." if kind.count > min(len(kind.ids), IDS_SHOWN) else ""
        yield f"{kind.count} x {where}: {one_line(kind.reason, REASON_CHARS_MAX)}" + (f" ({ids}{more})" if ids else "")
    if rest := end.kinds[KINDS_SHOWN:]:
        rows = counted(sum(kind.count for kind in rest), "row")
        yield f"and {rows} of {counted(len(rest), 'more kind')}"


def _files(end: JobResult) -> Iterator[str]:
    widest = max((len(name) for name in end.files), default=0)
    for name, path in end.files.items():
        yield f"{as_name(name, NAME_CHARS_MAX):<{min(widest, NAME_CHARS_MAX)}}  {as_name(path, PATH_CHARS_MAX)}"
