"""Progress and end of a job, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.jobs.tally import Tally


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a job stands. Times are of this run; rows are of all runs.

    rows:        answered, error rows among them.
    resumed:     of these, answered by earlier runs.
    expected:    rows in all; None while unknown.
    errors:      error rows.
    committed:   rows that no crash can take back.
    elapsed_s:   since this run began to answer.
    figures:     running totals of the answerer (`Answerer.figures`).
    """

    rows: int
    resumed: int
    expected: int | None
    errors: int
    committed: int
    elapsed_s: float
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows_per_s(self) -> float:
        """Of this run; 0 before the first."""
        return (self.rows - self.resumed) / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A row kept for the report: its id, its inputs and outputs as values (None: absent), or its error."""

    id: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Error rows with one step and reason in common: how many, and the ids of some."""

    step: str
    error: str
    reason: str
    count: int
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class RatePoint:
    """How fast the job was around one moment of this run."""

    elapsed_s: float
    rows_per_s: float


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What became of a job, everything that summary and report show.

    pipeline:  its name; `data` and `out` as the user wrote them.
    files:     what was written, by what it is: `results`, `errors`, `media`, `manifest`.
    finished:  every row has a result or an error; else the job was stopped and can be resumed.
    why:       why it was stopped; '' when it finished.
    rows, errors, resumed, elapsed_s, figures: as in Progress.
    instances: by step, how many instances it has (utilisation is busy_ms over elapsed time and instances).
    repeatable: by output, 'exact' or 'rounding'.
    settings:  what decides the results beside pipeline and data, by name.
    tally:     of all runs; `spent` of this one.
    """

    pipeline: str
    data: Sequence[str]
    out: str
    files: Mapping[str, str]
    finished: bool
    why: str
    rows: int
    errors: int
    resumed: int
    elapsed_s: float
    tally: Tally
    figures: Mapping[str, float] = field(default_factory=dict)
    instances: Mapping[str, int] = field(default_factory=dict)
    repeatable: Mapping[str, str] = field(default_factory=dict)
    rates: Sequence[RatePoint] = ()
    samples: Sequence[Sample] = ()
    kinds: Sequence[ErrorKind] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    spent: Tally | None = None
