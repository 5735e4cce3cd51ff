"""Result of a job as JSON, and as one sentence after an interruption."""

from __future__ import annotations

from typing import Any

from weftline.engine.jobs.progress import JobEnd
from weftline.engine.jobs.spec import JobSpec
from weftline.engine.jobs.tally import StepTally

STDIN = "-"


def as_json(end: JobEnd) -> dict[str, Any]:
    """Return everything that can be counted about a job; times end in _s or _ms."""
    own_rows = end.rows - end.resumed
    return {
        "pipeline": end.pipeline,
        "data": list(end.data),
        "out": end.out,
        "files": dict(end.files),
        "finished": end.finished,
        "why": end.why,
        "rows": end.rows,
        "errors": end.errors,
        "resumed": end.resumed,
        "elapsed_s": round(end.elapsed_s, 3),
        "rows_per_s": round(own_rows / end.elapsed_s, 3) if end.elapsed_s > 0 else 0.0,
        "figures": dict(end.figures),
        "steps": {name: _step_json(one) for name, one in end.tally.steps.items()},
        "error_kinds": [
            {"step": kind.step, "error": kind.error, "reason": kind.reason, "count": kind.count, "ids": list(kind.ids)}
            for kind in end.kinds
        ],
        "repeatable": dict(end.repeatable),
        "versions": dict(end.versions),
    }


def _step_json(step: StepTally) -> dict[str, Any]:
    return {
        "rows": step.rows,
        "failed": step.failed,
        "skipped": step.skipped,
        "batches": round(step.batches, 3),
        "busy_ms": round(step.busy_ms, 3),
        "p50_ms": round(step.quantile_ms(0.5), 3),
        "p99_ms": round(step.quantile_ms(0.99), 3),
    }


def way_on(spec: JobSpec) -> str:
    """Return how a job that was stopped is gone on with."""
    again = "run the same command" + (" without --restart" if spec.restart else "") + " to go on"
    return again + ("; its rows have to come in again from the first" if STDIN in spec.data.data else "")


def is_special(spec: JobSpec) -> bool:
    """Whether more is to be said about going on than that the same command does."""
    return spec.restart or STDIN in spec.data.data
