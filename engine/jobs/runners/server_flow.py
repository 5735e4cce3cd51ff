"""Congestion window of a remote runner: limits the rows in flight, adapted to refusals.

The rule is that of congestion windows (RFC 5681): the window grows by one with each answer until the first refusal,
then by one with each windowful of answers; a refusal halves it, once for all rows that were under way together. Pure.
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
)

START, MOST = 8, 128
"""Rows under way at first, and at most unless somebody says more: half of what `limits.requests_max` is when nobody
sets it, for usual requests need room too."""


@dataclass(slots=True)
class Window:
    """Counts what is under way.

    most:  largest size.
    fixed: the size never changes.
    """

    size: float = START
    most: int = MOST
    fixed: bool = False
    open: int = 0
    _sent: int = 0
    _cut: int = 0  # rows with a lower number were under way when the window was halved
    _calm: bool = True  # nothing was refused yet

    @property
    def full(self) -> bool:
        """Whether no row may be sent now."""
        return self.open >= int(self.size)

    def send(self) -> int:
        """Count a row out and return its number, which says what was under way together."""
        self.open += 1
        self._sent += 1
        return self._sent

    def back(self, answered: bool) -> None:
        """Count a row in. One that was answered while the window was full makes room for more."""
        grows = answered and self.full and not self.fixed
        self.open -= 1
        if grows:
            self.size = min(float(self.most), self.size + (1.0 if self._calm else 1.0 / self.size))

    def refuse(self, number: int) -> None:
        """Halve the window because the row of that number was refused, if it was sent since it was halved last."""
        if self.fixed or number <= self._cut:
            return
        self.size, self._calm, self._cut = max(1.0, self.size / 2), False, self._sent

    def begin_again(self) -> None:
        """Forget what was learnt: the server is another one now."""
        if not self.fixed:
            self.size, self._calm, self._cut = float(min(START, self.most)), True, self._sent


class WindowQueue:
    """A window, and who waits for room in it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def take(self, order: int) -> int:
        """Wait until one more row may be under way, and return its number; `give` it back whatever happens."""
        while self.window.full:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (order, turn))
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()
                raise
        return self.window.send()

    def give(self, number: int, answered: bool, failed: Retry | None = None) -> None:
        """Take a row back, and what its end says of the window."""
        if failed is not None and failed.window == "half":
            self.window.refuse(number)
        elif failed is not None and failed.window == "first":
            self.window.begin_again()
        self.window.back(answered)
        self._wake()

    def _wake(self) -> None:
        """Let as many rows go on as there is room for."""
        capacity = int(self.window.size) - self.window.open
        while capacity > 0 and self._waiting:
            turn = heapq.heappop(self._waiting)[1]
            if not turn.done():
                turn.set_result(None)
                capacity -= 1


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

WindowHint = Literal["same", "half", "first"]
"""What a failed call says of how many rows may be under way: nothing, too many, or that the server is another now."""

_ENDS_JOB = (UnknownModel, AccessDenied, JobChanged, SessionClosed)


@dataclass(frozen=True, slots=True)
class Retry:
    """The row is sent again after a pause."""

    wait_s: float
    window: WindowHint = "same"


@dataclass(slots=True)
class ServerActivity:
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
class RetryPolicy:
    """One row's."""

    patience_s: float = PATIENCE_S
    _refused: int = 0
    _refused_s: float = 0.0  # when it was first refused
    _others: int = 0  # rows that were answered by then
    _missed: int = 0
    _missed_s: float = 0.0  # when it first reached nobody
    _deaths: int = 0

    def after(
        self, error: WeftlineError, activity: ServerActivity, now_s: float, chance: float = 0.5
    ) -> Retry | RowError:
        """Return when it is sent again, or its error; raise what ends the job.

        chance: from 0 to 1, spreads rows that reached nobody together.
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
            return row_error(LimitReached(f"{error}; so the server said {self._refused} times"))
        if now_s - max(self._refused_s, activity.answered_s) > self.patience_s:
            raise LimitReached(
                f"the server took no row for {self.patience_s:g} s: {_first_line(error)}"
                "\n    fix: run the job again when there is room; it goes on where it stopped"
            )
        return Retry(error.retry_after_s, "half")

    def _miss(self, error: WeftlineError, activity: ServerActivity, now_s: float, chance: float) -> Retry:
        if not self._missed:
            self._missed_s = now_s
        if now_s - max(self._missed_s, activity.alive_s) > self.patience_s:
            raise Unavailable(
                f"no server for {self.patience_s:g} s: {_first_line(error)}"
                "\n    fix: run the job again when it serves; it goes on where it stopped"
            )
        wait_s = min(LONGEST_S, FIRST_S * FACTOR ** min(self._missed, 10)) * (0.5 + chance)
        self._missed += 1
        return Retry(max(wait_s, min(error.retry_after_s, LONGEST_S)), "first")


def _first_line(error: WeftlineError) -> str:
    return str(error).partition("\n")[0]
