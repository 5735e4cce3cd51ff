"""Connection between the engine and an ingress process, in an event loop.

Hands over whole messages as bytes, in order. Sending never waits and never fails: what the socket does not take is
kept, and whoever sends much waits for `wait_writable` first, which is how a slow reader holds up a fast writer. What
cannot be understood closes the connection: the peer is broken or hostile, and nothing more of it is heard.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from weftline.engine.serving.frontend.frames import Frames, framed

UNSENT_BYTES = 1 << 20
"""From so many unsent bytes on, `wait_writable` waits."""

_log = logging.getLogger("weftline.ingress")


class FrontendTransport(asyncio.Protocol):
    """A connection.

    heard:  called with each message; an exception of it closes the connection.
    closed: called once, when nothing can be said or heard any more, with why ('' when the peer went).
    holds_back: hear nothing more while the peer does not read; for one side of a connection only.
    """

    def __init__(
        self,
        heard: Callable[[bytes], None],
        closed: Callable[[str], None],
        frame_bytes_max: int,
        holds_back: bool = False,
    ) -> None:
        self._holds_back = holds_back
        self._heard = heard
        self._closed = closed
        self._frames = Frames(frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._why = ""
        self.is_open = False

    @classmethod
    async def connect(
        cls,
        sock: socket.socket,
        heard: Callable[[bytes], None],
        closed: Callable[[str], None],
        frame_bytes_max: int,
        holds_back: bool = False,
    ) -> FrontendTransport:
        """Take over a connected socket."""
        sock.setblocking(False)
        wire = cls(heard, closed, frame_bytes_max, holds_back)
        await asyncio.get_running_loop().create_connection(lambda: wire, sock=sock)
        return wire

    def send(self, body: bytes) -> None:
        """Send one message; nothing happens when nobody is there any more."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(body))

    async def wait_writable(self) -> None:
        """Wait until the peer has read most of what was sent, or is gone."""
        await self._room.wait()

    def close(self, why: str = "") -> None:
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                if not self.is_open:
                    return
                self._heard(body)
        except Exception as error:
            # Whatever it is, it came of what the peer sent; its words may hold bytes of requests and are not logged.
            _log.error("a message cannot be understood (%s); the connection is closed", type(error).__name__)
            _log.debug("the message in question", exc_info=True)
            self.is_open = False
            self.close("it sent what cannot be understood")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._transport = None
        self._room.set()
        self._closed(self._why)

    def pause_writing(self) -> None:
        self._room.clear()
        if self._holds_back and self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._room.set()
        if self._holds_back and self._transport is not None:
            self._transport.resume_reading()
