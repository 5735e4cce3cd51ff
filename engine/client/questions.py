"""What can be asked beside inference, as steps: is it up, what is served, how is it doing, load, unload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from tritonclient.grpc import service_pb2

from weftline.engine.client.calls import Calls
from weftline.engine.client.refusal import Refused
from weftline.engine.client.steps import SERVICE, SHORT_MS, Send, Steps
from weftline.engine.ingress.face import READY, ModelState

pb: Any = service_pb2


class ModelStats(msgspec.Struct, frozen=True):
    """The figures of a model, or of a step of one (`model.step`), since its version was loaded.

    requests, failed: how many ended well, and with an error.
    total_ms:         mean time of a request that ended well, from arrival to outputs; queue_ms, run_ms: of its parts,
                      added up over the steps.
    calls:            of nodes; calls that several requests shared count once.
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
    """Whether a server answers; False when none can be reached."""
    return (yield from _yes("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse, "live", calls))


def ready(calls: Calls, model: str = "") -> Steps[bool]:
    """Whether everything that is served can answer now, or one model; False when no server can be reached."""
    if model:
        request = pb.ModelReadyRequest(name=model)
        return (yield from _yes("ModelReady", request, pb.ModelReadyResponse, "ready", calls))
    return (yield from _yes("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse, "ready", calls))


def models(calls: Calls) -> Steps[tuple[ModelState, ...]]:
    """Return every model the server has, sorted by name."""
    index = yield from calls.ask("RepositoryIndex", pb.RepositoryIndexRequest(), calls.patience(SHORT_MS))
    found = [ModelState(one.name, _number(one.version), one.state.lower() or READY, one.reason) for one in index.models]
    return tuple(sorted(found, key=lambda one: one.name))


def stats(calls: Calls, model: str = "") -> Steps[dict[str, ModelStats]]:
    """Return the figures of a model and its steps by name; '' for every model."""
    request = pb.ModelStatisticsRequest(name=model)
    answer = yield from calls.ask("ModelStatistics", request, calls.patience(SHORT_MS))
    return {one.name: _stats(one) for one in answer.model_stats}


def load(calls: Calls, model: str, deadline_ms: float | None = None) -> Steps[int]:
    """Load a model, or load it again, and return its version; 0 when the server does not say."""
    patience = calls.patience(deadline_ms, retries=0)
    yield from calls.ask("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=model), patience)
    calls.forget(model)
    found: Mapping[str, int] = {one.name: one.version for one in (yield from models(calls))}
    return found.get(model, 0)


def unload(calls: Calls, model: str, deadline_ms: float | None = None) -> Steps[None]:
    """Unload a model once its open requests have finished."""
    patience = calls.patience(deadline_ms, retries=0)
    yield from calls.ask("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model), patience)
    calls.forget(model)


def _yes(method: str, request: Any, response: Any, field: str, calls: Calls) -> Steps[bool]:
    """Ask once: whoever asks whether a server is ready wants to know now."""
    try:
        answer = yield Send(SERVICE + method, request.SerializeToString(), SHORT_MS / 1000)
    except Refused as refused:
        if refused.refusal.status == "UNAVAILABLE":
            return False
        raise calls.error_of(refused.refusal) from None
    return bool(getattr(response.FromString(answer), field))


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdigit() and len(version) < 19 else 0


def _stats(one: Any) -> ModelStats:
    told = one.inference_stats
    good, calls = told.success.count, one.execution_count
    return ModelStats(
        one.name,
        one.version,
        good,
        told.fail.count,
        _mean_ms(told.success.ns, good),
        _mean_ms(told.queue.ns, good),
        _mean_ms(told.compute_infer.ns, good),
        calls,
        sum(each.batch_size * each.compute_infer.count for each in one.batch_stats) / calls if calls else 0.0,
    )


def _mean_ms(ns: int, count: int) -> float:
    return ns / count / 1e6 if count else 0.0
