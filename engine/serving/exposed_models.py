"""Models of a served pipeline: itself, then each exposed step as `pipeline.step`.

An exposed step is a pipeline of that step alone, over what its pipeline has loaded.
"""

from __future__ import annotations

from dataclasses import replace

from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.model_info import USAGE
from weftline.errors import InputError, PipelineError, Problem
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.single_step import Models, exposed, exposing, steps_of
from weftline.pipelines.spec.wire import Wire

COUNTING_NODES = ("embed", "rerank", "llm")
"""Nodes with an output `usage`."""

COUNTED = ("embedding", "scores")
"""Their outputs that OpenAI's routes return as embeddings and scores."""


def model_names(name: str, served: ServedPipeline) -> list[str]:
    """Return the names of a pipeline's models."""
    return [name, *(f"{name}.{step}" for step in served.expose)]


def models_with_errors(
    name: str, served: ServedPipeline, pipeline: Pipeline, models: Models
) -> tuple[dict[str, Pipeline], dict[str, InputError]]:
    """Return a pipeline's models, and errors of exposed steps that cannot be one; PipelineError: it has problems.

    models: of the exposed steps of all pipelines: their steps share what they load where all have the same inputs.
    """
    steps: dict[str, Pipeline] = {}
    errors: dict[str, InputError] = {}
    for step, model in zip(served.expose, model_names(name, served)[1:], strict=True):
        try:
            steps[model] = exposed(pipeline, step)
        except InputError as error:
            errors[model] = error
    connected = {*served.expose, *steps_of(pipeline, models)}
    whole = with_usage(pipeline)
    return {name: exposing(whole, connected) if connected else whole} | steps, errors


def with_usage(pipeline: Pipeline) -> Pipeline:
    """Return a pipeline with the output USAGE where it outputs an embedding or scores without the step's `usage`.

    OpenAI's embeddings and rerank answers count the tokens of prompts, whatever a pipeline outputs. PipelineError: it
    has an output of that name.
    """
    if USAGE in pipeline.outputs:
        path, found = f"outputs.{USAGE}", "a server hides the output of this name, which has the counts of tokens"
        raise PipelineError([Problem(path, found, "", "rename it", pipeline.line(path), pipeline.file)])
    if "usage" in pipeline.outputs:
        return pipeline
    steps = {step.name: step for step in pipeline.steps if step.node in COUNTING_NODES and not step.map}
    names = sorted(pipeline.outputs, key=lambda name: name not in COUNTED)  # the usual names first
    wires = [pipeline.outputs[name] for name in names]
    counted = next((wire.step for wire in wires if wire.step in steps and wire.port in COUNTED), None)
    if counted is None:
        return pipeline
    return replace(pipeline, outputs={**pipeline.outputs, USAGE: Wire(counted, "usage")})
