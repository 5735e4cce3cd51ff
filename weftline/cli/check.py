"""Command `weftline check`: every problem of pipeline files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated

import typer

from weftline.cli.options import Gpus, NoImport, PipelineFiles
from weftline.cli.plan import assembled, counted, machine_of
from weftline.engine.flags import Flag
from weftline.errors import PipelineError, Problem
from weftline.nodes.user_code import without_imports
from weftline.pipelines.check.checker import examine, remarks
from weftline.pipelines.check.packages import missing_packages
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.spec.document import is_serve_file, read_file
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of `weftline check`."""

    files: PipelineFiles
    file_only: Annotated[bool, Flag("--file-only")] = False
    """Do not check whether the pipeline fits this machine."""

    gpus: Gpus = None
    no_import: NoImport = False

    def mistakes(self) -> Iterator[str]:
        """Yield options that exclude each other."""
        if self.file_only and self.gpus is not None:
            yield "--file-only and --gpus exclude each other"


def check(options: CheckOptions) -> int:
    """List every problem of pipeline files; nothing is started and no framework is imported.

    Packages that steps need and that are not installed are a note, with the command that installs them all.

    Python files with nodes of the pipeline's own are imported, which runs them: check a stranger's pipeline with
    --no-import.

    \b
    Examples:
      weftline check pipeline.yaml
      weftline check --file-only pipelines/*.yaml
      weftline check --gpus 2:141GiB pipeline.yaml
      weftline check --no-import downloaded.yaml
    """
    failed = 0
    for file in options.files:
        try:
            with without_imports() if options.no_import else nullcontext():
                typer.echo(check_file(file, file_only=options.file_only, gpus=options.gpus))
        except PipelineError as error:
            typer.echo(str(error), err=True)
            failed += 1
    return PipelineError.exit_code if failed else 0


def check_file(file: str, *, file_only: bool, gpus: str | None = None) -> str:
    """Return a line about a valid pipeline or serve file, then its notes; PipelineError lists every problem.

    file_only: do not check devices and memory of this machine.
    gpus:      check for this machine with other GPUs, such as '2:141GiB'.
    """
    if is_serve_file(read_file(file)):
        served = assembled([file], None, gpus)
        return f"{file}: ok ({counted(len(served.config.pipelines), 'pipeline')})"
    pipeline = load_file(file)
    notes = remarks(pipeline)
    if file_only:
        problems = examine(pipeline).problems
        if problems:
            raise PipelineError(problems)
    else:
        plan = _plan_both(pipeline, machine_of(None, gpus))
        steps = tuple(f"{step.name}: " for step in plan.steps)
        notes += [note for note in plan.notes if note.startswith(steps)]
        notes += filter(None, [missing_packages(plan.steps, pipeline.base_dir)])
    counts = [
        counted(sum(not one.hidden for one in pipeline.inputs), "input"),
        counted(len(pipeline.steps), "step"),
        counted(len(pipeline.outputs), "output"),
    ]
    return "\n".join([f"{file}: ok ({', '.join(counts)})", *(f"  {note}" for note in notes)])


def _plan_both(pipeline: Pipeline, machine: Machine) -> Plan:
    """Plan a pipeline with the profile beside it; PipelineError lists the problems of both files at once."""
    profile, problems = None, list[Problem]()
    try:
        profile = profile_beside(pipeline)
    except PipelineError as error:
        problems += error.problems
    try:
        plan = make_plan(pipeline, machine, profile=profile)
    except PipelineError as error:
        raise PipelineError([*problems, *error.problems]) from None
    if problems:
        raise PipelineError(problems)
    return plan
