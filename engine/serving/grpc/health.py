"""grpc.health.v1: health of the server and of each model.

Probes need no token. On a server with tokens they see only '', since a status shows that a model exists; clients with a
token call ModelReady.

Watchers receive changes. A backend has no notification of state changes, so while there are watchers, one task polls
the index every POLL_S for all of them. They need no token, so a connection has WATCHES_MAX, and beyond WATCHERS_MAX in
all the oldest watch of the connection with the most of them ends for a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from weftline.engine.serving.backend import Backend
from weftline.engine.serving.grpc.protos import HEALTH
from weftline.engine.serving.grpc.service import CALLER, PEER
from weftline.engine.serving.lifecycle import DrainSwitch
from weftline.engine.serving.v2.metadata import server_ready
from weftline.errors import LimitReached, UnknownModel

POLL_S = 0.1
"""Polling interval, the longest delay of a change."""

WATCHES_MAX, WATCHERS_MAX, RETRY_S = 16, 1024, 5.0
"""Most concurrent Watch calls of a connection and in all, and the retry delay beyond. gRPC's clients open one for each
connection and service; one takes about 10 KB."""

Status = int
_Response = HEALTH.HealthCheckResponse
UNKNOWN: Status = int(_Response.SERVICE_UNKNOWN)


class GrpcHealth:
    """The Check and Watch methods."""

    def __init__(self, backend: Backend, serving: DrainSwitch, strict: bool = False) -> None:
        self._strict = strict
        self._backend = backend
        self._serving = serving
        self._statuses: dict[str, Status] = {}
        self._watches: dict[str, dict[_Watch, None]] = {}  # by connection; oldest first
        self._polling: asyncio.Task[None] | None = None
        serving.listen(self._poll)

    async def check(self, request: Any) -> Any:
        status = self._current().get(request.service) if _visible(request.service) else None
        if status is None:
            raise UnknownModel("there is no such service or model")
        return _Response(status=status)

    async def watch(self, request: Any) -> AsyncGenerator[Any, None]:
        peer, watch = PEER.get(), _Watch()
        sent: Status | None = None
        self._enter(peer, watch)
        try:
            while not watch.ended:
                status = self._statuses.get(request.service, UNKNOWN) if _visible(request.service) else UNKNOWN
                if status != sent:
                    sent = status
                    yield _Response(status=status)
                elif not self._serving.on:
                    return  # a drain does not wait for watchers
                else:
                    watch.changed.clear()
                    await watch.changed.wait()
            raise LimitReached(f"more than {WATCHERS_MAX} calls watch; ask with Check", RETRY_S)
        finally:
            self._leave(peer, watch)

    def _current(self) -> dict[str, Status]:
        """Return the status of the server and of every model."""
        index, on = self._backend.index(), self._serving.on
        statuses = {one.name: _status(one.ready and on) for one in index}
        return statuses | {"": _status(on and server_ready(index, self._strict))}

    def _poll(self) -> None:
        statuses = self._current()
        if statuses != self._statuses or not self._serving.on:  # watchers end with the drain, even without a change
            self._statuses = statuses
            for watches in self._watches.values():
                for watch in watches:
                    watch.changed.set()

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._poll()

    def _enter(self, peer: str, watch: _Watch) -> None:
        if len(self._watches.get(peer, ())) >= WATCHES_MAX:
            raise LimitReached(f"{WATCHES_MAX} calls of this connection watch already; ask with Check", RETRY_S)
        if sum(map(len, self._watches.values())) >= WATCHERS_MAX:
            most = max(self._watches.values(), key=len)
            oldest = next(iter(most))
            oldest.ended = True
            oldest.changed.set()
            self._forget(next(name for name, watches in self._watches.items() if watches is most), oldest)
        self._watches.setdefault(peer, {})[watch] = None
        if self._polling is None:
            self._poll()
            self._polling = asyncio.ensure_future(self._poll_forever())

    def _forget(self, peer: str, watch: _Watch) -> None:
        watches = self._watches.get(peer, {})
        watches.pop(watch, None)
        if not watches:
            self._watches.pop(peer, None)

    def _leave(self, peer: str, watch: _Watch) -> None:
        self._forget(peer, watch)
        if not self._watches and self._polling is not None:
            self._polling.cancel()
            self._polling = None


class _Watch:
    """One Watch call. ended: it ends for another."""

    __slots__ = ("changed", "ended")

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.ended = False


def _visible(service: str) -> bool:
    return not service or CALLER.get().may_use_model(service)


def _status(serving: bool) -> Status:
    return int(_Response.SERVING if serving else _Response.NOT_SERVING)
