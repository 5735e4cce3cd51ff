"""Progress, statistics and result of a job, as values.

Tallies have constant size and can be added. Committed records hold them as JSON, so that a resumed job reports all its
rows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.scheduler.request import StepTiming

BUCKETS_PER_DECADE = 20
"""A bucket is about 12 % wide."""


@dataclass(slots=True)
class StepTally:
    """Statistics of one step.

    rows:    successful items; elements of a `map:` count one by one.
    failed, skipped: failed items, and rows whose condition is false.
    busy_ms: compute time of its node, each batch counted once.
    batches: calls, as a sum of 1 / batch size.
    run_ms:  histogram of the time from dispatch to result, in logarithmic buckets.
    """

    rows: int = 0
    failed: int = 0
    skipped: int = 0
    busy_ms: float = 0.0
    batches: float = 0.0
    run_ms: dict[int, int] = field(default_factory=dict)

    def add(self, run_ms: float, node_ms: float, batch: int, items: int = 1) -> None:
        """Count `items` items that shared a batch of `batch`."""
        batch = max(batch, 1)
        self.rows += items
        self.busy_ms += node_ms * items / batch
        self.batches += items / batch
        bucket = bucket_of(run_ms)
        self.run_ms[bucket] = self.run_ms.get(bucket, 0) + items

    def quantile_ms(self, share: float) -> float:
        """Return a quantile of the run time; 0 without items."""
        left = share * sum(self.run_ms.values())
        for bucket in sorted(self.run_ms):
            left -= self.run_ms[bucket]
            if left <= 0:
                return middle_ms(bucket)
        return 0.0


@dataclass(slots=True)
class Tally:
    """Statistics by step, and length histograms by text output, in characters."""

    steps: dict[str, StepTally] = field(default_factory=dict)
    lengths: dict[str, dict[int, int]] = field(default_factory=dict)

    def of(self, step: str) -> StepTally:
        return self.steps.setdefault(step, StepTally())

    def note(self, timings: Iterable[StepTiming]) -> None:
        """Count the step timings of one request."""
        for one in timings:
            step = self.of(one.step)
            if one.outcome == "skipped":
                step.skipped += 1
            elif one.outcome == "ok":
                step.add(one.run_ms, one.node_ms, one.batch)
            else:
                step.failed += 1

    def length(self, output: str, chars: int) -> None:
        """Count a text output."""
        counts, bucket = self.lengths.setdefault(output, {}), bucket_of(chars)
        counts[bucket] = counts.get(bucket, 0) + 1

    def note_texts(self, outputs: Mapping[str, Sequence[Any]], texts: Iterable[str]) -> None:
        """Count the lengths of the text outputs named `texts`."""
        for name in texts:
            for value in outputs[name]:
                if value is not None:
                    self.length(name, len(value))

    def merge(self, other: Tally) -> None:
        """Add another tally to this one."""
        for name, theirs in other.steps.items():
            ours = self.of(name)
            ours.rows += theirs.rows
            ours.failed += theirs.failed
            ours.skipped += theirs.skipped
            ours.busy_ms += theirs.busy_ms
            ours.batches += theirs.batches
            _merge(ours.run_ms, theirs.run_ms)
        for output, counts in other.lengths.items():
            _merge(self.lengths.setdefault(output, {}), counts)

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": {
                name: {
                    "rows": one.rows, "failed": one.failed, "skipped": one.skipped, "busy_ms": round(one.busy_ms, 3),
                    "batches": round(one.batches, 6), "run_ms": _written(one.run_ms),
                }
                for name, one in self.steps.items()
            },
            "lengths": {name: _written(counts) for name, counts in self.lengths.items()},
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Tally:
        """Parse the value of `to_json`."""
        steps = {
            name: StepTally(
                one["rows"], one["failed"], one["skipped"], one["busy_ms"], one["batches"], _read(one["run_ms"])
            )
            for name, one in value["steps"].items()
        }
        return cls(steps, {name: _read(counts) for name, counts in value["lengths"].items()})


def bucket_of(value: float) -> int:
    """Return the bucket of a time in ms or of a length; values below 0.001 share one."""
    return math.ceil(math.log10(max(value, 0.001)) * BUCKETS_PER_DECADE)


def middle_ms(bucket: int) -> float:
    """Return the value in the middle of a bucket, on the logarithmic scale."""
    return float(10 ** ((bucket - 0.5) / BUCKETS_PER_DECADE))


def _merge(ours: dict[int, int], theirs: Mapping[int, int]) -> None:
    for bucket, count in theirs.items():
        ours[bucket] = ours.get(bucket, 0) + count


def _written(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(bucket): counts[bucket] for bucket in sorted(counts)}


def _read(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(bucket): count for bucket, count in counts.items()}


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a job. Times are of this run; rows are of all runs.

    rows:        completed rows, with error rows.
    resumed:     of these, rows of earlier runs.
    expected:    rows in all; None while unknown.
    errors:      error rows.
    committed:   durable rows.
    elapsed_s:   since the first row of this run.
    figures:     totals of the runner (`JobRunner.figures`).
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
    """Error rows with one step and reason: their number, and the ids of some."""

    step: str
    error: str
    reason: str
    count: int
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class RatePoint:
    """Throughput at one time of this run."""

    elapsed_s: float
    rows_per_s: float


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job: everything in its summary and report.

    pipeline:  its name; `data` and `out` as the user wrote them.
    files:     written paths by kind: `results`, `errors`, `media`, `manifest`.
    finished:  every row has a result or an error; else the job was stopped and can be resumed.
    why:       reason of the stop; '' if it finished.
    rows, errors, resumed, elapsed_s, figures: as in Progress.
    instances: number of instances by step (utilisation is busy_ms over elapsed time and instances).
    repeatable: by output, 'exact' or 'rounding'.
    settings:  settings that determine the results.
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


LATELY_MAX = 1024
"""Most tallies that are kept for it."""

USE_S = 2.0
"""Window of the utilisation."""


def busy(lately: deque[tuple[float, Tally]], instances: Mapping[str, int]) -> dict[str, float]:
    """Return how much each step had to do lately, `busy:STEP` from 0 to 1; older tallies are forgotten."""
    now_s = time.monotonic()
    while lately and lately[0][0] < now_s - USE_S:
        lately.popleft()
    spent: dict[str, float] = {}
    for _, tally in list(lately):
        for name, one in tally.steps.items():
            spent[name] = spent.get(name, 0.0) + one.busy_ms
    return {
        f"busy:{name}": min(1.0, ms / (USE_S * 1000 * count))
        for name, ms in spent.items()
        if (count := instances.get(name, 0))
    }
