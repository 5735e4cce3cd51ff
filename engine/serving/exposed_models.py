"""Models of a served pipeline: itself, then each exposed step as `pipeline.step`.

An exposed step is a pipeline of that step alone, over what its pipeline has loaded.
"""

from __future__ import annotations

from weftline.engine.serving.config import ServedPipeline
from weftline.errors import InputError
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.single_step import Models, exposed, exposing, steps_of


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
    return {name: exposing(pipeline, connected) if connected else pipeline} | steps, errors
