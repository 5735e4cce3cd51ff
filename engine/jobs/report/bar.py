"""Live progress on standard error: redrawn on a terminal, plain lines elsewhere.

`Teller.update` is meant to be called often, at least once a second: it draws only when it is time. It may be called
from any thread. A standard error that is closed, or whose reader has gone, silences the teller and not the job.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from weftline.engine.jobs.progress import Progress
from weftline.engine.jobs.report.pace import (
    DRAW_EVERY_S,
    LINE_EVERY_S,
    Every,
    ProgressRate,
    Standing,
    busy_of,
    line,
    rates_of,
    rows_of,
)
from weftline.engine.jobs.report.words import duration, harmless

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BAR_CELLS = 20
NOTE_CHARS_MAX = 20_000


class Teller:
    """Tells a job's progress; `close` tells the last of it. A context manager."""

    def __init__(self, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never go back."""
        self._err, self._clock, self._lock = err, clock, threading.Lock()
        self._pace = ProgressRate()
        self._last: Standing | None = None
        self._said = ""
        self._closed = False
        self._screen = _Screen(err) if _is_terminal(err) else None
        self._every = Every(DRAW_EVERY_S, at_once=True) if self._screen else Every(LINE_EVERY_S)

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, progress: Progress) -> None:
        """Take in where the job stands, and show it when it is time."""
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
                self._say_last()

    def note(self, text: str) -> None:
        """Print a line of its own, above what is drawn."""
        with self._lock:
            self._say(harmless(text, NOTE_CHARS_MAX))

    def close(self) -> None:
        """Print where the job stands at the end as a plain line, and nothing after that. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._screen is not None:
                self._try(self._screen.clear)
                self._screen = None
            self._say_last()

    def _say_last(self) -> None:
        """Print the line of the last update, unless that has been said word for word."""
        if self._last is not None and (text := line(self._last)) != self._said:
            self._said = text
            self._say(text)

    def _say(self, text: str) -> None:
        if self._screen is not None:
            self._try(self._screen.above, text)
        else:
            self._try(print, text, file=self._err, flush=True)

    def _try(self, show: Callable[..., object], *what: Any, **how: Any) -> None:
        try:
            show(*what, **how)
        except (OSError, ValueError):  # standard error is closed: nobody looks, and the job goes on
            pass


class _Screen:
    """The lines at the bottom of a terminal; drawn when told to, never by a thread of its own."""

    def __init__(self, err: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Console = Console(file=err, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True,
                          redirect_stdout=False, redirect_stderr=False)  # fmt: skip
        self._started = False

    def draw(self, standing: Standing) -> None:
        if not self._started:
            self._started = True
            self._live.start()
        self._live.update(drawn(standing), refresh=True)

    def above(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def clear(self) -> None:
        if self._started:
            self._live.stop()


def drawn(standing: Standing) -> RenderableType:
    """Return what a terminal shows: a bar with its figures, and below it how busy the steps are."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    told = standing.progress
    parts: list[tuple[str, str]] = [(rows_of(told), "bold")]
    parts += [(one, "cyan") for one in rates_of(standing)]
    parts += [(f"errors {told.errors}", "red" if told.errors else ""), (f"committed {told.committed}", "")]
    parts += [(f"ETA {duration(standing.eta_s)}", "bold")] if standing.eta_s is not None else []
    figures = Text("  ").join(Text(text, style) for text, style in parts)
    figures.no_wrap, figures.overflow = True, "ellipsis"
    first: RenderableType = figures
    if told.expected:
        first = Table.grid(padding=(0, 1))
        first.add_row(ProgressBar(told.expected, min(told.rows, told.expected), width=BAR_CELLS), figures)
    busy = busy_of(told)
    return Group(first, Text(f"busy {busy}", "dim", no_wrap=True, overflow="ellipsis")) if busy else first


def _is_terminal(err: TextIO) -> bool:
    """Whether lines can be drawn again: TERM is the terminal's own word for what it can."""
    try:
        return err.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    except ValueError:  # closed
        return False
