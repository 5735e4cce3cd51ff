"""grpc.health.v1: health of the server and of each model.

Probes need no token. On a server with tokens they see only '', since a status shows that a model exists; clients with a
token call ModelReady.

Watchers receive changes. A backend has no notification of state changes, so while there are watchers, one task polls
the index every POLL_S for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from weftline.engine.serving.backend import Backend
from weftline.engine.serving.grpc.protos import HEALTH
from weftline.engine.serving.grpc.service import CALLER
from weftline.engine.serving.lifecycle import DrainSwitch
from weftline.engine.serving.v2.metadata import server_ready
from weftline.errors import LimitReached, UnknownModel

POLL_S = 0.1
"""Polling interval, the longest delay of a change."""

WATCHERS_MAX, RETRY_S = 64, 5.0
"""Most concurrent Watch calls, and the retry delay beyond."""

Status = int
_Response = HEALTH.HealthCheckResponse
UNKNOWN: Status = int(_Response.SERVICE_UNKNOWN)


class GrpcHealth:
    """The Check and Watch methods."""

    def __init__(self, backend: Backend, serving: DrainSwitch) -> None:
        self._backend = backend
        self._serving = serving
        self._statuses: dict[str, Status] = {}
        self._watchers = 0
        self._changed = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        serving.listen(self._poll)

    async def check(self, request: Any) -> Any:
        status = self._current().get(request.service) if _visible(request.service) else None
        if status is None:
            raise UnknownModel("there is no such service or model")
        return _Response(status=status)

    async def watch(self, request: Any) -> AsyncGenerator[Any, None]:
        if self._watchers >= WATCHERS_MAX:  # they need no token, and each uses one of limits.calls_max
            raise LimitReached(f"{WATCHERS_MAX} calls watch already; ask with Check", RETRY_S)
        sent: Status | None = None
        self._enter()
        try:
            while True:
                status = self._statuses.get(request.service, UNKNOWN) if _visible(request.service) else UNKNOWN
                if status != sent:
                    sent = status
                    yield _Response(status=status)
                elif not self._serving.on:
                    return  # a drain does not wait for watchers
                else:
                    await self._changed.wait()
        finally:
            self._leave()

    def _current(self) -> dict[str, Status]:
        """Return the status of the server and of every model."""
        index, on = self._backend.index(), self._serving.on
        statuses = {one.name: _status(one.ready and on) for one in index}
        return statuses | {"": _status(on and server_ready(index))}

    def _poll(self) -> None:
        statuses = self._current()
        if statuses != self._statuses or not self._serving.on:  # watchers end with the drain, even without a change
            self._statuses = statuses
            self._changed.set()
            self._changed = asyncio.Event()

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._poll()

    def _enter(self) -> None:
        self._watchers += 1
        if self._polling is None:
            self._poll()
            self._polling = asyncio.ensure_future(self._poll_forever())

    def _leave(self) -> None:
        self._watchers -= 1
        if not self._watchers and self._polling is not None:
            self._polling.cancel()
            self._polling = None


def _visible(service: str) -> bool:
    return not service or CALLER.get().may_use_model(service)


def _status(serving: bool) -> Status:
    return int(_Response.SERVING if serving else _Response.NOT_SERVING)
