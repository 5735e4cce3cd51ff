"""Progress display of a job: rates, remaining time, and output on standard error.

Times are seconds of a monotonic clock, passed as arguments. Rows of earlier runs count as done, but not in rates.

`ProgressDisplay` redraws on a terminal and prints lines elsewhere. A closed standard error stops the display, not the
job.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from weftline.engine.jobs.progress import Progress, RatePoint
from weftline.engine.jobs.report.text import duration, harmless, one_line, percent, rate

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


RATE_WINDOW_S = 5.0
"""Window of the displayed rate."""

ETA_WINDOW_S = 60.0
"""Window of the rate behind the remaining time; longer, so that it is stable."""

LINE_EVERY_S = 10.0
"""Interval of log lines."""

DRAW_EVERY_S = 0.2
"""Interval of redraws on a terminal."""

RATE_POINTS_MAX = 240
"""Most points of a job's throughput over time."""

BUSY = "busy:"
"""Prefix of figures with a step's utilisation, from 0 to 1."""


class MovingRate:
    """Rate of a running total over a moving window.

    With rare changes the window extends to the last change before it, so that a job with one block a minute has a rate
    that falls between blocks.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, total: float) -> None:
        """Record a running total."""
        points = self._points
        if points and total == points[-1][1]:
            return
        if len(points) > 2 and now_s - points[-2][0] < self._window_s / 20:
            points.pop()
        points.append((now_s, total))

    def per_s(self, now_s: float) -> float:
        """Return the rate; 0 before the total has changed."""
        points = self._points
        while len(points) > 2 and now_s - points[1][0] >= self._window_s:
            points.popleft()
        if not points or now_s <= points[0][0]:
            return 0.0
        return max(points[-1][1] - points[0][1], 0.0) / (now_s - points[0][0])


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """Progress with its rates. tokens_per_s: None without tokens; eta_s: remaining time, None while unknown."""

    progress: Progress
    rows_per_s: float
    tokens_per_s: float | None = None
    eta_s: float | None = None


class ProgressRate:
    """Computes current rates from a job's progress."""

    def __init__(self) -> None:
        self._rows, self._tokens, self._long = (
            MovingRate(RATE_WINDOW_S),
            MovingRate(RATE_WINDOW_S),
            MovingRate(ETA_WINDOW_S),
        )
        self._begun = False

    def see(self, progress: Progress, now_s: float) -> ProgressSnapshot:
        fresh = progress.rows - progress.resumed
        for one in (self._rows, self._long):
            if not self._begun:
                one.add(now_s - progress.elapsed_s, 0)
            one.add(now_s, fresh)
        self._begun = True
        tokens = progress.figures.get("tokens")
        if tokens is not None:
            self._tokens.add(now_s, tokens)
        return ProgressSnapshot(
            progress,
            self._rows.per_s(now_s),
            None if tokens is None else self._tokens.per_s(now_s),
            eta_s(progress, self._long.per_s(now_s)),
        )


def eta_s(progress: Progress, rows_per_s: float) -> float | None:
    """Return the remaining time at this rate; None if unknown."""
    if progress.expected is None:
        return None
    left = max(progress.expected - progress.rows, 0)
    if not left:
        return 0.0
    return left / rows_per_s if rows_per_s > 0 else None


@dataclass(slots=True)
class Interval:
    """Rate limit of output. at_once: the first time is due."""

    span_s: float
    at_once: bool = False
    _last_s: float | None = None

    def due(self, now_s: float) -> bool:
        if self._last_s is None:
            self._last_s = now_s
            return self.at_once
        if now_s - self._last_s < self.span_s:
            return False
        self._last_s = now_s
        return True


def line(standing: ProgressSnapshot) -> str:
    """Return where a job stands as one line for a log."""
    progress = standing.progress
    parts = [
        f"rows {rows_of(progress)}",
        *rates_of(standing),
        f"errors {progress.errors}",
        f"committed {progress.committed}",
    ]
    if standing.eta_s is not None:
        parts.append(f"ETA {duration(standing.eta_s)}")
    parts += [f"busy {busy}"] if (busy := busy_of(progress)) else []
    return "  ".join(parts)


def rows_of(progress: Progress) -> str:
    """Return '12000/100000 (12.0 %)', or the rows alone if the total is unknown."""
    if progress.expected is None:
        return str(progress.rows)
    of = f"{progress.rows}/{progress.expected}"
    return f"{of} ({percent(min(progress.rows / progress.expected, 1.0))})" if progress.expected > 0 else of


def rates_of(standing: ProgressSnapshot) -> list[str]:
    """Return '1234 rows/s', and '5678 tokens/s' where there are tokens."""
    tokens = [] if standing.tokens_per_s is None else [f"{rate(standing.tokens_per_s)} tokens/s"]
    return [f"{rate(standing.rows_per_s)} rows/s", *tokens]


def busy_of(progress: Progress) -> str:
    """Return 'see 87 %, answer 99 %'; '' without figures."""
    busy = {name.removeprefix(BUSY): share for name, share in progress.figures.items() if name.startswith(BUSY)}
    return ", ".join(f"{one_line(step, 40)} {min(max(share, 0.0), 9.99):.0%}" for step, share in busy.items()).replace(
        "%", " %"
    )


@dataclass(slots=True)
class RateHistory:
    """Throughput over time for the report; merges neighbouring points above `points_max`."""

    points_max: int = RATE_POINTS_MAX
    span_s: float = 1.0
    _marks: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])  # (elapsed, fresh rows), rising

    def see(self, progress: Progress) -> None:
        """Record a progress; within a span of the last point it moves that point."""
        marks, fresh = self._marks, progress.rows - progress.resumed
        if len(marks) > 1 and progress.elapsed_s - marks[-2][0] < self.span_s:
            marks[-1] = (progress.elapsed_s, fresh)
        elif progress.elapsed_s > marks[-1][0]:
            marks.append((progress.elapsed_s, fresh))
        if len(marks) > self.points_max + 1:
            self._marks = [*marks[:-1:2], marks[-1]]
            self.span_s *= 2

    def points(self) -> list[RatePoint]:
        """Return the mean rate of each interval, at its middle."""
        pairs = zip(self._marks, self._marks[1:])
        return [RatePoint((b[0] + a[0]) / 2, (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairs if b[0] > a[0]]


BAR_CELLS = 20
NOTE_CHARS_MAX = 20_000


class ProgressDisplay:
    """Displays progress on a stream; thread-safe. A context manager."""

    def __init__(self, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never go back."""
        self._err, self._clock, self._lock = err, clock, threading.Lock()
        self._pace = ProgressRate()
        self._last: ProgressSnapshot | None = None
        self._printed = ""
        self._closed = False
        self._screen = _Screen(err) if _is_terminal(err) else None
        self._every = Interval(DRAW_EVERY_S, at_once=True) if self._screen else Interval(LINE_EVERY_S)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, progress: Progress) -> None:
        """Record progress, and display it if due."""
        with self._lock:
            if self._closed:
                return
            now_s = self._clock()
            self._last = self._pace.see(progress, now_s)
            if not self._every.due(now_s):
                return
            if self._screen is not None:
                self._try(self._screen.draw, self._last)
            else:
                self._print_last()

    def note(self, text: str) -> None:
        """Print a message above the progress bar."""
        with self._lock:
            self._print(harmless(text, NOTE_CHARS_MAX))

    def close(self) -> None:
        """Print the final progress as a line, and stop. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._screen is not None:
                self._try(self._screen.clear)
                self._screen = None
            self._print_last()

    def _print_last(self) -> None:
        """Print the line of the last update, unless already printed."""
        if self._last is not None and (text := line(self._last)) != self._printed:
            self._printed = text
            self._print(text)

    def _print(self, text: str) -> None:
        if self._screen is not None:
            self._try(self._screen.above, text)
        else:
            self._try(print, text, file=self._err, flush=True)

    def _try(self, show: Callable[..., object], *what: Any, **how: Any) -> None:
        try:
            show(*what, **how)
        except (OSError, ValueError):  # standard error is closed; the job continues
            pass


class _Screen:
    """Lines at the bottom of a terminal, redrawn by `draw`."""

    def __init__(self, err: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Console = Console(file=err, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True,
                          redirect_stdout=False, redirect_stderr=False)  # fmt: skip
        self._started = False

    def draw(self, standing: ProgressSnapshot) -> None:
        if not self._started:
            self._started = True
            self._live.start()
        self._live.update(drawn(standing), refresh=True)

    def above(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def clear(self) -> None:
        if self._started:
            self._live.stop()


def drawn(standing: ProgressSnapshot) -> RenderableType:
    """Render a bar with its figures, and the utilisation of the steps below."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    progress = standing.progress
    parts: list[tuple[str, str]] = [(rows_of(progress), "bold")]
    parts += [(one, "cyan") for one in rates_of(standing)]
    parts += [(f"errors {progress.errors}", "red" if progress.errors else ""), (f"committed {progress.committed}", "")]
    parts += [(f"ETA {duration(standing.eta_s)}", "bold")] if standing.eta_s is not None else []
    figures = Text("  ").join(Text(text, style) for text, style in parts)
    figures.no_wrap, figures.overflow = True, "ellipsis"
    first: RenderableType = figures
    if progress.expected:
        first = Table.grid(padding=(0, 1))
        first.add_row(ProgressBar(progress.expected, min(progress.rows, progress.expected), width=BAR_CELLS), figures)
    busy = busy_of(progress)
    return Group(first, Text(f"busy {busy}", "dim", no_wrap=True, overflow="ellipsis")) if busy else first


def _is_terminal(err: TextIO) -> bool:
    """Return True if lines can be redrawn."""
    try:
        return err.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    except ValueError:  # closed
        return False
