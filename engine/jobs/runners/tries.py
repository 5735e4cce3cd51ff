"""Retry policy for rows sent to a server: retry, error row or job failure.

    refused for now          again after the pause that the server asked for; an error row when others pass and it does
                             not; the job stops when nobody passes for `patience_s`
    refused for good         an error row: `request_bytes_max`, an answer that is too large, and whatever else says
                             nothing of later
    no server, one that ends again with a growing pause; the job stops after `patience_s` without a sign of life
    its worker died          once more, for the whole server may have been ending; then an error row
    no such model, no access the job stops
    anything else            an error row

Time comes in as an argument. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weftline.engine.jobs.rows import RowError
from weftline.engine.jobs.runners.each_row import row_error
from weftline.errors import (
    AccessDenied,
    JobChanged,
    LimitReached,
    RequestCancelled,
    SessionClosed,
    Unavailable,
    UnknownModel,
    WeftlineError,
    WorkerDied,
)

PATIENCE_S = 300.0
"""How long a job waits for a server that is being started again."""

REFUSALS_MAX = 32
"""A row that was refused so often, while so many others were answered, will never pass."""

DEATHS_MAX = 2
"""How often a row may meet a worker that dies."""

DEATH_S = 0.5
"""Pause before a row that has met one is sent again."""

FIRST_S, LONGEST_S, FACTOR = 0.1, 5.0, 2.0
"""Pause before a server that was not reached is asked again; it doubles each time. With jitter of a half."""

Window = Literal["same", "half", "first"]
"""What a failed call says of how many rows may be under way: nothing, too many, or that the server is another now."""

_ENDS_JOB = (UnknownModel, AccessDenied, JobChanged, SessionClosed)


@dataclass(frozen=True, slots=True)
class Again:
    """The row is sent again after a pause."""

    wait_s: float
    window: Window = "same"


@dataclass(slots=True)
class Heard:
    """What was heard of the server by now, over all rows.

    answered:   rows that it answered, error rows among them; the last of them at answered_s.
    alive_s:    when it last said anything.
    """

    answered: int = 0
    answered_s: float = 0.0
    alive_s: float = 0.0

    def answer(self, now_s: float) -> None:
        self.answered += 1
        self.answered_s = self.alive_s = now_s


@dataclass(slots=True)
class Tries:
    """One row's."""

    patience_s: float = PATIENCE_S
    _refused: int = 0
    _refused_s: float = 0.0  # when it was first refused
    _others: int = 0  # rows that were answered by then
    _missed: int = 0
    _missed_s: float = 0.0  # when it first reached nobody
    _deaths: int = 0

    def after(self, error: WeftlineError, heard: Heard, now_s: float, chance: float = 0.5) -> Again | RowError:
        """Return when it is sent again, or its error; raise what ends the job.

        chance: from 0 to 1, spreads rows that reached nobody together.
        """
        if isinstance(error, _ENDS_JOB):
            raise error
        if isinstance(error, LimitReached) and error.retry_after_s > 0:
            heard.alive_s = now_s
            return self._refuse(error, heard, now_s)
        if isinstance(error, Unavailable | RequestCancelled):
            died = row_error(WorkerDied(str(error)))
            if not died.step:
                return self._miss(error, heard, now_s, chance)
            heard.alive_s = now_s
            self._deaths += 1
            return died if self._deaths >= DEATHS_MAX else Again(DEATH_S)
        return row_error(error)

    def _refuse(self, error: LimitReached, heard: Heard, now_s: float) -> Again | RowError:
        if not self._refused:
            self._refused_s, self._others = now_s, heard.answered
        self._refused += 1
        self._missed = 0
        if self._refused >= REFUSALS_MAX and heard.answered - self._others >= REFUSALS_MAX:
            return row_error(LimitReached(f"{error}; so the server said {self._refused} times"))
        if now_s - max(self._refused_s, heard.answered_s) > self.patience_s:
            raise LimitReached(
                f"the server took no row for {self.patience_s:g} s: {_first_line(error)}"
                "\n    fix: run the job again when there is room; it goes on where it stopped"
            )
        return Again(error.retry_after_s, "half")

    def _miss(self, error: WeftlineError, heard: Heard, now_s: float, chance: float) -> Again:
        if not self._missed:
            self._missed_s = now_s
        if now_s - max(self._missed_s, heard.alive_s) > self.patience_s:
            raise Unavailable(
                f"no server for {self.patience_s:g} s: {_first_line(error)}"
                "\n    fix: run the job again when it serves; it goes on where it stopped"
            )
        wait_s = min(LONGEST_S, FIRST_S * FACTOR ** min(self._missed, 10)) * (0.5 + chance)
        self._missed += 1
        return Again(max(wait_s, min(error.retry_after_s, LONGEST_S)), "first")


def _first_line(error: WeftlineError) -> str:
    return str(error).partition("\n")[0]
