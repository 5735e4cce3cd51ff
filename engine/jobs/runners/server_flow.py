"""Flow control and retry policy of the server runner.

`Window` limits the rows in flight as TCP's congestion window does (RFC 5681): it grows by one with each response until
the first refusal, then by one per window of responses. A refusal halves it, once for all rows in flight at that time.

`RetryPolicy` decides for each failed call between a retry, an error row and the end of the job:

    temporary refusal        retry after the server's pause; an error row if others pass and it does not; the job ends
                             when no row passes for `patience_s`
    permanent refusal        an error row: `request_bytes_max`, a result that is too large, and others without a pause
    no server, server ends   retry with growing pauses; the job ends after `patience_s` without a response
    worker died              one retry, as the whole server may have been ending; then an error row
    no such model, no access the job ends
    anything else            an error row

Time is an argument. All but `WindowQueue` is pure.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass
from typing import Literal

from weftline.engine.jobs.rows import RowError, row_error
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
    first_line,
)

START, MOST = 8, 128
"""Initial window, and its largest default: half of the default `limits.requests_max`, for other requests run too."""


@dataclass(slots=True)
class Window:
    """Counts the rows in flight.

    most:  largest size.
    fixed: the size never changes.
    """

    size: float = START
    most: int = MOST
    fixed: bool = False
    open: int = 0
    _sent: int = 0
    _cut: int = 0  # rows with a lower number were in flight when the window was halved
    _calm: bool = True  # no refusal yet

    @property
    def full(self) -> bool:
        """Return True if no row may be sent now."""
        return self.open >= int(self.size)

    def send(self) -> int:
        """Count a sent row and return its sequence number."""
        self.open += 1
        self._sent += 1
        return self._sent

    def back(self, answered: bool) -> None:
        """Count a returned row. A success while the window is full enlarges it."""
        grows = answered and self.full and not self.fixed
        self.open -= 1
        if grows:
            self.size = min(float(self.most), self.size + (1.0 if self._calm else 1.0 / self.size))

    def refuse(self, number: int) -> None:
        """Halve the window for a refused row, if it was sent since the last halving."""
        if self.fixed or number <= self._cut:
            return
        self.size, self._calm, self._cut = max(1.0, self.size / 2), False, self._sent

    def begin_again(self) -> None:
        """Reset the window for another server."""
        if not self.fixed:
            self.size, self._calm, self._cut = float(min(START, self.most)), True, self._sent


class WindowQueue:
    """A window with a priority queue of waiting rows."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def acquire(self, order: int) -> int:
        """Wait until the row may be sent, and return its number for `release`."""
        while self.window.full:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (order, turn))
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()
                raise
        return self.window.send()

    def release(self, number: int, answered: bool, failed: Retry | None = None) -> None:
        """Return a row's slot, and adapt the window to its end."""
        if failed is not None and failed.window == "half":
            self.window.refuse(number)
        elif failed is not None and failed.window == "first":
            self.window.begin_again()
        self.window.back(answered)
        self._wake()

    def _wake(self) -> None:
        """Wake as many rows as the window admits."""
        capacity = int(self.window.size) - self.window.open
        while capacity > 0 and self._waiting:
            turn = heapq.heappop(self._waiting)[1]
            if not turn.done():
                turn.set_result(None)
                capacity -= 1


PATIENCE_S = 300.0
"""Longest wait for a server that restarts."""

REFUSALS_MAX = 32
"""A row with this many refusals, while as many others passed, becomes an error row."""

DEATHS_MAX = 2
"""A row with this many worker deaths becomes an error row."""

DEATH_S = 0.5
"""Pause before the retry after a worker death."""

FIRST_S, LONGEST_S, FACTOR = 0.1, 5.0, 2.0
"""Pause after a failed connection; doubles each time, with a jitter of a half."""

WindowHint = Literal["same", "half", "first"]
"""Effect of a failed call on the window: none, halve, or reset for another server."""

_ENDS_JOB = (UnknownModel, AccessDenied, JobChanged, SessionClosed)


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry after a pause."""

    wait_s: float
    window: WindowHint = "same"


@dataclass(slots=True)
class ServerActivity:
    """Responses of the server over all rows.

    answered:   completed rows, with error rows; the last of them at answered_s.
    alive_s:    time of the last response.
    """

    answered: int = 0
    answered_s: float = 0.0
    alive_s: float = 0.0

    def answer(self, now_s: float) -> None:
        self.answered += 1
        self.answered_s = self.alive_s = now_s


@dataclass(slots=True)
class RetryPolicy:
    """Retry state of one row."""

    patience_s: float = PATIENCE_S
    _refused: int = 0
    _refused_s: float = 0.0  # time of the first refusal
    _others: int = 0  # completed rows at that time
    _missed: int = 0
    _missed_s: float = 0.0  # time of the first failed connection
    _deaths: int = 0

    def after(
        self, error: WeftlineError, activity: ServerActivity, now_s: float, chance: float = 0.5
    ) -> Retry | RowError:
        """Return a retry or the row's error; raises errors that end the job.

        chance: random number from 0 to 1, the jitter of reconnects.
        """
        if isinstance(error, _ENDS_JOB):
            raise error
        if isinstance(error, LimitReached) and error.retry_after_s > 0:
            activity.alive_s = now_s
            return self._refuse(error, activity, now_s)
        if isinstance(error, Unavailable | RequestCancelled):
            died = row_error(WorkerDied(str(error)))
            if not died.step:
                return self._miss(error, activity, now_s, chance)
            activity.alive_s = now_s
            self._deaths += 1
            return died if self._deaths >= DEATHS_MAX else Retry(DEATH_S)
        return row_error(error)

    def _refuse(self, error: LimitReached, activity: ServerActivity, now_s: float) -> Retry | RowError:
        if not self._refused:
            self._refused_s, self._others = now_s, activity.answered
        self._refused += 1
        self._missed = 0
        if self._refused >= REFUSALS_MAX and activity.answered - self._others >= REFUSALS_MAX:
            return row_error(LimitReached(f"{error}; refused {self._refused} times"))
        if now_s - max(self._refused_s, activity.answered_s) > self.patience_s:
            raise LimitReached(
                f"the server accepted no row for {self.patience_s:g} s: {first_line(error)}"
                "\n    fix: run the job again when the server has capacity; it resumes where it stopped"
            )
        return Retry(error.retry_after_s, "half")

    def _miss(self, error: WeftlineError, activity: ServerActivity, now_s: float, chance: float) -> Retry:
        if not self._missed:
            self._missed_s = now_s
        if now_s - max(self._missed_s, activity.alive_s) > self.patience_s:
            raise Unavailable(
                f"no server for {self.patience_s:g} s: {first_line(error)}"
                "\n    fix: run the job again when the server is up; it resumes where it stopped"
            )
        wait_s = min(LONGEST_S, FIRST_S * FACTOR ** min(self._missed, 10)) * (0.5 + chance)
        self._missed += 1
        return Retry(max(wait_s, min(error.retry_after_s, LONGEST_S)), "first")
