"""Model methods: readiness, metadata, statistics, load and unload.

Callers see the models their token allows and no others; only admins see why one is not ready.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from weftline.engine.serving.backend import Backend
from weftline.engine.serving.face import ModelFace, ModelState
from weftline.engine.serving.grpc.calls import CALLER, Unary
from weftline.engine.serving.grpc.protos import V2
from weftline.engine.serving.grpc.rendering import render_config, render_figures, render_metadata
from weftline.engine.serving.identity import NAME
from weftline.engine.serving.lifecycle import DrainSwitch, model_ready, server_ready
from weftline.engine.serving.replies import to_reply
from weftline.engine.serving.statistics import ModelFigures
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
    "statistics",
    "trace",
    "logging",
)
"""v2's extensions that are served; not `classification`, and not `cuda_shared_memory`."""

Figures = Callable[[Mapping[str, int]], Awaitable[Sequence[ModelFigures]]]
"""Returns the figures of models that are given with the version that serves, and of their steps."""


class GrpcModels:
    """Answers the methods about the server and its models."""

    def __init__(self, backend: Backend, serving: DrainSwitch, figures: Figures, version: str, memory: bool) -> None:
        self._backend = backend
        self._serving = serving
        self._figures = figures
        self._version = version
        self._extensions = [one for one in EXTENSIONS if memory or one != "system_shared_memory"]

    def answers(self) -> dict[str, Unary]:
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

    def known(self, name: str) -> ModelFace:
        """Return the face of a model that the caller may see; UnknownModel, AccessDenied, SessionClosed."""
        CALLER.get().check(name)
        return self._backend.face(name)

    # the server

    async def server_live(self, request: Any) -> Any:
        return V2.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any) -> Any:
        return V2.ServerReadyResponse(ready=self._serving.on and server_ready(self._backend.index()))

    async def server_metadata(self, request: Any) -> Any:
        return V2.ServerMetadataResponse(name=NAME, version=self._version, extensions=self._extensions)

    # models

    async def model_ready(self, request: Any) -> Any:
        CALLER.get().check(request.name)
        ready = self._serving.on and model_ready(self._backend.index(), request.name, request.version)
        return V2.ModelReadyResponse(ready=ready)

    async def model_metadata(self, request: Any) -> Any:
        return render_metadata(self._face(request))

    async def model_config(self, request: Any) -> Any:
        return V2.ModelConfigResponse(config=render_config(self._face(request)))

    async def model_statistics(self, request: Any) -> Any:
        if request.name:
            face = self._face(request)
            wanted = {face.name: face.version}
        else:
            wanted = {one.name: one.version for one in self._seen() if one.version > 0}
        return render_figures(await self._figures(wanted))

    # the repository

    async def repository_index(self, request: Any) -> Any:
        _check_repository(request.repository_name)
        response = V2.RepositoryIndexResponse()
        for one in self._seen():
            if one.ready or not request.ready:
                version = str(one.version) if one.version else ""
                why = _scrubbed(one.why) if CALLER.get().admin else ""
                response.models.add(name=one.name, version=version, state=one.state.upper(), reason=why)
        return response

    async def repository_model_load(self, request: Any) -> Any:
        _check_repository(request.repository_name)
        CALLER.get().check(request.model_name)
        if request.parameters:
            raise InputError("a model is loaded as its operator configured it; send no configuration and no files")
        await self._backend.load(request.model_name)
        return V2.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Any) -> Any:
        _check_repository(request.repository_name)
        CALLER.get().check(request.model_name)
        unknown = [name for name in request.parameters if name != "unload_dependents"]
        if unknown:
            raise InputError(f"found the parameter {unknown[0]!r:.80}, expected none but unload_dependents")
        await self._backend.unload(request.model_name)  # and its exposed steps, which are all that depends on it
        return V2.RepositoryModelUnloadResponse()

    # inside

    def _face(self, request: Any) -> ModelFace:
        CALLER.get().check(request.name)
        return self._backend.face(request.name, request.version)

    def _seen(self) -> list[ModelState]:
        caller = CALLER.get()
        return [one for one in self._backend.index() if caller.may(one.name)]


def _check_repository(name: str) -> None:
    if name:
        raise InputError("there is one repository, which has no name; leave repository_name out")


def _scrubbed(why: str) -> str:
    """A reason may quote a node's own error, so it goes the way of every error."""
    return to_reply(ModelError(why)).message if why else ""
