"""grpc.health.v1: health of the server and of each model.

Probes bring no token. Where tokens are asked for they see '' alone, since an answer tells whether a model exists;
whoever has a token asks ModelReady.

Watchers are told of changes. Nothing in a backend calls when a model's state changes, so while anybody watches, one
task looks at the index every LOOK_S, however many they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from weftline.engine.serving.backend import Backend
from weftline.engine.serving.grpc.calls import CALLER, Context, handlers_of, parse, refuse, request_class
from weftline.engine.serving.grpc.protos import HEALTH, HEALTH_SERVICE
from weftline.engine.serving.lifecycle import DrainSwitch, server_ready
from weftline.errors import LimitReached, UnknownModel

LOOK_S = 0.1
"""How late a watcher learns of a change, at most."""

WATCHERS_MAX, RETRY_S = 64, 5.0
"""Most calls that watch at a time, and when one more may try again."""

Status = int
_Response = HEALTH.HealthCheckResponse
UNKNOWN: Status = int(_Response.SERVICE_UNKNOWN)


class GrpcHealth:
    """Answers Check and Watch."""

    def __init__(self, backend: Backend, serving: DrainSwitch) -> None:
        self._backend = backend
        self._serving = serving
        self._statuses: dict[str, Status] = {}
        self._watchers = 0
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        serving.listen(self._look)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return handlers_of(HEALTH_SERVICE, {"Check": self.check}) | {
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch)
        }

    async def check(self, request: Any) -> Any:
        status = self._now().get(request.service) if _may(request.service) else None
        if status is None:
            raise UnknownModel("there is no such service or model")
        return _Response(status=status)

    async def _watch(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            request = parse(request_class(HEALTH_SERVICE.methods_by_name["Watch"]), data)
        except Exception as error:
            await refuse(context, error)
            return
        if self._watchers >= WATCHERS_MAX:  # they need no token, and each holds one of limits.calls_max
            await refuse(context, LimitReached(f"{WATCHERS_MAX} calls watch already; ask with Check", RETRY_S))
            return
        told: Status | None = None
        self._enter()
        try:
            while True:
                status = self._statuses.get(request.service, UNKNOWN) if _may(request.service) else UNKNOWN
                if status != told:
                    told = status
                    yield _Response(status=status).SerializeToString()
                elif not self._serving.on:
                    return  # the last word was said; a drain does not wait for whoever watches
                else:
                    await self._changed.wait()
        finally:
            self._leave()

    def _now(self) -> dict[str, Status]:
        """Return the status of everything that has one."""
        index, on = self._backend.index(), self._serving.on
        statuses = {one.name: _status(one.ready and on) for one in index}
        return statuses | {"": _status(on and server_ready(index))}

    def _look(self) -> None:
        statuses = self._now()
        if statuses != self._statuses or not self._serving.on:  # the end is news even where nothing was ready
            self._statuses = statuses
            self._changed.set()
            self._changed = asyncio.Event()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _enter(self) -> None:
        self._watchers += 1
        if self._looking is None:
            self._look()
            self._looking = asyncio.ensure_future(self._keep_looking())

    def _leave(self) -> None:
        self._watchers -= 1
        if not self._watchers and self._looking is not None:
            self._looking.cancel()
            self._looking = None


def _may(service: str) -> bool:
    return not service or CALLER.get().may(service)


def _status(serving: bool) -> Status:
    return int(_Response.SERVING if serving else _Response.NOT_SERVING)
