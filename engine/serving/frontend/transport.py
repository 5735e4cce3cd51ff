"""Transport of messages between processes: length-prefixed frames on a socket.

`send` never blocks and never fails: bytes that the socket does not accept are buffered. Senders of large amounts call
`wait_writable` first, which is the back-pressure of a slow reader. An invalid message closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

UNSENT_BYTES = 1 << 20
"""Unsent bytes from which `wait_writable` waits."""

JOINED_BYTES = 64 << 10
"""Bytes of messages that are joined to one write at the end of a turn of the loop; more are written at once."""

HEAD_BYTES = 4
"""Length prefix, little-endian."""

_log = logging.getLogger("weftline.ingress")


def frame(body: bytes) -> bytes:
    """Return a message with its length prefix."""
    return len(body).to_bytes(HEAD_BYTES, "little") + body


class FrameDecoder:
    """Incremental decoder of frames. Each byte is copied at most twice.

    frame_bytes_max: longest message; ValueError as soon as a longer one is announced.
    """

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._partial = bytearray()
        self._needed_bytes = HEAD_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages completed by `data`; an incomplete rest is kept."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed_bytes:
                return []
            data = bytes(self._partial)
            self._partial = bytearray()
        self._needed_bytes = HEAD_BYTES
        bodies, at, end = [], 0, len(data)
        while end - at >= HEAD_BYTES:
            size = int.from_bytes(data[at : at + HEAD_BYTES], "little")
            if size > self._frame_bytes_max:
                raise ValueError(f"a message of {size} bytes; the most is {self._frame_bytes_max}")
            if end - at - HEAD_BYTES < size:
                self._needed_bytes = HEAD_BYTES + size
                break
            bodies.append(data[at + HEAD_BYTES : at + HEAD_BYTES + size])
            at += HEAD_BYTES + size
        if at < end:
            self._partial += data[at:]
        return bodies


class FrontendTransport(asyncio.Protocol):
    """One end of the connection.

    on_message:  called with each message; an exception of it closes the connection.
    on_close:    called once when the connection has ended, with the reason; '' if the peer closed it.
    pause_reads: stop reading while the peer does not read; for one end of a connection only, or both would wait.
    """

    def __init__(
        self,
        on_message: Callable[[bytes], None],
        on_close: Callable[[str], None],
        frame_bytes_max: int,
        pause_reads: bool = False,
    ) -> None:
        self._pause_reads = pause_reads
        self._on_message = on_message
        self._on_close = on_close
        self._decoder = FrameDecoder(frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._joined = bytearray()
        self._writable = asyncio.Event()
        self._writable.set()
        self._reason = ""
        self.is_open = False

    @classmethod
    async def connect(
        cls,
        sock: socket.socket,
        on_message: Callable[[bytes], None],
        on_close: Callable[[str], None],
        frame_bytes_max: int,
        pause_reads: bool = False,
    ) -> FrontendTransport:
        """Wrap a connected socket, and own it."""
        sock.setblocking(False)
        transport = cls(on_message, on_close, frame_bytes_max, pause_reads)
        await asyncio.get_running_loop().create_connection(lambda: transport, sock=sock)
        return transport

    def send(self, body: bytes) -> None:
        """Send one message, with the others of this turn of the loop; no effect on a closed connection."""
        if self._transport is None or self._transport.is_closing():
            return
        if not self._joined:
            self._loop.call_soon(self._flush)
        self._joined += frame(body)
        if len(self._joined) > JOINED_BYTES:
            self._flush()

    def _flush(self) -> None:
        joined, self._joined = self._joined, bytearray()
        if joined and self._transport is not None and not self._transport.is_closing():
            self._transport.write(joined)

    @property
    def writable(self) -> bool:
        """True if `wait_writable` would not wait."""
        return self._writable.is_set()

    async def wait_writable(self) -> None:
        """Wait until the peer has read most of the sent bytes, or is gone."""
        await self._writable.wait()

    def close(self, reason: str = "") -> None:
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not subclass it
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._decoder.feed(data):
                if not self.is_open:
                    return
                self._on_message(body)
        except Exception as error:
            # Not logged with its text, which may quote bytes of requests.
            _log.error("invalid message (%s); the connection is closed", type(error).__name__)
            _log.debug("the invalid message", exc_info=True)
            self.is_open = False
            self.close("it sent an invalid message")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._transport = None
        self._writable.set()
        self._on_close(self._reason)

    def pause_writing(self) -> None:
        self._writable.clear()
        if self._pause_reads and self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._writable.set()
        if self._pause_reads and self._transport is not None:
            self._transport.resume_reading()
