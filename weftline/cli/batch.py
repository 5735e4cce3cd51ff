"""Implementation of `weftline batch`.

Standard output has where the results are, or the figures as json, and nothing else. Progress, the summary and problems
go to standard error.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from weftline.cli.batch_answering import opening_of
from weftline.cli.batch_figures import as_json, is_special, way_on
from weftline.cli.batch_options import BatchRequest
from weftline.cli.batch_report import write_report
from weftline.cli.batch_stop import Interrupts
from weftline.cli.exit import EXIT_INTERRUPTED
from weftline.cli.progress import loading_shown
from weftline.cli.show import finite, printable
from weftline.engine.jobs.progress import JobEnd, Progress
from weftline.errors import StepError, TooManyErrors

if TYPE_CHECKING:
    from weftline.engine.jobs.rows import Answerer
    from weftline.engine.jobs.runners.opening import AnswererFactory
    from weftline.engine.runtime.event_loop import Progress as Loading

ERROR_ROWS = StepError.exit_code
"""Exit code of a job that finished with error rows."""


def run_batch(request: BatchRequest, out: TextIO, err: TextIO) -> int:
    """Run the job and return its exit code: 0, ERROR_ROWS, or EXIT_INTERRUPTED when it was asked to end."""
    if request.dry_run:
        return _show_preview(request, out, err)
    from weftline.engine.jobs.job import run_job

    with _Shown(err, request.quiet) as shown, Interrupts(shown.note) as interrupts:
        try:
            opening = _shown(opening_of(request), err, request.quiet, interrupts)
            end = run_job(request.spec, opening, shown.progress, interrupts.asked, shown.note)
        except TooManyErrors as error:
            shown.close()
            _tell_end(error.end, request, out, err)
            raise
        except KeyboardInterrupt:
            shown.close()
            _say(f"interrupted; {way_on(request.spec)}", err)
            return EXIT_INTERRUPTED
        shown.close()
    _tell_end(end, request, out, err)
    if not end.finished:
        if request.quiet or is_special(request.spec):
            _say(f"interrupted; {way_on(request.spec)}", err)
        return EXIT_INTERRUPTED
    return ERROR_ROWS if end.errors else 0


def _show_preview(request: BatchRequest, out: TextIO, err: TextIO) -> int:
    from weftline.cli.batch_preview import as_text
    from weftline.engine.jobs.preview import preview

    shown = preview(request.spec, _shown(opening_of(request), err, request.quiet))
    print(printable(as_text(shown, request.spec)), end="", file=out, flush=True)
    return 0


def _shown(opening: AnswererFactory, err: TextIO, quiet: bool, interrupts: Interrupts | None = None) -> AnswererFactory:
    """Return an opening that shows how models load, and that from then on a first signal asks and does not end."""

    def opened(progress: Loading | None) -> Answerer:
        if quiet:
            answerer = opening(progress)
        else:
            with loading_shown(err) as progress:
                answerer = opening(progress)
        if interrupts is not None:
            interrupts.under_way()
        return answerer

    return replace(opening, open=opened)


def _tell_end(end: JobEnd, request: BatchRequest, out: TextIO, err: TextIO) -> None:
    """Print the summary and what other programs read, and write the report."""
    if request.report is not None:
        end = write_report(end, request.report, request.spec.out.storage, lambda text: _say(text, err))
    if not request.quiet:
        from weftline.engine.jobs.report.summary import summary

        _say(summary(end).rstrip("\n"), err)
    if request.as_json:
        print(json.dumps(finite(as_json(end)), ensure_ascii=False, allow_nan=False), file=out, flush=True)
    elif end.finished:
        print(end.files.get("results", end.out), file=out, flush=True)


class _Shown:
    """Progress and notes on standard error, until it is closed; a quiet one has only what must be told."""

    def __init__(self, err: TextIO, quiet: bool) -> None:
        from weftline.engine.jobs.report.bar import Teller

        self._teller = None if quiet else Teller(err, time.monotonic)

    def progress(self, progress: Progress) -> None:
        if self._teller is not None:
            self._teller.update(progress)

    def note(self, text: str) -> None:
        if self._teller is not None:
            self._teller.note(text)

    def close(self) -> None:
        """Take the bar away. Safe to call twice."""
        if self._teller is not None:
            self._teller.close()
            self._teller = None

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *end: object) -> None:
        self.close()


def _say(text: str, err: TextIO) -> None:
    with suppress(OSError, ValueError):  # standard error is closed: nobody looks, and the code still tells
        print(printable(text), file=err, flush=True)
