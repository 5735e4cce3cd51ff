"""Supervisor of one ingress process: restarts with back-off.

What it was asked for by clients is withdrawn in the moment it ends; its clients see their connections close. One that
does not answer a Ping for SILENT_S is killed. A process that never comes up is given up after some tries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from weftline.engine.scheduler.restarts import RestartPolicy, Restarts
from weftline.engine.serving.backend import Backend
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.child import END_S, ENTRY, Child
from weftline.engine.serving.frontend.clerk import FrontendConnection, Orders
from weftline.engine.serving.frontend.spec import IngressSpec, encode_spec, frame_bytes_max
from weftline.errors import SessionClosed

EXTENT_BYTES = 64 << 20
"""Size of each of the two extents: eight tensors of 8 MB on their way at a time; more travel inside messages."""

OPEN_S = 60.0
"""How long an ingress process may take until its doors stand open."""

GOING_S = 0.3
"""How long a process may take to end by itself once its connection is closed."""

SILENT_S = 10.0
"""After so long without a word it counts as hung."""

_log = logging.getLogger("weftline.ingress")


class FrontendSupervisor:
    """One ingress process, whichever it is at the moment. For one event loop.

    greet: called with each new FrontendConnection once it is connected, to tell it what there is.
    """

    def __init__(
        self,
        spec: IngressSpec,
        backend: Backend,
        orders: Orders,
        greet: Callable[[FrontendConnection], None],
        extent_bytes: int = EXTENT_BYTES,
        entry: str = ENTRY,
    ) -> None:
        self.spec = spec
        self.ports: dict[str, int] = {}
        self.clerk: FrontendConnection | None = None
        self.given_up = False
        self._backend = backend
        self._orders = orders
        self._greet = greet
        self._extent_bytes = extent_bytes
        self._entry = entry
        self._child: Child | None = None
        self._restarts = Restarts(RestartPolicy(), seed=os.getpid())
        self._minding: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    @property
    def ready(self) -> bool:
        """Whether its doors stand open."""
        return self.clerk is not None and bool(self.ports)

    async def start(self) -> dict[str, int]:
        """Start it and return its ports once its doors stand open; WeftlineError or OSError when they cannot be."""
        if self._minding is not None:
            raise RuntimeError("an ingress process is started once")
        await self._open()
        self._minding = asyncio.create_task(self._mind())
        return self.ports

    def drain(self, grace_s: float) -> None:
        """Have it take nothing new and end when its open calls have, at most after `grace_s`."""
        self._ending.set()
        if self.clerk is not None:
            self.clerk.say(msg.encode(msg.Drain(grace_s)))

    async def wait_end(self) -> None:
        """Wait until it has ended after `drain`."""
        if self._minding is not None:
            await asyncio.shield(self._minding)

    async def stop(self) -> None:
        """End it now. Safe to call twice."""
        self._ending.set()
        if self._child is not None:
            self._child.kill()
        if self._minding is not None:
            await asyncio.wait([self._minding])

    async def _open(self) -> None:
        """Start a process and wait until its doors stand open; nothing of it is left when they cannot be."""
        loop = asyncio.get_running_loop()
        child = Child(self._extent_bytes, self._entry)
        calls_max = self.spec.config.limits.calls_max
        clerk = FrontendConnection(self._backend, child.granted, child.answers, self._orders, calls_max)
        self._child = child
        try:
            await clerk.serve(child.sock, frame_bytes_max(self.spec.config))
            clerk.say(msg.encode(msg.Begin(encode_spec(self.spec))))
            self._greet(clerk)
            self.ports = await asyncio.wait_for(clerk.wait_opened(), OPEN_S)
        except BaseException as error:
            clerk.close()
            await clerk.wait_closed()
            how = await loop.run_in_executor(None, child.wait_end, GOING_S)
            self._child = None
            if isinstance(error, TimeoutError):
                raise SessionClosed(f"ingress process {self.spec.name} took more than {OPEN_S:g} s to open") from None
            if isinstance(error, SessionClosed):
                raise SessionClosed(f"ingress process {self.spec.name} ended before it was open: {how}") from None
            raise
        self.spec = self.spec.at(self.ports)
        self.clerk = clerk
        self._restarts.ready()

    async def _mind(self) -> None:
        """Wait for its end, again and again."""
        while self.clerk is not None and self._child is not None:
            how = await self._wait_death(self.clerk, self._child)
            self.clerk = self._child = None
            if self._ending.is_set():
                return
            _log.error("ingress process %s ended: %s; it is started again", self.spec.name, how)
            delay_ms = self._restarts.died(_now_ms(), was_ready=True)
            while delay_ms is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), delay_ms / 1000)
                if self._ending.is_set():
                    return
                try:
                    await self._open()
                    if self._ending.is_set() and self._child is not None:  # drained while it was started
                        self._child.kill()
                    break
                except Exception as error:
                    _log.error("ingress process %s could not be started: %s", self.spec.name, error)
                    delay_ms = self._restarts.died(_now_ms(), was_ready=False)
            if delay_ms is None:
                self.given_up = True
                _log.error("ingress process %s is given up: it keeps failing to start", self.spec.name)

    async def _wait_death(self, clerk: FrontendConnection, child: Child) -> str:
        """Wait until the connection ends, which its process does not outlive, and return how it ended."""
        loop = asyncio.get_running_loop()
        closed = asyncio.create_task(clerk.wait_closed())
        heard_s, silent_s = clerk.heard_s, 0.0
        while not (await asyncio.wait([closed], timeout=msg.PING_S))[0]:
            clerk.say(msg.encode(msg.Ping()))
            # Rounds are counted and not seconds: a round in which this loop stood still read nothing either.
            silent_s = silent_s + msg.PING_S if clerk.heard_s == heard_s else 0.0
            heard_s = clerk.heard_s
            if silent_s > SILENT_S:
                clerk.close(f"it was silent for {SILENT_S:g} s")
        how = await loop.run_in_executor(None, child.wait_end, END_S if clerk.drained else GOING_S)
        return clerk.why_closed or how


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1000


async def wait_all(keepers: list[FrontendSupervisor], grace_s: float) -> None:
    """Wait until all have ended after `drain`; what is left after `grace_s` and a moment more is stopped."""
    waiting = [asyncio.create_task(keeper.wait_end()) for keeper in keepers]
    if waiting:
        await asyncio.wait(waiting, timeout=grace_s + 1.0)
    for keeper in keepers:
        with contextlib.suppress(ProcessLookupError):
            await keeper.stop()
