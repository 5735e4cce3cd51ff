"""Statistics of a running job for progress and report, with bounded memory.

Error rows are grouped by kind: reasons that differ only in numbers and quoted parts are one kind. The most frequent
kinds are reported, and the rest is counted together.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from weftline.engine.jobs.progress import ErrorKind, JobResult, Progress, Sample, Tally
from weftline.engine.jobs.report.progress_display import RateHistory
from weftline.engine.jobs.report.samples import RowSampler
from weftline.engine.jobs.report.text import counted
from weftline.engine.jobs.rows import BlockResult, JobRunner, RowBlock, RowError

KINDS_MAX = 50
SPARE = 8
"""Kinds counted per kind reported: frequent kinds may appear late."""

IDS_MAX = 5
REASON_CHARS_MAX = 300
ID_CHARS_MAX = 200

OTHER = "other"
"""The error name of the remaining kinds."""

_QUOTED = re.compile(r"""(?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*"|`[^`\n]*`""")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d+(?:[.,_]\d+)*(?:[eE][+-]?\d+)?")


def common(reason: str) -> str:
    """Normalise a reason: quoted parts become '…', numbers become N, also in names such as `float32`."""
    return _NUMBER.sub("N", _QUOTED.sub("'…'", reason[:REASON_CHARS_MAX]))


@dataclass(slots=True)
class _Counted:
    reason: str
    count: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, id: str) -> None:
        self.count += 1
        if len(self.ids) < IDS_MAX:
            self.ids.append(_cut(id, ID_CHARS_MAX))


class ErrorKinds:
    """Counts error rows by kind."""

    def __init__(self, most: int = KINDS_MAX) -> None:
        """most: kinds reported, without the rest."""
        self._most = most
        self._kinds: dict[tuple[str, str, str], _Counted] = {}
        self._rest = _Counted("")

    def add(self, id: str, error: RowError) -> None:
        """Count an error row."""
        key = (_cut(error.step, ID_CHARS_MAX), _cut(error.error, ID_CHARS_MAX), common(error.reason))
        reason = _cut(error.reason, REASON_CHARS_MAX)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= self._most * SPARE:
                self._rest.add(id)
                return
            kind = self._kinds[key] = _Counted(reason)
        elif kind.reason != reason:
            kind.reason = key[2]
        kind.add(id)

    def kinds(self) -> list[ErrorKind]:
        """Return the most frequent kinds, most rows first, and the rest as one kind `other`.

        The reason is verbatim if all rows share it, else normalised.
        """
        ranked = sorted(self._kinds.items(), key=lambda item: (-item[1].count, item[0]))
        kinds_found = [
            ErrorKind(step, error, kind.reason, kind.count, tuple(kind.ids))
            for (step, error, _), kind in ranked[: self._most]
        ]
        left = [kind for _, kind in ranked[self._most :]]
        count = self._rest.count + sum(kind.count for kind in left)
        if count:
            ids = [id for kind in (*left, self._rest) for id in kind.ids][:IDS_MAX]
            kinds_found.append(ErrorKind("", OTHER, f"{counted(count, 'row')} with rarer reasons", count, tuple(ids)))
        return kinds_found


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[:chars_max] + "…"


TRACEBACKS_MAX = 5
"""Most tracebacks of error rows printed per job."""

WATCH_S = 0.2
"""Interval of progress reports."""


class JobRecorder:
    """Statistics of one run of a job.

    resumed, expected: rows of earlier runs, and rows in all (None: unknown).
    tally, spent:      of all runs, and of this run.
    """

    def __init__(self, resumed: int, errors: int, expected: int | None, tally: Tally, seed: int) -> None:
        self.rows = self.resumed = self.committed = resumed
        self.expected, self.errors, self.tally = expected, errors, tally
        self.kinds, self._sampler = ErrorKinds(), RowSampler(seed=seed)
        self.spent = Tally()
        self._tracebacks: dict[str, str] = {}  # one for each line that raised
        self._unreported: list[str] = []
        self._started_s = self._reported_s = time.monotonic()
        self._rates = RateHistory()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def begin(self) -> None:
        """Start the clock before the first row."""
        self._started_s = self._reported_s = time.monotonic()

    def note(self, block: RowBlock, answered: BlockResult) -> None:
        """Record the result of a block."""
        self.rows += len(block)
        self.errors += len(answered.errors)
        self.tally.merge(answered.tally)
        self.spent.merge(answered.tally)
        for row, error in answered.errors.items():
            self.kinds.add(str(block.ids[row]), error)
            if error.traceback and len(self._tracebacks) < TRACEBACKS_MAX:
                self._note_traceback(str(block.ids[row]), error)
        row_numbers = [block.row_number_of(row) for row in range(len(block))]
        failed = [row in answered.errors for row in range(len(block))]
        for row in self._sampler.wanted(row_numbers, failed):
            self._sampler.offer(row_numbers[row], lambda row=row: sample_of(block, answered, row), failed[row])  # type: ignore[misc]
        self._rates.see(self.progress({}))

    def pop_tracebacks(self) -> list[str]:
        """Return new tracebacks: the first failure at each line of the steps' code."""
        untold, self._unreported = self._unreported, []
        return untold

    def _note_traceback(self, id: str, error: RowError) -> None:
        raised_at = [line for line in error.traceback.splitlines() if line.startswith("  File ")][-1:]
        key = f"{error.step} {error.error} {raised_at}"
        if key not in self._tracebacks:
            self._tracebacks[key] = error.traceback
            self._unreported.append(f"{error.traceback}\nrow {id}: step {error.step}: {error.reason}")

    def commit(self, rows: int) -> None:
        """Count committed rows."""
        self.committed += rows

    def due(self) -> bool:
        """Return True if a progress report is due."""
        now_s = time.monotonic()
        if now_s - self._reported_s < WATCH_S:
            return False
        self._reported_s = now_s
        return True

    def progress(self, figures: Mapping[str, float]) -> Progress:
        return Progress(
            self.rows, self.resumed, self.expected, self.errors, self.committed, self.elapsed_s, dict(figures)
        )

    def end(self, about: Mapping[str, object], runner: JobRunner | None, elapsed_s: float, why: str = "") -> JobResult:
        """Return the result of the job. about: the fields that do not change during a run."""
        figures = dict(runner.figures()) if runner is not None else {}
        return JobResult(
            **about,  # type: ignore[arg-type]
            finished=not why, why=why, rows=self.rows, errors=self.errors, resumed=self.resumed,
            elapsed_s=elapsed_s, tally=self.tally, figures=figures, rates=self._rates.points(), spent=self.spent,
            samples=self._sampler.samples(), kinds=self.kinds.kinds(),
        )  # fmt: skip


def sample_of(block: RowBlock, answered: BlockResult, row: int) -> Sample:
    """Return one row of a block with its inputs, and its outputs or error."""
    error = answered.errors.get(row)
    failure = f"step {error.step}: {error.reason}" if error and error.step else error.reason if error else ""
    return Sample(
        str(block.ids[row]),
        {name: values[row] for name, values in block.inputs.items()},
        {name: values[row] for name, values in answered.outputs.items()},
        failure,
    )
