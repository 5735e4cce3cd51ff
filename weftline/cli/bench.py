"""Implementation of `weftline bench`."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import weftline
from weftline import errors
from weftline.cli.inputs import STDIN, read_inputs
from weftline.cli.pipeline import counted
from weftline.cli.progress import loading_shown, measuring_shown
from weftline.cli.report import print_report
from weftline.cli.run import check_outputs
from weftline.cli.show import printable
from weftline.engine.bench.arrivals import Closed, Open
from weftline.engine.bench.driver import REQUESTS_MAX
from weftline.engine.bench.hints import hints
from weftline.engine.bench.load import bench
from weftline.engine.bench.made_up import about, made_up
from weftline.engine.bench.report import Report
from weftline.engine.bench.trace import REQUESTS_MAX as TRACED_MAX
from weftline.engine.bench.trace import trace
from weftline.engine.machine import this_machine
from weftline.engine.session import load
from weftline.errors import InputError, WeftlineError
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Plan

VARIANTS = 8
"""How many different inputs are made up; requests take them in turn."""

ROWS_MAX, ROWS_BYTES_MAX = 1000, 512 << 20
"""Most rows of a data file that are used, and most bytes of their decoded arrays; requests take them in turn."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One use of `weftline bench`, as typed."""

    file: str
    load: Closed | Open
    inputs: tuple[str, ...] = ()
    data: Path | None = None
    outputs: tuple[str, ...] | None = None
    duration_s: float = 10.0
    warm_up_s: float = 1.0
    requests_max: int = REQUESTS_MAX
    deadline_ms: float | None = None
    priority: int = 0
    seed: int = 0
    trace: Path | None = None
    json: Path | None = None
    quiet: bool = False


def run_bench(asked: Bench, out: TextIO, err: TextIO) -> None:
    """Print the report on `out`; progress and the names of written files go to `err`.

    Interrupted, it prints what was measured so far and raises KeyboardInterrupt. When no request at all was answered,
    the error of most of them is raised after the report.
    """
    pipeline = load(asked.file)
    check_outputs(pipeline.plan, asked.outputs)
    inputs, told = bench_inputs(pipeline.plan, asked.inputs, asked.data, asked.seed)
    for path in (asked.trace, asked.json):
        _check_writable(path)
    with loading_shown(err, asked.quiet) as progress:
        session = pipeline.open(progress)
    with session, measuring_shown(err, asked.warm_up_s, asked.duration_s, asked.quiet) as measured:
        try:
            report = bench(
                session,
                lambda number: inputs[number % len(inputs)],
                asked.load,
                duration_s=asked.duration_s,
                warm_up_s=asked.warm_up_s,
                requests_max=asked.requests_max,
                deadline_ms=asked.deadline_ms,
                priority=asked.priority,
                outputs=asked.outputs,
                progress=measured,
            )
        except InputError as error:
            raise InputError("\n".join([str(error), *(f"    inputs were {line}" for line in told)])) from None
    plan, ground = pipeline.plan, machine_text()
    found = hints(report, plan, asked.load)
    size = f"{counted(len(plan.steps), 'step')}, {counted(len(plan.workers), 'worker')}"
    print(f"machine     {ground}\npipeline    {plan.name}: {size}", file=out)
    for line in told:
        print(f"inputs      {line}", file=out)
    print_report(report, found, out)
    for failed in report.errors:
        if failed.traceback:
            print(printable(f"{failed.traceback}\n{failed.count} requests: {failed.message}"), file=err)
    _write(asked, report, plan, {"machine": ground, "inputs": told, "hints": found}, err)
    if report.stopped == "interrupted":
        raise KeyboardInterrupt
    _raise_if_all_failed(report)


def machine_text() -> str:
    """Return this machine and the versions that matter, in a line."""
    machine = this_machine()
    gpus = ", ".join(f"{one.name} {size_text(one.memory_bytes)}" for one in machine.devices) or "no GPU"
    has = f"{machine.cores} cores, {size_text(machine.memory_bytes)}, {gpus}, Linux {platform.release()}"
    return f"{has}; weftline {weftline.__version__}, Python {platform.python_version()}, numpy {np.__version__}"


# inputs


def bench_inputs(
    plan: Plan, written: Sequence[str], data: Path | None, seed: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the inputs of requests, to be taken in turn, and what to say about where they come from."""
    told = []
    rows: list[dict[str, Any]] = [read_inputs(plan, written, sys.stdin.buffer, partial=True)]
    if data is not None:
        rows, note = _rows(plan, rows[0], data)
        told.append(f"{len(rows)} rows of {data}{note}, in turn")
    lacking = [
        one
        for one in plan.inputs
        if not (one.hidden or one.optional or one.default is not None) and any(one.name not in row for row in rows)
    ]
    if lacking:
        names = ", ".join(f"{one.name} ({about(plan.input_types[one.name])})" for one in lacking)
        told.append(f"made up, seed {seed}: {names}")
        rows = [
            {**{one.name: made_up(plan, one, seed + variant) for one in lacking}, **row}
            for variant, row in enumerate(rows if data is not None else rows * VARIANTS)
        ]
    return rows, told


def _rows(plan: Plan, given: Mapping[str, Any], data: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a data file with `given` behind them; and what to say when they are not all of it."""
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
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise InputError(f"{where}: not valid json; a row is one json object on one line") from None
                if not isinstance(row, dict):
                    raise InputError(f"{where}: found {type(row).__name__}, expected an object: inputs by name")
                yield where, row
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"--data {data}: {what}") from None


def _written(plan: Plan, name: str, value: Any) -> str:
    """Return a value of a row as it would be written after --input; texts may name files there, as `@photo.png`."""
    type = plan.input_types.get(name)
    if isinstance(value, str):
        if value == STDIN:
            raise InputError(f"input {name}: a row cannot read standard input")
        as_it_is = type is None or type.kind in ("text", "any", "bytes", "image", "audio")
        if as_it_is or (value.startswith("@") and not value.startswith("@@")):
            return f"{name}={value}"
    return f"{name}={json.dumps(value)}"


# what is written


def _check_writable(path: Path | None) -> None:
    """Refuse a file that could not be written, before anything is measured for it."""
    if path is not None and not path.resolve().parent.is_dir():
        raise WeftlineError(f"cannot write {path}: its folder does not exist")


def _write(asked: Bench, report: Report, plan: Plan, more: Mapping[str, Any], err: TextIO) -> None:
    if asked.json is not None:
        options = {"load": dataclasses.asdict(asked.load), "warm_up_s": asked.warm_up_s, "seed": asked.seed}
        made = {"pipeline": plan.name, "options": options, **more, **report.as_json()}
        _write_json(asked.json, made, err)
    if asked.trace is not None:
        shown = min(len(report.outcomes), TRACED_MAX)
        _write_json(asked.trace, trace(report.outcomes, plan), err, f", {shown} requests; open it at ui.perfetto.dev")


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
