"""Implementation of `weftline check` and `weftline plan`."""

from __future__ import annotations

import dataclasses

from weftline.engine.machine import this_machine
from weftline.errors import PipelineError, Problem
from weftline.pipelines.check.checker import examine, remarks
from weftline.pipelines.placement.machine import Machine, made_up_gpus
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file


def check_file(file: str, *, file_only: bool, gpus: str | None = None) -> str:
    """Return a line about a sound pipeline, then its notes; PipelineError lists every problem.

    file_only: whether it fits this machine (its devices, its memory) is left out.
    gpus:      whether it fits this machine with other GPUs, such as '2:141GiB'.
    """
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


def explained(file: str, form: str, cores: int | None, gpus: str | None = None) -> str:
    """Return the plan of a pipeline file as `text`, `mermaid` or `svg`; with GPUs made up, it says so first."""
    machine, pipeline = machine_of(cores, gpus), load_file(file)
    plan = make_plan(pipeline, machine, profile=profile_beside(pipeline))
    made_up = f"Planned for a made-up machine: {_described(machine)}" if gpus is not None else ""
    if form == "svg":
        from weftline.pipelines.render.svg import explain_svg

        text = explain_svg(dataclasses.replace(plan, name=f"{plan.name} ({made_up})") if made_up else plan)
    else:
        from weftline.pipelines.render.text import explain_mermaid, explain_text

        text = explain_mermaid(plan) if form == "mermaid" else explain_text(plan)
        if made_up:
            text = f"%% {made_up}\n{text}" if form == "mermaid" else f"{made_up}\n\n{text}"
    return text if text.endswith("\n") else text + "\n"


def machine_of(cores: int | None, gpus: str | None) -> Machine:
    """Return this machine, with so many cores and such GPUs instead of its own; InputError when GPUs make no sense."""
    machine = this_machine()
    if cores is not None:
        machine = dataclasses.replace(machine, cores=cores)
    return machine if gpus is None else dataclasses.replace(machine, devices=made_up_gpus(gpus))


def _described(machine: Machine) -> str:
    parts = [counted(machine.cores, "core"), f"{size_text(machine.memory_bytes)} of memory"]
    if machine.devices:
        model = machine.devices[0].model
        each = f"{size_text(machine.devices[0].memory_bytes)}{' each' if len(machine.devices) > 1 else ''}"
        parts.append(f"{counted(len(machine.devices), 'GPU')} of {each}{f' ({model})' if model else ''}")
    return ", ".join(parts if machine.devices else [*parts, "no GPU"])


def counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
