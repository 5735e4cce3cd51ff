"""Statistics of each step for the summary and the report."""

from __future__ import annotations

from dataclasses import dataclass

from weftline.engine.jobs.progress import JobEnd


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step.

    items:      answered, elements of a `map:` one by one.
    batches:    calls; batch_mean: items in one, 0 without any.
    p50_ms, p99_ms: from leaving for the worker to the result, over all items; None without any.
    busy_s:     time its node was at work, in all runs of the job.
    busy:       share of this run that one instance was at work; None for a run that answered nothing.
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


def step_figures(end: JobEnd) -> list[StepReport]:
    """Return the figures of all steps, in the tally's order."""
    spent = end.tally if end.spent is None else end.spent
    fresh = end.rows > end.resumed
    found = []
    for name, tally in end.tally.steps.items():
        room_ms = end.elapsed_s * 1000 * max(end.instances.get(name, 1), 1)
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
                busy=min(1.0, spent.of(name).busy_ms / room_ms) if room_ms > 0 and fresh else None,
            )
        )
    return found


def rows_per_s(end: JobEnd) -> float:
    """Return the rate of this run."""
    return (end.rows - end.resumed) / end.elapsed_s if end.elapsed_s > 0 else 0.0


def tokens_per_s(end: JobEnd) -> float:
    """Return tokens over the time of this run; 0 without tokens."""
    return end.figures.get("tokens", 0.0) / end.elapsed_s if end.elapsed_s > 0 else 0.0
