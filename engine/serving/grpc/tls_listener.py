"""Accept TLS connections and count their handshakes as connections.

asyncio's own server creates the protocol of a TLS connection after the handshake: clients that connect and stay silent
would be without a limit. Here a connection is refused before its handshake when there are too many.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

RETRY_S = 0.5
"""Pause after an accept() that failed: the process has no file descriptor left."""

_log = logging.getLogger("weftline.ingress")


class TlsListener:
    """Accepts connections of one listening socket until it is closed.

    protocol: creates the protocol of a connection whose handshake has ended.
    has_room: returns True while a further connection is admitted.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        handshake_s: float,
        protocol: Callable[[], asyncio.BaseProtocol],
        has_room: Callable[[], bool],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._context, self._handshake_s = listener, context, handshake_s
        self._protocol, self._has_room = protocol, has_room
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._accept())

    @property
    def handshakes(self) -> int:
        """Number of connections whose handshake has not ended."""
        return len(self._handshakes)

    def close(self) -> None:
        """Accept no further connections, and end open handshakes."""
        for task in (self._accepting, *self._handshakes):
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
            if not self._has_room():
                accepted.close()
                continue
            task = self._loop.create_task(self._shake_hands(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, accepted, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are among them
            _log.debug("a TLS handshake failed: %s", error)
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise
