"""Manager of all ingress processes, on the engine's side.

    desk = Desk(backend)
    ports = await desk.start_ingress(IngressSpec("http", ("http",), config))
    ...
    await desk.drain(grace_s)          # or stop()

Every ingress process knows the index and all faces; they are looked at LOOK_S apart and sent when they changed, and at
once after a load or unload that came through here. Statistics are asked for by message, so that every door tells those
of the whole server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from weftline.engine.serving.backend import Backend
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.child import ENTRY
from weftline.engine.serving.frontend.clerk import FrontendConnection
from weftline.engine.serving.frontend.keeper import EXTENT_BYTES, FrontendSupervisor, wait_all
from weftline.engine.serving.frontend.spec import IngressSpec
from weftline.engine.serving.statistics import Statistics
from weftline.errors import InputError, SessionClosed

_log = logging.getLogger("weftline.ingress")

LOOK_S = 0.2
"""How often it is looked whether models or their states changed."""

FIGURES_EVERY = 5
"""Figures are looked at every so many times."""


class FrontendManager:
    """All ingress processes of a server. For one event loop.

    backend:      what they ask.
    extent_bytes: size of each of a process's two extents.
    statistics:   the observer that counts for the backend; what doors tell as statistics.
    """

    def __init__(
        self, backend: Backend, extent_bytes: int = EXTENT_BYTES, *, statistics: Statistics | None = None
    ) -> None:
        self._backend = backend
        self._statistics = statistics or Statistics()
        self._extent_bytes = extent_bytes
        self._keepers: list[FrontendSupervisor] = []
        self._catalog: msg.Catalog | None = None
        self._figures = b""
        self._looking: asyncio.Task[None] | None = None
        self._ending = False

    async def start_ingress(self, spec: IngressSpec, entry: str = ENTRY) -> dict[str, int]:
        """Start an ingress process, keep it running, and return the ports of its doors by name.

        WeftlineError or OSError when it cannot be started. entry: the module it runs.
        """
        if self._ending:
            raise SessionClosed("the server is ending")
        keeper = FrontendSupervisor(spec, self._backend, self._carry_out, self._greet, self._extent_bytes, entry)
        self._keepers.append(keeper)
        try:
            ports = await keeper.start()
        except BaseException:
            self._keepers.remove(keeper)
            raise
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        return ports

    async def drain(self, grace_s: float) -> None:
        """Have every ingress process take nothing new, wait until their calls have ended, and let them go."""
        self._ending = True
        for keeper in self._keepers:
            keeper.drain(grace_s)
        await wait_all(self._keepers, grace_s)
        await self.stop()

    async def stop(self) -> None:
        """End every ingress process now. Safe to call twice."""
        self._ending = True
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
            self._looking = None
        for keeper in self._keepers:
            await keeper.stop()
        self._keepers.clear()

    def look(self) -> None:
        """Tell every ingress process of models that changed, at once."""
        catalog = _catalog(self._backend)
        if catalog != self._catalog:  # quick where nothing changed: its parts are then the very same objects
            self._catalog = catalog
            self._tell(msg.encode(catalog))

    @property
    def ready(self) -> bool:
        """Whether every ingress process has its doors open."""
        return all(keeper.ready for keeper in self._keepers)

    def pids(self) -> dict[str, int]:
        """Return the pid of every running ingress process by name."""
        return {keeper.spec.name: keeper.pid for keeper in self._keepers if keeper.pid is not None}

    def stats(self) -> Mapping[str, Mapping[str, Any]]:
        """Return, for each ingress process that is up, its open requests and the bytes of answers it has not taken."""
        return {
            keeper.spec.name: {"open": keeper.clerk.open_requests, "lent_bytes": keeper.clerk.lent_bytes}
            for keeper in self._keepers
            if keeper.clerk is not None
        }

    # inside

    async def _look_on(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(LOOK_S)
            rounds += 1
            try:
                self.look()
                if rounds % FIGURES_EVERY == 0:
                    self._look_at_figures()
            except Exception:
                _log.exception("ingress processes could not be told of the models")  # the next round tries again

    def _look_at_figures(self) -> None:
        figures = _figures(self._backend)
        if figures != self._figures:
            self._figures = figures
            self._tell(figures)

    def _greet(self, clerk: FrontendConnection) -> None:
        clerk.say(msg.encode(_catalog(self._backend)))
        clerk.say(self._figures or _figures(self._backend))

    def _tell(self, body: bytes) -> None:
        for keeper in self._keepers:
            if keeper.clerk is not None:
                keeper.clerk.say(body)

    async def _carry_out(self, order: msg.Order) -> msg.Ordered:
        if order.what == msg.LOAD:
            version = await self._backend.load(order.model)
            self.look()  # before the answer, so that whoever loaded it finds it
            return msg.Ordered(order.id, version)
        if order.what == msg.UNLOAD:
            await self._backend.unload(order.model)
            self.look()
            return msg.Ordered(order.id)
        if order.what == msg.METRICS:
            return msg.Ordered(order.id, data=await self._backend.metrics())
        if order.what == msg.STATISTICS:
            return msg.Ordered(order.id, data=msg.encode(await self._statistics.tell(order.versions)))
        raise InputError("an order that nobody knows")


def _catalog(backend: Backend) -> msg.Catalog:
    index = backend.index()
    faces = []
    for state in index:
        with contextlib.suppress(SessionClosed):
            faces.append(backend.face(state.name))
    return msg.Catalog(index, tuple(faces))


def _figures(backend: Backend) -> bytes:
    found = {state.name: backend.stats(state.name) for state in backend.index()}
    return msg.encode(
        msg.Figures({name: msgspec.to_builtins(dict(stats), str_keys=True) for name, stats in found.items() if stats})
    )
