"""Progress display on standard error: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from weftline.cli.show import printable

if TYPE_CHECKING:
    from weftline.engine.runtime.opening import Progress


@contextmanager
def loading_shown(err: TextIO, quiet: bool = False, *, plain: bool = False) -> Iterator[Progress | None]:
    """Yield a thread-safe callback for (step, phrase, fraction); None when quiet.

    A terminal shows bars that disappear at the end, a log keeps lines.

    plain: lines on a terminal too, for a terminal that a debugger uses.
    """
    if quiet:
        yield None
    elif err.isatty() and not plain:
        with _bars(err) as report:
            yield report
    else:
        yield _lines(err)


@contextmanager
def measuring_shown(
    err: TextIO, warm_up_s: float, duration_s: float, quiet: bool = False
) -> Iterator[Callable[[float, int], None] | None]:
    """Yield a callback for (share of the load that is done, ended requests); None without a terminal."""
    if quiet:
        yield None
        return
    if not err.isatty():
        _print_line(f"measuring for {duration_s:g} s after {warm_up_s:g} s of warm-up", err)
        yield None
        return
    with _bars(err) as report:
        yield lambda share, ended: report("measuring", f"{ended} requests", share)


def _lines(err: TextIO) -> Progress:
    """Return a callback that prints a line whenever a step's phrase changes."""
    printed: dict[str, str] = {}

    def report(step: str, phrase: str, fraction: float) -> None:
        if printed.get(step) == phrase:
            return
        printed[step] = phrase
        _print_line(f"loading {step}: {printable(phrase)}", err)

    return report


def _print_line(line: str, err: TextIO) -> None:
    try:
        print(line, file=err, flush=True)
    except (OSError, ValueError):  # standard error is closed
        pass


@contextmanager
def _bars(err: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TextColumn("{task.fields[phrase]}", markup=False),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(file=err), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(step: str, phrase: str, fraction: float) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=1.0, phrase="")
            bars.update(tasks[step], completed=min(max(fraction, 0.0), 1.0), phrase=printable(phrase))

        yield report
