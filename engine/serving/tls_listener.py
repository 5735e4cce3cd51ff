"""Accept TLS connections with a limit on open handshakes.

asyncio's own server creates the protocol of a TLS connection after the handshake: clients that connect and stay silent
would be without a limit. Here a handshake that begins while HANDSHAKES_MAX are open has LATE_S, and the oldest of those
ends for a new one when there are LATE_MAX. So silent clients keep none out: an honest handshake takes milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

RETRY_S = 0.5
"""Pause after an accept() that failed: the process has no file descriptor left."""

HANDSHAKES_MAX, LATE_MAX = 256, 64
"""Most open handshakes, and further ones that have LATE_S; each holds about 100 KB."""

LATE_S = 0.8
"""Timeout of a late handshake in seconds."""

_log = logging.getLogger("weftline.ingress")


class TlsListener:
    """Accepts connections of one listening socket until it is closed.

    handshake_s:    timeout of a handshake.
    handshakes_max: most open handshakes; HANDSHAKES_MAX if that is less.
    protocol:       creates the protocol of a connection whose handshake has ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        handshake_s: float,
        handshakes_max: int,
        protocol: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._context, self._handshake_s = listener, context, handshake_s
        self._protocol = protocol
        self._handshakes_max = min(handshakes_max, HANDSHAKES_MAX)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._late: dict[asyncio.Task[None], None] = {}  # oldest first
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Accept no further connections, and end open handshakes."""
        for task in (self._accepting, *self._handshakes, *self._late):
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(self._listener)
            except ConnectionError:
                continue  # the client was gone before
            except OSError:
                _log.warning("no file descriptor is left for further connections; `ulimit -n` raises the limit")
                await asyncio.sleep(RETRY_S)
                continue
            self._begin_handshake(accepted)

    def _begin_handshake(self, accepted: socket.socket) -> None:
        if len(self._handshakes) < self._handshakes_max:
            task = self._loop.create_task(self._shake_hands(accepted, self._handshake_s))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
            return
        if len(self._late) >= LATE_MAX:
            next(iter(self._late)).cancel()
            del self._late[next(iter(self._late))]
        task = self._loop.create_task(self._shake_hands(accepted, min(LATE_S, self._handshake_s)))
        self._late[task] = None
        task.add_done_callback(lambda task: self._late.pop(task, None))

    async def _shake_hands(self, accepted: socket.socket, timeout_s: float) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, accepted, ssl=self._context, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are among them
            _log.debug("a TLS handshake failed: %s", error)
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise
