"""Command `weftline profile`: measure steps and write the profile file.

The file is written after every step, so that an error or Ctrl-C loses only the current step. Figures of other steps and
of other kinds of devices stay in the file while the step's digest is the same.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TextIO

from msgspec import Meta

from weftline.cli.bench import machine_text
from weftline.cli.options import PipelineFile, Verbose
from weftline.cli.plan import counted
from weftline.cli.progress import loading_shown
from weftline.engine.bench.step_alone import StepAlone, opened, sizes
from weftline.engine.flags import Flag
from weftline.engine.machine import this_machine
from weftline.errors import InputError, ModelError, PipelineError, WeftlineError
from weftline.pipelines.check.problems import did_you_mean
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import (
    Measured,
    Profile,
    StepProfile,
    device_kind,
    profile_path,
    read_profile,
    step_digest,
    to_json,
)
from weftline.pipelines.spec.loader import load_file
from weftline.shm.device.names import is_fake, is_gpu

CALLS_MIN = 3
"""Fewest calls of a median."""

COLUMNS = "{:<20} {:<14} {:>6} {:>11} {:>20} {:>11} {:>11} {:>11}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of `weftline profile`."""

    file: PipelineFile
    steps: Annotated[tuple[str, ...], Flag("--steps", "NAME")] = ()
    """Measure only this step; repeatable. Other steps keep their figures."""

    out: Annotated[Path | None, Flag("--out", "OUT")] = None
    """Write here instead of NAME.profile.json beside the pipeline."""

    seconds: Annotated[float, Meta(ge=0.1, le=3600.0), Flag("--seconds")] = 5.0
    """Time to measure each step, in seconds."""

    seed: Annotated[int, Meta(ge=0), Flag("--seed")] = 0
    """Seed of the generated inputs."""

    verbose: Verbose = False


def profile(options: ProfileOptions) -> None:
    """Open each step alone, call it with 1, 2, 4 and up to items_max generated inputs, and write time and memory.

    Later plans read the file, so a pipeline need not state memory that was measured. Measure on a machine and a GPU
    that no other program uses.

    \b
    Examples:
      weftline profile assistant.yaml
      weftline profile assistant.yaml --steps see --seconds 20
    """
    run_profile(options, sys.stdout, sys.stderr)


def run_profile(options: ProfileOptions, out: TextIO, err: TextIO) -> None:
    """Print a table on `out` while it grows; progress, and where the profile is written, go to `err`.

    A step that does not open does not stop the others. PipelineError and InputError before anything is
    opened; ModelError at the end, of the first step that did not open.
    """
    graph, machine = load_file(options.file), this_machine()
    plan = make_plan(graph, machine)
    steps = _chosen(plan, options.steps)
    path = options.out or profile_path(graph)
    if not path.resolve().parent.is_dir():
        raise WeftlineError(f"cannot write {path}: its folder does not exist")
    if path.is_dir():
        raise WeftlineError(f"cannot write {path}: it is a folder\n    fix: name a file in it")
    profile = kept(path, plan, err)
    print(
        f"machine     {machine_text()}\npipeline    {plan.name}: {counted(len(steps), 'step')}, each by itself",
        file=out,
    )
    heads = ("step", "on", "items", "call p50", "p10 to p90", "items/s", "device", "host")
    print("\n" + COLUMNS.format(*heads).rstrip(), file=out, flush=True)
    unopened = list[ModelError]()
    written = False
    for step in steps:
        kind = device_kind(step.device, _model(machine, step.device))
        try:
            with loading_shown(err) as progress, opened(graph, step, machine, options.seed, progress) as alone:
                _measure(alone, options.seconds, err)
                untimed = [str(items) for items in sizes(alone.items_max) if items not in alone.times_ms]
                found, times, failure = alone.measured(), alone.times_ms, alone.failure
                context = alone.context_bytes() if is_gpu(step.device) and not is_fake(step.device) else 0
        except PipelineError as error:
            why = f"{error.problems[0].path}: {error.problems[0].found}"
            print(f"{step.name:<20} cannot be measured by itself: {why}", file=out, flush=True)
            continue
        except ModelError as error:
            print(f"{step.name:<20} does not open: {_first_line(error)}", file=out, flush=True)
            unopened.append(error)
            continue
        _print_rows(step.name, kind, found, times, failure, out)
        if untimed and not failure:
            print(f"{'':<20} no time of {', '.join(untimed)} items, which never shared a call", file=out, flush=True)
        profile = with_measured(profile, step, kind, found, context)
        _write(path, profile)
        written = True
    print(f"wrote {path}" if written else f"nothing was measured; {path} is not written", file=err)
    if unopened:
        raise unopened[0]


def _chosen(plan: Plan, names: Sequence[str]) -> list[PlannedStep]:
    """Return the steps that run in a worker, all or those named; InputError for an unknown name."""
    known = {step.name: step for step in plan.steps if step.workers}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"steps here: {', '.join(known)}"
            raise InputError(f"--steps {name:.80}: no step of {plan.name} that runs in a worker\n    fix: {hint}")
    return [step for step in known.values() if not names or step.name in names]


def kept(path: Path, plan: Plan, err: TextIO) -> Profile:
    """Return the figures of the file that are still valid; an unreadable file is replaced, with a line on `err`."""
    if not path.is_file():
        return Profile()
    try:
        known = read_profile(path)
    except PipelineError:
        print(f"{path} cannot be read, and is replaced", file=err)
        return Profile()
    digests = {step.name: step_digest(step) for step in plan.steps}
    same = {name: one for name, one in known.steps.items() if digests.get(name) == one.digest}
    return Profile(same, known.context_bytes)


def _measure(alone: StepAlone, seconds: float, err: TextIO) -> None:
    """Time the step with every number of items, after one warm-up call of each."""
    counts = sizes(alone.items_max)
    print(f"measuring {alone.step.name}: {', '.join(map(str, counts))} items", file=err, flush=True)
    for items in counts:
        alone.call(items, keep=False)
        until = time.monotonic() + seconds / len(counts)
        calls = 0
        while not alone.failure and (calls < CALLS_MIN or time.monotonic() < until):
            alone.call(items)
            calls += 1
        if alone.failure:
            return


def _print_rows(
    name: str, kind: str, found: Measured, times: Mapping[int, Sequence[float]], failure: str, out: TextIO
) -> None:
    device = size_text(max([found.open_bytes, *found.peak_bytes.values()])) if found.open_bytes else "-"
    memory = (device, size_text(found.host_bytes) if found.host_bytes else "-")
    for items, taken in sorted(times.items()):
        median = statistics.median(taken)
        spread = f"{_quantile(taken, 0.1):.2f} to {_quantile(taken, 0.9):.2f}"
        row = (name, kind, items, f"{median:.2f} ms", spread, f"{items * 1000 / median:.1f}" if median else "-")
        print(COLUMNS.format(*row, *memory).rstrip(), file=out, flush=True)
        name = kind = ""
        memory = ("", "")
    if failure:
        what = "no more times" if times else "no time"
        print(f"{name:<20} {what}: it fails on generated inputs ({failure:.200})", file=out, flush=True)


def with_measured(profile: Profile, step: PlannedStep, kind: str, found: Measured, context_bytes: int) -> Profile:
    """Return the profile with these figures; of contexts the smallest, since other programs of the device add to it."""
    digest = step_digest(step)
    before = profile.steps.get(step.name, StepProfile(digest))
    steps = {**profile.steps, step.name: StepProfile(digest, {**before.on, kind: found})}
    contexts = dict(profile.context_bytes)
    if context_bytes:
        contexts[kind] = min(context_bytes, contexts.get(kind, context_bytes))
    return replace(profile, steps=steps, context_bytes=contexts)


def _write(path: Path, profile: Profile) -> None:
    """Replace the file atomically."""
    made = path.with_name(f".{path.name}.new")
    try:
        made.write_text(to_json(profile), encoding="utf-8")
        made.replace(path)
    except OSError as error:
        raise WeftlineError(f"cannot write {path}: {error.strerror}") from None


def _first_line(error: Exception) -> str:
    return f"{str(error).partition(chr(10))[0]:.200}"


def _model(machine: Machine, device: str) -> str:
    return next((one.model for one in machine.devices if one.name == device), "")


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
