"""Event record of a job for progress and report, with bounded memory."""

from __future__ import annotations

import time
from collections.abc import Mapping

from weftline.engine.jobs.progress import JobEnd, Progress, Sample
from weftline.engine.jobs.report.kinds import ErrorKinds
from weftline.engine.jobs.report.pace import Rates
from weftline.engine.jobs.report.sampler import RowSampler
from weftline.engine.jobs.rows import Answerer, BlockResult, RowBlock, RowError
from weftline.engine.jobs.tally import Tally

TRACEBACKS_MAX = 5
"""Most tracebacks of error rows that a job prints."""

WATCH_S = 0.2
"""How often whoever watches is told."""


class Telling:
    """One run of a job as it goes along.

    resumed, expected: rows that earlier runs answered, and rows in all (None: unknown).
    tally, spent:      of all runs, and of this one.
    """

    def __init__(self, resumed: int, errors: int, expected: int | None, tally: Tally, seed: int) -> None:
        self.rows = self.resumed = self.committed = resumed
        self.expected, self.errors, self.tally = expected, errors, tally
        self.kinds, self._sampler = ErrorKinds(), RowSampler(seed=seed)
        self.spent = Tally()
        self._tracebacks: dict[str, str] = {}  # of exceptions that were raised at different lines, each once
        self._untold: list[str] = []
        self._started_s = self._told_s = time.monotonic()
        self._rates = Rates()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def begin(self) -> None:
        """The first row is about to be asked: the clock runs from here."""
        self._started_s = self._told_s = time.monotonic()

    def note(self, block: RowBlock, answered: BlockResult) -> None:
        """Take in what became of a block."""
        self.rows += len(block)
        self.errors += len(answered.errors)
        self.tally.merge(answered.tally)
        self.spent.merge(answered.tally)
        for row, error in answered.errors.items():
            self.kinds.add(str(block.ids[row]), error)
            if error.traceback and len(self._tracebacks) < TRACEBACKS_MAX:
                self._note_traceback(str(block.ids[row]), error)
        places = [block.place_of(row) for row in range(len(block))]
        failed = [row in answered.errors for row in range(len(block))]
        for row in self._sampler.wanted(places, failed):
            self._sampler.offer(places[row], lambda row=row: sample_of(block, answered, row), failed[row])  # type: ignore[misc]
        self._rates.see(self.progress({}))

    def take_tracebacks(self) -> list[str]:
        """Return what is new of the first row's failure at each line of the steps' code, with its traceback."""
        untold, self._untold = self._untold, []
        return untold

    def _note_traceback(self, id: str, error: RowError) -> None:
        raised_at = [line for line in error.traceback.splitlines() if line.startswith("  File ")][-1:]
        key = f"{error.step} {error.error} {raised_at}"
        if key not in self._tracebacks:
            self._tracebacks[key] = error.traceback
            self._untold.append(f"{error.traceback}\nrow {id}: step {error.step}: {error.reason}")

    def commit(self, rows: int) -> None:
        """So many more rows are committed."""
        self.committed += rows

    def due(self) -> bool:
        """Whether whoever watches is to be told now."""
        now_s = time.monotonic()
        if now_s - self._told_s < WATCH_S:
            return False
        self._told_s = now_s
        return True

    def progress(self, figures: Mapping[str, float]) -> Progress:
        return Progress(
            self.rows, self.resumed, self.expected, self.errors, self.committed, self.elapsed_s, dict(figures)
        )

    def end(self, about: Mapping[str, object], answerer: Answerer | None, elapsed_s: float, why: str = "") -> JobEnd:
        """Return what became of the job, which took `elapsed_s`; `about` has the fields that do not change."""
        figures = dict(answerer.figures()) if answerer is not None else {}
        return JobEnd(
            **about,  # type: ignore[arg-type]
            finished=not why, why=why, rows=self.rows, errors=self.errors, resumed=self.resumed,
            elapsed_s=elapsed_s, tally=self.tally, figures=figures, rates=self._rates.points(), spent=self.spent,
            samples=self._sampler.samples(), kinds=self.kinds.kinds(),
        )  # fmt: skip


def sample_of(block: RowBlock, answered: BlockResult, row: int) -> Sample:
    """Return one row of a block with its values and its outputs or error."""
    error = answered.errors.get(row)
    told = f"step {error.step}: {error.reason}" if error and error.step else error.reason if error else ""
    return Sample(
        str(block.ids[row]),
        {name: values[row] for name, values in block.inputs.items()},
        {name: values[row] for name, values in answered.outputs.items()},
        told,
    )
