"""Text tables of a load report: requests, steps, batches, workers and critical paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from weftline.cli.show import printable
from weftline.engine.bench.critical_path import OUTSIDE_PARTS, TimeBreakdown
from weftline.engine.bench.report import Report, Spread, StepLoad

BAR = 20
"""Width of a full bar, in characters."""

OUTSIDE = {
    "late": "the load was late",
    "before": "before the first step",
    "between": "between steps",
    "after": "after the last step",
}
"""Labels of the time outside of steps."""


def print_report(report: Report, hints: Sequence[str], out: TextIO) -> None:
    """Print a report and its hints. Times are in milliseconds unless labelled otherwise."""
    for line in _lines(report, hints):
        print(printable(line), file=out)
    out.flush()


def _lines(report: Report, hints: Sequence[str]) -> Iterator[str]:
    yield from _requests(report)
    if report.steps:
        yield from _titled("steps, times in ms", _steps(report.steps))
        yield from _titled("batches, share of calls by their number of items", _batches(report.steps))
        yield from _titled("workers, share of the time they were busy", _workers(report))
    if report.where.steps:
        yield from _titled(
            "where the time of an answered request went, in ms on its critical path", _where(report.where)
        )
        yield from _titled("critical paths", _paths(report.where))
    yield from ("", *(f"hint: {hint}" for hint in hints)) if hints else ()


def _requests(report: Report) -> Iterator[str]:
    stopped = f"; stopped: {report.stopped}" if report.stopped else ""
    yield f"load        {report.load}; {report.seconds:.1f} s measured{stopped}"
    kinds = [(report.ok, "ok"), (report.sent - report.ok, "failed")]
    yield f"requests    {report.sent} sent, " + ", ".join(f"{count} {word}" for count, word in kinds)
    for one in report.errors:
        word = {"LimitReached": " (refused)", "DeadlineExceeded": " (expired)"}.get(one.error, "")
        yield f"            {one.count} {one.error}{word}: {' '.join(one.message.split()):.100}"
    yield f"throughput  {report.per_s:.1f} answers/s"
    yield f"latency     {_spread(report.latency)} ms"
    if report.objective_met is not None:
        found = "met" if report.objective_met else "missed"
        yield f"objective   p99 within {report.objective_ms:g} ms (slo.latency_p99_ms): {found}"
    if report.deadline_ms is not None:
        share = report.good / report.sent if report.sent else 0.0
        yield f"goodput     {report.good_per_s:.1f} answers/s within {report.deadline_ms:g} ms: {share:.1%} of requests"
    if report.load.startswith("open"):
        yield f"sent late   {_spread(report.late)} ms"


def _spread(spread: Spread) -> str:
    return f"p50 {_ms(spread.p50)}, p90 {_ms(spread.p90)}, p99 {_ms(spread.p99)}, max {_ms(spread.max)}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned lines: names on the left, numbers to the right below their headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join([name.ljust(widths[0]), *aligned]).rstrip()


def _steps(steps: Sequence[StepLoad]) -> Iterator[str]:
    """Yield a row for each step; counts of rare things that are 0 for all of them are left out."""
    rare = [word for word in ("skipped", "failed", "lost", "again") if any(getattr(one, word) for one in steps)]
    waits = ("queue p50", "p99", "batch wait p50", "p99", "run p50", "p99", "node p50", "batch")
    rows = [["", "items", *waits, *rare]]
    for one in steps:
        spreads = (one.queue, one.batch_wait, one.run)
        figures = [_ms(value) for spread in spreads for value in (spread.p50, spread.p99)]
        figures += [_ms(one.node.p50), f"{one.batch_mean:.1f}"]
        counts = [str(getattr(one, word)) for word in rare]
        rows.append([one.step, str(one.count), *(figures if one.count else [""] * len(figures)), *counts])
    return _table(rows)


def _batches(steps: Sequence[StepLoad]) -> Iterator[str]:
    width = max(len(one.step) for one in steps)
    for one in steps:
        if not one.batches:
            continue
        name = one.step
        for sizes, share in _grouped(one.batches).items():
            yield f"{name:<{width}}  {sizes:>9} {_bar(share)} {share:>4.0%}"
            name = ""


def _grouped(batches: Mapping[int, float]) -> dict[str, float]:
    """Return shares by sizes; more than eight sizes are put together: 1, 2, 3-4, 5-8, 9-16 and so on."""
    if len(batches) <= 8:
        return {str(size): share for size, share in batches.items()}
    groups: dict[str, float] = {}
    for size, share in batches.items():
        top = 1 << (size - 1).bit_length()
        name = str(size) if top <= 2 else f"{top // 2 + 1}-{top}"
        groups[name] = groups.get(name, 0.0) + share
    return groups


def _workers(report: Report) -> Iterator[str]:
    width = max((len(one.worker) for one in report.workers), default=0)
    for one in report.workers:
        steps = "" if one.steps == (one.worker,) else f"  {', '.join(one.steps)}"
        yield f"{one.worker:<{width}}  {_bar(one.busy)} {one.busy:>4.0%}{steps}"


def _where(where: TimeBreakdown) -> Iterator[str]:
    rows = [["", "queue", "batch wait", "node", "hand-over", "together", "share", "on the path"]]
    whole = where.mean_ms or 1.0
    for one in where.steps:
        parts = [_ms(part) for part in (one.queue_ms, one.batch_wait_ms, one.node_ms, one.hand_over_ms, one.total_ms)]
        rows.append([one.step, *parts, f"{one.total_ms / whole:.0%}", f"{one.on_path:.0%}"])
    for kind in OUTSIDE_PARTS:
        if ms := where.outside.get(kind, 0.0):
            rows.append([OUTSIDE[kind], "", "", "", "", _ms(ms), f"{ms / whole:.0%}", ""])
    rows.append(["mean latency", "", "", "", "", _ms(where.mean_ms), "100%", ""])
    return _table(rows)


def _paths(where: TimeBreakdown) -> Iterator[str]:
    for one in where.paths:
        yield f"{one.share:>4.0%}  {_ms(one.mean_ms)} ms  {' > '.join(one.steps) or 'no step'}"


def _titled(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield from ("", title)
    for line in lines:
        yield f"  {line}"


def _bar(share: float) -> str:
    filled = round(min(max(share, 0.0), 1.0) * BAR)
    return "█" * filled + "·" * (BAR - filled)


def _ms(ms: float) -> str:
    """Return milliseconds with as many digits as matter: 0.043, 2.31, 45.2, 1204."""
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"
