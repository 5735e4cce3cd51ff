"""Command `weftline batch`: runner, signals, summary, report.

Standard output has the path of the results, or the statistics as JSON. Progress, summary and errors go to standard
error.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from weftline.cli.batch_options import BatchOptions, Via
from weftline.cli.exit import EXIT_INTERRUPTED
from weftline.cli.progress import loading_shown
from weftline.cli.remote import Cluster
from weftline.cli.show import printable
from weftline.engine.jobs.progress import JobResult, Progress, StepTally
from weftline.engine.jobs.spec import JobSpec
from weftline.errors import InputError, MissingPackage, StepError, TooManyErrors
from weftline.pipelines.check.problems import did_you_mean, listed

if TYPE_CHECKING:
    from weftline.engine.jobs.rows import JobRunner
    from weftline.engine.jobs.runners.factory import RunnerFactory
    from weftline.engine.runtime.opening import Progress as Loading


ERROR_ROWS = StepError.exit_code
"""Exit code of a job that finished with error rows."""


def batch(options: BatchOptions) -> int:
    """Run a pipeline over a data set. The same command again resumes an interrupted run.

    Results are committed in parts, every row exactly once. Rows that fail are stored apart, with the reason. Ctrl-C
    stops the job after committing complete parts; a second Ctrl-C stops it at once. Standard output is the path of the
    results. The exit code is 0 when every row has a result, and 5 when the job finished with error rows.

    \b
    Examples:
      weftline batch assistant.yaml --data questions.jsonl --out answers --dry-run
      weftline batch assistant.yaml --data 'rows/*.parquet' --map question=text --id key --out answers.parquet
      weftline batch detect.yaml --data photos/ --out found --errors-max 1% --keep none
      weftline batch assistant.yaml --data s3://bucket/rows/ --shard 2/8 --out s3://bucket/answers-2
      weftline batch assistant.yaml --data questions.jsonl --out answers --via localhost:8001
    """
    return run_batch(options, sys.stdout, sys.stderr)


def run_batch(options: BatchOptions, out: TextIO, err: TextIO) -> int:
    """Run the job and return its exit code: 0, ERROR_ROWS, or EXIT_INTERRUPTED after a signal."""
    if options.dry_run:
        return _show_preview(options, out, err)
    from weftline.engine.jobs.job import run_job

    with _Output(err, options.quiet) as display, Interrupts(display.note) as interrupts:
        try:
            factory = _shown(runner_factory(options), err, options.quiet, interrupts)
            end = run_job(options.job, factory, display.progress, interrupts.asked, display.note)
        except TooManyErrors as error:
            display.close()
            _report_end(error.end, options, out, err)
            raise
        except KeyboardInterrupt:
            display.close()
            _print(f"interrupted; {resume_hint(options.job)}", err)
            return EXIT_INTERRUPTED
        display.close()
    _report_end(end, options, out, err)
    if not end.finished:
        if options.quiet or has_resume_notes(options.job):
            _print(f"interrupted; {resume_hint(options.job)}", err)
        return EXIT_INTERRUPTED
    return ERROR_ROWS if end.errors else 0


def _show_preview(options: BatchOptions, out: TextIO, err: TextIO) -> int:
    from weftline.cli.batch_preview import as_text
    from weftline.engine.jobs.prepare import preview

    shown = preview(options.job, _shown(runner_factory(options), err, options.quiet))
    print(printable(as_text(shown, options.job)), end="", file=out, flush=True)
    return 0


def _shown(factory: RunnerFactory, err: TextIO, quiet: bool, interrupts: Interrupts | None = None) -> RunnerFactory:
    """Return a factory that displays model loading, and then makes the first signal graceful."""

    def opened(progress: Loading | None) -> JobRunner:
        if quiet:
            runner = factory(progress)
        else:
            with loading_shown(err) as progress:
                runner = factory(progress)
        if interrupts is not None:
            interrupts.under_way()
        return runner

    return replace(factory, open=opened)


def _report_end(end: JobResult, options: BatchOptions, out: TextIO, err: TextIO) -> None:
    """Write the report, and print summary and result."""
    if (report := options.report_place) is not None:
        end = write_report(end, report, options.job.out.storage, lambda text: _print(text, err))
    if not options.quiet:
        from weftline.engine.jobs.report.summary import summary

        _print(summary(end).rstrip("\n"), err)
    if options.as_json:
        print(json.dumps(as_json(end), ensure_ascii=False), file=out, flush=True)
    elif end.finished:
        print(end.files.get("results", end.out), file=out, flush=True)


class _Output:
    """Progress and notes on standard error; none if quiet."""

    def __init__(self, err: TextIO, quiet: bool) -> None:
        from weftline.engine.jobs.report.progress_display import ProgressDisplay

        self._display = None if quiet else ProgressDisplay(err, time.monotonic)

    def progress(self, progress: Progress) -> None:
        if self._display is not None:
            self._display.update(progress)

    def note(self, text: str) -> None:
        if self._display is not None:
            self._display.note(text)

    def close(self) -> None:
        """Remove the bar. Idempotent."""
        if self._display is not None:
            self._display.close()
            self._display = None

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *end: object) -> None:
        self.close()


def _print(text: str, err: TextIO) -> None:
    with suppress(OSError, ValueError):  # standard error is closed; the exit code remains
        print(printable(text), file=err, flush=True)


def runner_factory(options: BatchOptions) -> RunnerFactory:
    """Choose the runner of a request; PipelineError lists all problems. Starts no process."""
    spec = options.job
    _check_outputs(spec)
    if options.server.url:
        return _on_server(spec, options.server)
    if options.cluster.engine == "ray":
        return _on_ray(spec, options.cluster)
    from weftline.engine.jobs.runners.factory import local_runner_factory

    return local_runner_factory(spec.pipeline, outputs=spec.out.outputs, seed=spec.seed, block_rows=spec.block_rows)


def _check_outputs(spec: JobSpec) -> None:
    from weftline.pipelines.spec.loader import load_file

    known = list(load_file(spec.pipeline).outputs)
    for name in spec.out.outputs or ():
        if name not in known:
            raise InputError(
                f"--output {name:.80}: the pipeline has no such output; {did_you_mean(name, known)} "
                f"it has {listed(known)}"
            )


def _on_server(spec: JobSpec, server: Via) -> RunnerFactory:
    from weftline.engine.jobs.runners.server_runner import server_runner_factory

    token, tls = server.credentials()
    return server_runner_factory(
        spec.pipeline,
        server.url,
        model=server.model or "",
        token=token,
        tls=tls,
        insecure=server.insecure,
        outputs=spec.out.outputs,
        seed=spec.seed,
        block_rows=spec.block_rows,
    )


def _on_ray(spec: JobSpec, ray: Cluster) -> RunnerFactory:
    """Return replicas planned on the cluster, as this machine may lack their resources.

    A job can resume on a cluster after a local run, and vice versa.
    """
    from weftline.engine.jobs.ray.cluster import Need
    from weftline.engine.jobs.ray.runner import ray_runner_factory

    return ray_runner_factory(
        spec.pipeline,
        outputs=spec.out.outputs,
        seed=spec.seed,
        block_rows=spec.block_rows,
        replicas=ray.replicas or 1,
        need=Need(gpus=ray.gpus_per_replica or 0.0),
        address=ray.address,
    )


STDIN = "-"


def as_json(end: JobResult) -> dict[str, Any]:
    """Return the statistics of a job; times end in _s or _ms."""
    own_rows = end.rows - end.resumed
    return {
        "pipeline": end.pipeline,
        "data": list(end.data),
        "out": end.out,
        "files": dict(end.files),
        "finished": end.finished,
        "why": end.why,
        "rows": end.rows,
        "errors": end.errors,
        "resumed": end.resumed,
        "elapsed_s": round(end.elapsed_s, 3),
        "rows_per_s": round(own_rows / end.elapsed_s, 3) if end.elapsed_s > 0 else 0.0,
        "figures": dict(end.figures),
        "steps": {name: _step_json(one) for name, one in end.tally.steps.items()},
        "error_kinds": [
            {"step": kind.step, "error": kind.error, "reason": kind.reason, "count": kind.count, "ids": list(kind.ids)}
            for kind in end.kinds
        ],
        "repeatable": dict(end.repeatable),
        "versions": dict(end.versions),
    }


def _step_json(step: StepTally) -> dict[str, Any]:
    return {
        "rows": step.rows,
        "failed": step.failed,
        "skipped": step.skipped,
        "batches": round(step.batches, 3),
        "busy_ms": round(step.busy_ms, 3),
        "p50_ms": round(step.quantile_ms(0.5), 3),
        "p99_ms": round(step.quantile_ms(0.99), 3),
    }


def resume_hint(spec: JobSpec) -> str:
    """Return how to resume a stopped job."""
    again = "run the same command" + (" without --restart" if spec.restart else "") + " to resume"
    return again + ("; standard input must start again from the first row" if STDIN in spec.data.data else "")


def has_resume_notes(spec: JobSpec) -> bool:
    """Return True if resuming needs more than the same command."""
    return spec.restart or STDIN in spec.data.data


def write_report(end: JobResult, place: str, storage: Mapping[str, str], note: Callable[[str], None]) -> JobResult:
    """Write the report of a job, and add it to the files of the result.

    Keeps an existing report if this run had no rows left. A failure is a note only, as the results are committed.
    """
    try:
        import fsspec

        files, path = fsspec.core.url_to_fs(place, **storage)
        if not (end.finished and end.rows == end.resumed and files.exists(path)):
            from weftline.engine.jobs.report.page import report

            text = report(end)
            files.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
            with files.transaction, files.open(path, "wb") as file:
                file.write(text.encode("utf-8", "replace"))
        return replace(end, files={**end.files, "report": place})
    except ModuleNotFoundError as error:
        note(f"no report: {MissingPackage(error.name or 'a package', 'batch')}")
    except Exception as error:  # fsspec file systems raise any exception
        note(f"no report at {place}: {type(error).__name__}: {error}")
    return end


ASKED = "interrupted: committing complete parts; interrupt again to stop at once"


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP inside a with statement.

    note: called once by `asked` after the first signal.

    A signal that ends the job raises KeyboardInterrupt in the main thread. Outside the main thread no handler is set.
    An ignored signal stays ignored: SIGINT in background jobs of a shell, SIGHUP under nohup.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._signals = 0
        self._under_way = False
        self._noted = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def under_way(self) -> None:
        """Make the first signal a stop request from now on, as rows are running."""
        self._under_way = True

    def asked(self) -> bool:
        """Return True after a stop options."""
        if self._signals and not self._noted:
            self._noted = True
            self._note(ASKED)
        return self._signals > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Count a signal. Does not print, as it may interrupt a print."""
        self._signals += 1
        if self._signals > 1 or not self._under_way:
            raise KeyboardInterrupt
