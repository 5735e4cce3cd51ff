"""Single llm step of a pipeline, run with chat messages as input.

A pipeline may need a photo and a recording before its language model says a word. Here the step is taken out with its
own options (model, system, sampling, memory, device) and wired to inputs of its own. What it was wired to before, its
prompt among them, is left behind, as are conditions, retries and deadlines. Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from weftline.errors import InputError, PipelineError
from weftline.nodes.catalog import resolve
from weftline.pipelines.check.checked import CheckedStep
from weftline.pipelines.check.checker import examine
from weftline.pipelines.check.problems import did_you_mean
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.wire import Wire

INPUTS = {"messages": "json", "prompt": "text", "sampling": "json"}
"""What a step alone is sent, by port; each may be left out."""

OUTPUTS = ("text", "usage")
"""What it answers, by port."""


@dataclass(frozen=True, slots=True)
class ChatStep:
    """An llm step that can be opened by itself.

    name:     of the step in its pipeline.
    model:    as its pipeline names it.
    system:   what the step says to the model first; '' for nothing.
    sampling: the step's own, before any change: a SamplingParams of `weftline.engine.llm`.
    pipeline: has this step only; inputs as in `INPUTS`, outputs as in `OUTPUTS`.
    """

    name: str
    model: str
    system: str
    sampling: Any
    pipeline: Pipeline

    def sampled(self, changes: Mapping[str, Any]) -> Any:
        """Return the sampling options with some keys changed; InputError says which is unknown or out of range."""
        return self.sampling.read(changes, self.sampling)

    @property
    def sampling_keys(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.sampling))


def chat_step(pipeline: Pipeline, wanted: str = "") -> ChatStep:
    """Return the llm step called `wanted`, or the only one when that is ''.

    PipelineError lists what is wrong with the pipeline; InputError says that there is no such step, or several.
    """
    checked = examine(pipeline)
    if checked.problems:
        raise PipelineError(checked.problems)
    return _alone(checked.pipeline, _chosen(checked.steps, wanted))


def _answers(one: CheckedStep) -> bool:
    """Whether it is an llm step that answers conversations; one that embeds or classifies does not."""
    wanted = all(one.ports.input(port) for port in INPUTS) and all(one.ports.output(port) for port in OUTPUTS)
    return wanted and issubclass(one.node, resolve("llm", Path()))


def _chosen(steps: Mapping[str, CheckedStep], wanted: str) -> CheckedStep:
    found = [name for name, one in steps.items() if _answers(one)]
    if not found:
        raise InputError(
            "the pipeline has no llm step that answers: there is nobody to chat with\n    fix: add a step `node: llm`"
        )
    if not wanted:
        if len(found) > 1:
            raise InputError(
                f"the pipeline has {len(found)} llm steps: {', '.join(found)}\n    fix: name one, --step NAME"
            )
        return steps[found[0]]
    if wanted not in found:
        what = "is no llm step that answers" if wanted in steps else "is not in the pipeline"
        hint = did_you_mean(wanted, found) or f"llm steps here: {', '.join(found)}"
        raise InputError(f"--step {wanted:.80}: {what}\n    fix: {hint}")
    return steps[wanted]


def _alone(pipeline: Pipeline, one: CheckedStep) -> ChatStep:
    step = Step(
        one.step.name,
        one.step.node,
        options=one.step.options,
        inputs={port: Wire(None, port) for port in INPUTS},
        device=one.step.device,
        run_max_ms=one.step.run_max_ms,
        base_dir=one.step.base_dir,
    )
    alone = Pipeline(
        name=pipeline.name,
        inputs=tuple(Input(port, type, optional=True) for port, type in INPUTS.items()),
        steps=(step,),
        outputs={port: Wire(step.name, port) for port in OUTPUTS},
        limits=pipeline.limits,
        file=pipeline.file,
        base_dir=pipeline.base_dir,
        lines=pipeline.lines,
    )
    return ChatStep(step.name, one.config.model, one.config.system, one.config.sampling, alone)
