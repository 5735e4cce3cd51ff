"""Command `weftline bench`: load generation and its report."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
from msgspec import Meta

import weftline
from weftline import errors
from weftline.cli.inputs import STDIN, read_inputs
from weftline.cli.options import Outputs, PipelineFile, Quiet, Verbose
from weftline.cli.plan import counted
from weftline.cli.progress import loading_shown, measuring_shown
from weftline.cli.report import print_report
from weftline.cli.run import check_outputs
from weftline.cli.show import printable
from weftline.engine.bench.arrivals import Closed, Open
from weftline.engine.bench.load import bench as measure
from weftline.engine.bench.load_generator import REQUESTS_MAX
from weftline.engine.bench.report import Report, hints
from weftline.engine.bench.sample_inputs import sample_input, sample_text
from weftline.engine.bench.trace import REQUESTS_MAX as TRACED_MAX
from weftline.engine.bench.trace import trace
from weftline.engine.flags import Flag
from weftline.engine.machine import this_machine
from weftline.engine.session import load
from weftline.errors import InputError, WeftlineError
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import VALUES, parse
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Plan

VARIANTS = 8
"""Number of different generated inputs; requests use them in turn."""

ROWS_MAX, ROWS_BYTES_MAX = 1000, 512 << 20
"""Most rows of a data file that are used, and most bytes of their decoded arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `weftline bench`."""

    file: PipelineFile
    inputs: Annotated[tuple[str, ...], Flag("--input", "NAME=VALUE", short="-i")] = ()
    """One input of every request, as for run; the others are generated."""

    data: Annotated[Path | None, Flag("--data", "ROWS")] = None
    """JSONL file, one request's inputs by name in each line; lines are used in turn."""

    outputs: Outputs = ()
    closed: Annotated[int | None, Meta(ge=1, le=1024), Flag("--closed")] = None
    """Number of callers that each wait for their answer; 8 by default."""

    rate: Annotated[float | None, Meta(ge=0.001), Flag("--rate")] = None
    """Open load instead of callers: arrivals a second."""

    bursty: Annotated[bool, Flag("--bursty")] = False
    """With --rate: bursts of four times the rate."""

    duration_s: Annotated[float, Meta(ge=0.1, le=86_400.0), Flag("--duration-s")] = 10.0
    """Measured time, in seconds."""

    warm_up_s: Annotated[float, Meta(ge=0.0, le=3600.0), Flag("--warm-up-s")] = 1.0
    """Warm-up before it, in seconds."""

    requests: Annotated[int, Meta(ge=1, le=REQUESTS_MAX), Flag("--requests")] = REQUESTS_MAX
    """Largest number of measured requests."""

    deadline_ms: Annotated[float | None, Meta(ge=0.0), Flag("--deadline-ms")] = None
    """Deadline of every request, in milliseconds."""

    priority: Annotated[int, Meta(ge=-100, le=100), Flag("--priority")] = 0
    """Priority of every request."""

    seed: Annotated[int, Meta(ge=0), Flag("--seed")] = 0
    """Seed of arrival times and of generated inputs."""

    trace: Annotated[Path | None, Flag("--trace", "OUT")] = None
    """Write a trace that opens at ui.perfetto.dev."""

    json: Annotated[Path | None, Flag("--json", "OUT")] = None
    """Write all figures as json."""

    quiet: Quiet = False
    verbose: Verbose = False

    def mistakes(self) -> Iterator[str]:
        """Yield options that exclude each other, or need another."""
        if self.closed is not None and self.rate is not None:
            yield "--closed and --rate exclude each other: callers wait for answers, arrivals do not"
        if self.bursty and self.rate is None:
            yield "--bursty needs --rate, the mean rate of arrivals"

    @property
    def load(self) -> Closed | Open:
        """Load of the pipeline."""
        return Closed(self.closed or 8) if self.rate is None else Open(self.rate, self.bursty, self.seed)


def bench(options: BenchOptions) -> None:
    """Send requests to a pipeline and report latency, steps, batches and critical paths.

    \b
    Examples:
      weftline bench pipeline.yaml --closed 16
      weftline bench pipeline.yaml --rate 200 --bursty --deadline-ms 50 --trace out.json
      weftline bench pipeline.yaml --data rows.jsonl --input photo=@photo.png --requests 500
    """
    run_bench(options, sys.stdout, sys.stderr)


def run_bench(options: BenchOptions, out: TextIO, err: TextIO) -> None:
    """Print the report on `out`; progress and the names of written files go to `err`.

    Interrupted, it prints what was measured so far and raises KeyboardInterrupt. When no request at all was answered,
    the error of most of them is raised after the report.
    """
    pipeline = load(options.file)
    check_outputs(pipeline.plan, options.outputs)
    inputs, sources = bench_inputs(pipeline.plan, options.inputs, options.data, options.seed)
    for path in (options.trace, options.json):
        _check_writable(path)
    with loading_shown(err, options.quiet) as progress:
        session = pipeline.open(progress)
    with session, measuring_shown(err, options.warm_up_s, options.duration_s, options.quiet) as measured:
        try:
            report = measure(
                session,
                lambda number: inputs[number % len(inputs)],
                options.load,
                duration_s=options.duration_s,
                warm_up_s=options.warm_up_s,
                requests_max=options.requests,
                deadline_ms=options.deadline_ms,
                priority=options.priority,
                outputs=options.outputs or None,
                progress=measured,
            )
        except InputError as error:
            raise InputError("\n".join([str(error), *(f"    inputs were {line}" for line in sources)])) from None
    plan, ground = pipeline.plan, machine_text()
    found = hints(report, plan, options.load)
    size = f"{counted(len(plan.steps), 'step')}, {counted(len(plan.workers), 'worker')}"
    print(f"machine     {ground}\npipeline    {plan.name}: {size}", file=out)
    for line in sources:
        print(f"inputs      {line}", file=out)
    print_report(report, found, out)
    for failed in report.errors:
        if failed.traceback:
            print(printable(f"{failed.traceback}\n{failed.count} requests: {failed.message}"), file=err)
    _write(options, report, plan, {"machine": ground, "inputs": sources, "hints": found}, err)
    if report.stopped == "interrupted":
        raise KeyboardInterrupt
    _raise_if_all_failed(report)


def machine_text() -> str:
    """Return this machine and the relevant versions, in a line."""
    machine = this_machine()
    gpus = ", ".join(f"{one.name} {size_text(one.memory_bytes)}" for one in machine.devices) or "no GPU"
    has = f"{machine.cores} cores, {size_text(machine.memory_bytes)}, {gpus}, Linux {platform.release()}"
    return f"{has}; weftline {weftline.__version__}, Python {platform.python_version()}, numpy {np.__version__}"


# inputs


def bench_inputs(
    plan: Plan, written: Sequence[str], data: Path | None, seed: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the inputs of requests, used in turn, and a line about each of their sources."""
    sources = []
    rows: list[dict[str, Any]] = [read_inputs(plan, written, sys.stdin.buffer, partial=True)]
    if data is not None:
        rows, note = _rows(plan, rows[0], data)
        sources.append(f"{len(rows)} rows of {data}{note}, in turn")
    lacking = [
        one
        for one in plan.inputs
        if not (one.hidden or one.optional or one.default is not None) and any(one.name not in row for row in rows)
    ]
    if lacking:
        names = ", ".join(f"{one.name} ({sample_text(plan.input_types[one.name])})" for one in lacking)
        sources.append(f"generated, seed {seed}: {names}")
        rows = [
            {**{one.name: sample_input(plan, one, seed + variant) for one in lacking}, **row}
            for variant, row in enumerate(rows if data is not None else rows * VARIANTS)
        ]
    return rows, sources


def _rows(plan: Plan, given: Mapping[str, Any], data: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a data file on top of `given`, and a note when the file has more."""
    rows: list[dict[str, Any]] = []
    size_bytes = 0
    for where, row in _lines(data):
        if len(rows) == ROWS_MAX or size_bytes > ROWS_BYTES_MAX:
            return rows, f" (the first; at most {ROWS_MAX}, or {size_text(ROWS_BYTES_MAX)} decoded, are used)"
        try:
            decoded = read_inputs(
                plan, [_written(plan, name, one) for name, one in row.items()], sys.stdin.buffer, partial=True
            )
        except InputError as error:
            raise InputError(f"{where}: {str(error).replace('--input ', '')}") from None
        size_bytes += sum(one.nbytes for one in decoded.values() if isinstance(one, np.ndarray))
        rows.append({**given, **decoded})
    if not rows:
        raise InputError(f"{data}: it has no rows")
    return rows, ""


def _lines(data: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with data.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{data}:{number}"
                try:
                    row = parse(line.strip(), VALUES)
                except NotJson as error:
                    fix = "\n    fix: a row is one json object on one line" if error.line else ""
                    raise InputError(f"{where}: {error.at('')}{fix}") from None
                if not isinstance(row, dict):
                    raise InputError(f"{where}: found {type(row).__name__}, expected an object: inputs by name")
                yield where, row
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"--data {data}: {what}") from None


def _written(plan: Plan, name: str, value: Any) -> str:
    """Return a value of a row in the syntax of --input; texts may name files, as `@photo.png`."""
    type = plan.input_types.get(name)
    if isinstance(value, str):
        if value == STDIN:
            raise InputError(f"input {name}: a row cannot read standard input")
        as_it_is = type is None or type.kind in ("text", "any", "bytes", "image", "audio")
        if as_it_is or (value.startswith("@") and not value.startswith("@@")):
            return f"{name}={value}"
    return f"{name}={json.dumps(value)}"


# files


def _check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path is not None and not path.resolve().parent.is_dir():
        raise WeftlineError(f"cannot write {path}: its folder does not exist")


def _write(options: BenchOptions, report: Report, plan: Plan, more: Mapping[str, Any], err: TextIO) -> None:
    if options.json is not None:
        used = {"load": dataclasses.asdict(options.load), "warm_up_s": options.warm_up_s, "seed": options.seed}
        made = {"pipeline": plan.name, "options": used, **more, **report.as_json()}
        _write_json(options.json, made, err)
    if options.trace is not None:
        shown = min(len(report.outcomes), TRACED_MAX)
        _write_json(options.trace, trace(report.outcomes, plan), err, f", {shown} requests; open it at ui.perfetto.dev")


def _write_json(path: Path, made: Mapping[str, Any], err: TextIO, note: str = "") -> None:
    try:
        path.write_text(json.dumps(made), "utf-8")
    except OSError as error:
        raise WeftlineError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}{note}", file=err)


def _raise_if_all_failed(report: Report) -> None:
    if report.ok or not report.errors:
        return
    first = report.errors[0]
    kind = errors.BY_NAME.get(first.error, WeftlineError)
    raise kind(f"no request was answered; {first.count} of {report.sent} failed with: {first.message}")
