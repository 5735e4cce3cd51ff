"""What `weftline check` and `weftline plan` do: read, check and explain a pipeline file. Starts nothing."""

from __future__ import annotations

import dataclasses

from weftline.engine.machine import this_machine
from weftline.errors import PipelineError
from weftline.pipelines.check import examine
from weftline.pipelines.load import load_file
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan


def check_file(file: str, *, file_only: bool) -> str:
    """Return one line about a sound pipeline; PipelineError lists every problem.

    file_only: whether it fits this machine (its devices, its memory) is left out.
    """
    pipeline = load_file(file)
    if file_only:
        problems = examine(pipeline).problems
        if problems:
            raise PipelineError(problems)
    else:
        make_plan(pipeline, this_machine())
    counts = [
        counted(sum(not one.hidden for one in pipeline.inputs), "input"),
        counted(len(pipeline.steps), "step"),
        counted(len(pipeline.outputs), "output"),
    ]
    return f"{file}: ok ({', '.join(counts)})"


def explained(file: str, form: str, cores: int | None) -> str:
    """Return the plan of a pipeline file as `text`, `mermaid` or `svg`."""
    plan = plan_file(file, cores)
    if form == "svg":
        from weftline.pipelines.drawing import explain_svg

        text = explain_svg(plan)
    else:
        from weftline.pipelines.explain import explain_mermaid, explain_text

        text = explain_mermaid(plan) if form == "mermaid" else explain_text(plan)
    return text if text.endswith("\n") else text + "\n"


def plan_file(file: str, cores: int | None = None) -> Plan:
    """Return the plan of a pipeline file on this machine, or on one that differs in its number of cores."""
    machine = this_machine()
    if cores is not None:
        machine = dataclasses.replace(machine, cores=cores)
    return make_plan(load_file(file), machine)


def counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
