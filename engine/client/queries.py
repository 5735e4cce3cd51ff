"""Calls beside inference, as steps: liveness, readiness, model list, statistics, load and unload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from tritonclient.grpc import service_pb2

from weftline.engine.client.calls import Calls
from weftline.engine.client.refusal import Refused
from weftline.engine.client.steps import SERVICE, SHORT_MS, SendRequest, Steps
from weftline.engine.serving.face import READY, ModelState

pb: Any = service_pb2


class ModelStats(msgspec.Struct, frozen=True):
    """The figures of a model, or of a step of one (`model.step`), since its version was loaded.

    requests, failed: requests that succeeded, and that failed.
    total_ms:         mean time of a successful request, from arrival to outputs; queue_ms, run_ms: its parts, added up
                      over the steps.
    calls:            calls of nodes; a call for several requests counts once.
    batch:            mean number of items in a call.
    """

    name: str
    version: str
    requests: int = 0
    failed: int = 0
    total_ms: float = 0.0
    queue_ms: float = 0.0
    run_ms: float = 0.0
    calls: int = 0
    batch: float = 0.0


def live(calls: Calls) -> Steps[bool]:
    """Return True if the server responds; False if it cannot be reached."""
    return (yield from _yes("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse, "live", calls))


def ready(calls: Calls, model: str = "") -> Steps[bool]:
    """Return True if one model, or every model, is ready; False if no server can be reached."""
    if model:
        request = pb.ModelReadyRequest(name=model)
        return (yield from _yes("ModelReady", request, pb.ModelReadyResponse, "ready", calls))
    return (yield from _yes("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse, "ready", calls))


def models(calls: Calls) -> Steps[tuple[ModelState, ...]]:
    """Return the models of the server, sorted by name."""
    index = yield from calls.ask("RepositoryIndex", pb.RepositoryIndexRequest(), calls.retry_state(SHORT_MS))
    found = [ModelState(one.name, _number(one.version), one.state.lower() or READY, one.reason) for one in index.models]
    return tuple(sorted(found, key=lambda one: one.name))


def stats(calls: Calls, model: str = "") -> Steps[dict[str, ModelStats]]:
    """Return the figures of a model and its steps by name; '' for every model."""
    request = pb.ModelStatisticsRequest(name=model)
    answer = yield from calls.ask("ModelStatistics", request, calls.retry_state(SHORT_MS))
    return {one.name: _stats(one) for one in answer.model_stats}


def load(calls: Calls, model: str, deadline_ms: float | None = None) -> Steps[int]:
    """Load or reload a model and return its version; 0 if the server does not report it."""
    retry_state = calls.retry_state(deadline_ms, retries=0)
    yield from calls.ask("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=model), retry_state)
    calls.forget(model)
    found: Mapping[str, int] = {one.name: one.version for one in (yield from models(calls))}
    return found.get(model, 0)


def unload(calls: Calls, model: str, deadline_ms: float | None = None) -> Steps[None]:
    """Unload a model once its open requests have finished."""
    retry_state = calls.retry_state(deadline_ms, retries=0)
    yield from calls.ask("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model), retry_state)
    calls.forget(model)


def _yes(method: str, request: Any, response: Any, field: str, calls: Calls) -> Steps[bool]:
    """Send once, without retries: readiness is a question about now."""
    try:
        answer = yield SendRequest(SERVICE + method, request.SerializeToString(), SHORT_MS / 1000)
    except Refused as refused:
        if refused.refusal.status == "UNAVAILABLE":
            return False
        raise calls.error_of(refused.refusal) from None
    return bool(getattr(response.FromString(answer), field))


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() and len(version) < 19 else 0


def _stats(one: Any) -> ModelStats:
    inference = one.inference_stats
    good, calls = inference.success.count, one.execution_count
    return ModelStats(
        one.name,
        one.version,
        good,
        inference.fail.count,
        _mean_ms(inference.success.ns, good),
        _mean_ms(inference.queue.ns, good),
        _mean_ms(inference.compute_infer.ns, good),
        calls,
        sum(each.batch_size * each.compute_infer.count for each in one.batch_stats) / calls if calls else 0.0,
    )


def _mean_ms(ns: int, count: int) -> float:
    return ns / count / 1e6 if count else 0.0
