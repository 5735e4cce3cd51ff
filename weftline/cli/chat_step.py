"""Single llm step of a pipeline, run with chat messages as input.

The step keeps its options (model, system, sampling, memory, device). Its wires, prompt, conditions, retries and
deadlines are dropped, so a chat needs none of the pipeline's other steps. Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weftline.errors import InputError, PipelineError
from weftline.nodes.catalog import dotted, engines_of
from weftline.pipelines.check.checked import CheckedStep
from weftline.pipelines.check.checker import examine
from weftline.pipelines.check.problems import did_you_mean
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.wire import Wire

INPUTS = {"messages": "json", "prompt": "text", "sampling": "json"}
"""Optional inputs of the step's own pipeline, by port."""

OUTPUTS = ("text", "reasoning", "usage")


@dataclass(frozen=True, slots=True)
class ChatStep:
    """An llm step that can be opened alone.

    name:     of the step in its pipeline.
    model:    as written in the pipeline.
    system:   the step's system message; '' for none.
    sampling: the step's SamplingParams.
    pipeline: has this step only, with `INPUTS` and `OUTPUTS`.
    """

    name: str
    model: str
    system: str
    sampling: Any
    pipeline: Pipeline

    def sampled(self, changes: Mapping[str, Any]) -> Any:
        """Return the sampling options with changes; InputError for a key that is unknown or out of range."""
        return self.sampling.read(changes, self.sampling)

    @property
    def sampling_keys(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.sampling))


def chat_step(pipeline: Pipeline, name: str = "") -> ChatStep:
    """Return the llm step of this name, or the only one for ''.

    PipelineError lists the pipeline's problems; InputError when there is no such step, or more than one.
    """
    checked = examine(pipeline)
    if checked.problems:
        raise PipelineError(checked.problems)
    one = _chosen(checked.steps, name)
    step = Step(
        one.step.name,
        one.step.node,
        options=one.step.options,
        inputs={port: Wire(None, port) for port in INPUTS},
        device=one.step.device,
        run_max_ms=one.step.run_max_ms,
        base_dir=one.step.base_dir,
    )
    whole = checked.pipeline
    alone = Pipeline(
        name=whole.name,
        inputs=tuple(Input(port, type, optional=True) for port, type in INPUTS.items()),
        steps=(step,),
        outputs={port: Wire(step.name, port) for port in OUTPUTS},
        limits=whole.limits,
        file=whole.file,
        base_dir=whole.base_dir,
        lines=whole.lines,
    )
    return ChatStep(step.name, one.config.model, one.config.system, one.config.sampling, alone)


def _chosen(steps: Mapping[str, CheckedStep], name: str) -> CheckedStep:
    found = [key for key, one in steps.items() if _generates(one)]
    if not found:
        raise InputError("the pipeline has no llm step that generates text\n    fix: add a step `node: llm`")
    if not name and len(found) > 1:
        listed = ", ".join(found)
        raise InputError(f"the pipeline has {len(found)} llm steps: {listed}\n    fix: choose one with --step NAME")
    if name and name not in found:
        problem = "is not an llm step that generates text" if name in steps else "is not in the pipeline"
        hint = did_you_mean(name, found) or f"llm steps here: {', '.join(found)}"
        raise InputError(f"--step {name:.80}: {problem}\n    fix: {hint}")
    return steps[name or found[0]]


def _generates(one: CheckedStep) -> bool:
    """Return True for an llm step with chat ports; one that embeds or classifies has none."""
    has_ports = all(one.ports.input(port) for port in INPUTS) and all(one.ports.output(port) for port in OUTPUTS)
    return has_ports and one.reference in (dotted("llm"), *engines_of("llm").values())
