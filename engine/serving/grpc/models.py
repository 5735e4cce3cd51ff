"""Server and model methods: readiness, metadata, statistics, load and unload.

Callers see only the models that their token allows. Only admins see why a model is not ready.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from weftline.engine.serving.backend import Backend
from weftline.engine.serving.deployments import deployments_of
from weftline.engine.serving.grpc.protos import CONFIG, V2, WEFTLINE
from weftline.engine.serving.grpc.service import CALLER, Unary
from weftline.engine.serving.identity import NAME
from weftline.engine.serving.lifecycle import DrainSwitch
from weftline.engine.serving.model_info import ModelInfo, ModelState
from weftline.engine.serving.replies import to_status
from weftline.engine.serving.statistics import ModelFigures, Spent
from weftline.engine.serving.v2.metadata import config_of, metadata_of, model_ready, server_ready
from weftline.errors import InputError, ModelError

EXTENSIONS = (
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "classification",
    "statistics",
    "trace",
    "logging",
)
"""Supported v2 extensions; `cuda_shared_memory` is not."""

Figures = Callable[[Mapping[str, int]], Awaitable[Sequence[ModelFigures]]]
"""Returns the statistics of models, given with their versions, and of their steps."""


class GrpcModels:
    """The methods about the server and its models."""

    def __init__(
        self,
        backend: Backend,
        serving: DrainSwitch,
        figures: Figures,
        version: str,
        memory: bool,
        batch_max: int,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        self._backend = backend
        self._serving = serving
        self._figures = figures
        self._version = version
        self._batch_max = batch_max
        self._extensions = [one for one in EXTENSIONS if memory or one != "system_shared_memory"]

    def methods(self) -> dict[str, Unary]:
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ServerMetadata": self.server_metadata,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
            "RepositoryModelLoad": self.repository_model_load,
            "RepositoryModelUnload": self.repository_model_unload,
        }

    def known(self, name: str) -> ModelInfo:
        """Return the metadata of a model.

        UnknownModel, AccessDenied or SessionClosed if the caller cannot use it.
        """
        CALLER.get().check(name)
        return self._backend.info(name)

    # the server

    async def server_live(self, request: Any) -> Any:
        return V2.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any) -> Any:
        ready = self._serving.on and server_ready(self._backend.index(), self._strict)
        return V2.ServerReadyResponse(ready=ready)

    async def server_metadata(self, request: Any) -> Any:
        return V2.ServerMetadataResponse(name=NAME, version=self._version, extensions=self._extensions)

    # models

    async def model_ready(self, request: Any) -> Any:
        CALLER.get().check(request.name)
        ready = self._serving.on and model_ready(self._backend.index(), request.name, request.version)
        return V2.ModelReadyResponse(ready=ready)

    async def model_metadata(self, request: Any) -> Any:
        return _metadata_response(self._info(request))

    async def model_config(self, request: Any) -> Any:
        return V2.ModelConfigResponse(config=_model_config(self._info(request), self._batch_max))

    async def model_statistics(self, request: Any) -> Any:
        if request.name:
            info = self._info(request)
            figures = await self._figures({info.name: info.version})
            return _statistics_response(one for one in figures if one.name == info.name)  # as Triton: without its steps
        else:
            versions = {one.name: one.version for one in self._seen() if one.version > 0}
        return _statistics_response(await self._figures(versions))

    async def deployments(self, request: Any) -> Any:
        """Return the deployments of the caller's models; method of Weftline's own service."""
        found = deployments_of(self._backend, CALLER.get().may_use_model)
        return WEFTLINE.DeploymentsResponse(deployments=map(msgspec.structs.asdict, found))

    # the repository

    async def repository_index(self, request: Any) -> Any:
        _check_repository(request.repository_name)
        response = V2.RepositoryIndexResponse()
        for one in self._seen():
            if one.ready or not request.ready:
                version = str(one.version) if one.version else ""
                reason = _scrubbed(one.why) if CALLER.get().admin else ""
                response.models.add(name=one.name, version=version, state=one.state.upper(), reason=reason)
        return response

    async def repository_model_load(self, request: Any) -> Any:
        _check_repository(request.repository_name)
        CALLER.get().check(request.model_name)
        if request.parameters:
            raise InputError("a model is loaded as configured by the operator; send no configuration and no files")
        await self._backend.load(request.model_name)
        return V2.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Any) -> Any:
        _check_repository(request.repository_name)
        CALLER.get().check(request.model_name)
        unknown = [name for name in request.parameters if name != "unload_dependents"]
        if unknown:
            raise InputError(f"found the parameter {unknown[0]!r:.80}, expected none but unload_dependents")
        await self._backend.unload(request.model_name)  # with its exposed steps, its only dependents
        return V2.RepositoryModelUnloadResponse()

    # inside

    def _info(self, request: Any) -> ModelInfo:
        CALLER.get().check(request.name)
        return self._backend.info(request.name, request.version)

    def _seen(self) -> list[ModelState]:
        caller = CALLER.get()
        return [one for one in self._backend.index() if caller.may_use_model(one.name)]


def _check_repository(name: str) -> None:
    if name:
        raise InputError("there is one repository, which has no name; leave repository_name out")


def _scrubbed(why: str) -> str:
    """Scrub a reason like an error message, since it may quote a node's error."""
    return to_status(ModelError(why)).message if why else ""


# messages


def _metadata_response(info: ModelInfo) -> Any:
    meta = metadata_of(info)
    response = V2.ModelMetadataResponse(name=meta.name, versions=meta.versions, platform=meta.platform)
    for field, tensors in ((response.inputs, meta.inputs), (response.outputs, meta.outputs)):
        for one in tensors:
            field.add(name=one.name, datatype=one.datatype, shape=one.shape)
    return response


def _model_config(info: ModelInfo, batch_max: int) -> Any:
    return CONFIG.ModelConfig(**config_of(info, batch_max))


def _statistics_response(figures: Iterable[ModelFigures]) -> Any:
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
            _set_duration(getattr(stats.inference_stats, field), getattr(one, field))
        for field in ("compute_input", "compute_output"):  # always zero: copies are part of queue and compute_infer
            _set_duration(getattr(stats.inference_stats, field), Spent(one.success.count, 0))
        for batch in one.batches:
            _set_duration(stats.batch_stats.add(batch_size=batch.size).compute_infer, batch.calls)
    return response


def _set_duration(duration: Any, spent: Spent) -> None:
    duration.count, duration.ns = spent.count, spent.ns
