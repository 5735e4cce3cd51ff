"""Step statistics of a job: counts, durations and histograms of constant size.

Two tallies can be added. Committed records hold them as JSON, so that a resumed job reports on all of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.scheduler.request import StepTiming

BUCKETS_PER_DECADE = 20
"""Times are kept to about 12 %."""


@dataclass(slots=True)
class StepTally:
    """One step.

    rows:    items it answered, elements of a `map:` counted one by one.
    failed, skipped: items that failed, and rows whose condition did not hold.
    busy_ms: time its node was at work, each batch counted once.
    batches: calls, each counted once, as a sum of 1 / batch size.
    run_ms:  items by time from leaving to the result, in buckets by logarithm.
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
        """Return the time that this share of the items took at most; 0 without items."""
        left = share * sum(self.run_ms.values())
        for bucket in sorted(self.run_ms):
            left -= self.run_ms[bucket]
            if left <= 0:
                return middle_ms(bucket)
        return 0.0


@dataclass(slots=True)
class Tally:
    """All steps by name, and the lengths of text outputs by output, in characters and in buckets."""

    steps: dict[str, StepTally] = field(default_factory=dict)
    lengths: dict[str, dict[int, int]] = field(default_factory=dict)

    def of(self, step: str) -> StepTally:
        return self.steps.setdefault(step, StepTally())

    def note(self, timings: Iterable[StepTiming]) -> None:
        """Count what one row's request tells of its steps."""
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
        """Count the texts among outputs: those that are called `texts`, where they are not absent."""
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
    def from_json(cls, said: Mapping[str, Any]) -> Tally:
        """Return what `to_json` wrote."""
        steps = {
            name: StepTally(
                one["rows"], one["failed"], one["skipped"], one["busy_ms"], one["batches"], _read(one["run_ms"])
            )
            for name, one in said["steps"].items()
        }
        return cls(steps, {name: _read(counts) for name, counts in said["lengths"].items()})


def bucket_of(value: float) -> int:
    """Return the bucket of a time in ms or of a length; everything below 0.001 shares one."""
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
