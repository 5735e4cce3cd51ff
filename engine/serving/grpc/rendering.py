"""Model metadata and statistics as v2 messages; pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weftline.engine.serving.face import ModelFace
from weftline.engine.serving.grpc.protos import CONFIG, V2
from weftline.engine.serving.statistics import ModelFigures, Spent
from weftline.engine.serving.v2.metadata import config_of, metadata_of


def render_metadata(face: ModelFace) -> Any:
    """Return a ModelMetadataResponse."""
    meta = metadata_of(face)
    response = V2.ModelMetadataResponse(name=meta.name, versions=meta.versions, platform=meta.platform)
    for field, tensors in ((response.inputs, meta.inputs), (response.outputs, meta.outputs)):
        for one in tensors:
            field.add(name=one.name, datatype=one.datatype, shape=one.shape)
    return response


def render_config(face: ModelFace) -> Any:
    """Return a ModelConfig."""
    return CONFIG.ModelConfig(**config_of(face))


def render_figures(figures: Iterable[ModelFigures]) -> Any:
    """Return a ModelStatisticsResponse."""
    response = V2.ModelStatisticsResponse()
    for one in figures:
        stats = response.model_stats.add(
            name=one.name,
            version=str(one.version),
            last_inference=one.last_ms,
            inference_count=one.inferences,
            execution_count=one.executions,
        )
        for field in ("success", "fail", "queue", "compute_infer"):
            _spend(getattr(stats.inference_stats, field), getattr(one, field))
        for field in ("compute_input", "compute_output"):  # always zero: copies are part of queue and compute_infer
            _spend(getattr(stats.inference_stats, field), Spent(one.success.count, 0))
        for batch in one.batches:
            _spend(stats.batch_stats.add(batch_size=batch.size).compute_infer, batch.calls)
    return response


def _spend(duration: Any, spent: Spent) -> None:
    duration.count, duration.ns = spent.count, spent.ns
