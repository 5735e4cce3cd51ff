"""Outcome of a job in one phrase, and suggested next steps."""

from __future__ import annotations

from weftline.engine.jobs.progress import JobEnd
from weftline.engine.jobs.report.words import counted, one_line

WHY_CHARS_MAX = 400


def outcome(end: JobEnd) -> str:
    """Return 'finished', 'finished, 3 rows with errors' or 'stopped: why'."""
    if not end.finished:
        return f"stopped: {one_line(end.why, WHY_CHARS_MAX) or 'no reason was given'}"
    return f"finished, {counted(end.errors, 'row')} with errors" if end.errors else "finished"


def next_steps(end: JobEnd) -> list[str]:
    """Return sentences, the most urgent first; none for a job that is done with."""
    said = []
    if not end.finished:
        said.append("run the same command again: it goes on where this run stopped, and every row is written once")
        if end.errors:
            said.append(f"once it has finished, --retry-errors runs the {_error_rows(end)} again")
    elif end.errors:
        said.append(f"run the same command with --retry-errors: it runs the {_error_rows(end)} again and nothing else")
    return said


def _error_rows(end: JobEnd) -> str:
    return counted(end.errors, "error row")
