"""Messages over a Unix stream socket: a four-byte little-endian length, then the body.

Stream rather than sequenced-packet sockets: those refuse messages beyond about 200 KiB, and a message may carry many
inline values. Descriptors ride along with a frame and are queued in order, so the message that announces one takes the
next. Bytes that the socket does not take at once wait in `unsent_bytes` until `flush`.
"""

from __future__ import annotations

import os
import select
import socket
from array import array
from collections import deque

FRAME_BYTES_MAX = 256 << 20
"""Longest message. Values inside are capped at 16 KiB each, so only a broken peer ever comes near."""

READ_BYTES = 64 * 1024
"""Below malloc's threshold for mapping fresh pages, which would cost more than the read."""

DESCRIPTORS_MAX = 16
_CONTROL_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * array("i").itemsize)
SOCKET_BUFFER_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One side of a connection between the runtime and a worker. Not thread-safe."""

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._sock = sock
        self._blocking = blocking
        # A reader that blocks in recvmsg itself is also woken when its peer makes room by reading; one in poll is not,
        # which saves a context switch for every message.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent_bytes(self) -> int:
        return sum(len(view) for view, _ in self._unsent)

    def send(self, body: bytes, descriptor: int | None = None) -> None:
        """Send one message, with a duplicate of `descriptor` if given; ChannelClosed when nobody is there.

        A blocking channel waits until everything has left; the other kind keeps what does not fit for `flush`.
        """
        frame = memoryview(len(body).to_bytes(4, "little") + body)
        if self._blocking:
            self._send_all(frame, descriptor)
            return
        self._unsent.append((frame, [] if descriptor is None else [os.dup(descriptor)]))
        self.flush()

    def flush(self) -> bool:
        """Send what is waiting; True when nothing is left."""
        while self._unsent:
            frame, descriptors = self._unsent[0]
            try:
                sent = socket.send_fds(self._sock, [frame], descriptors) if descriptors else self._sock.send(frame)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            for descriptor in descriptors:
                os.close(descriptor)
            if sent == len(frame):
                self._unsent.popleft()
            else:
                self._unsent[0] = (frame[sent:], [])
        return True

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived whole; a blocking channel waits for at least one.

        Raises ChannelClosed at the end of the stream, and for a frame longer than FRAME_BYTES_MAX.
        """
        while True:
            try:
                if self._blocking:
                    self._poll.poll()
                data, control, _, _ = self._sock.recvmsg(READ_BYTES, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                return []
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            for _, _, fds in control:
                self._descriptors.extend(array("i", fds[: len(fds) - len(fds) % array("i").itemsize]))
            if not data:
                raise ChannelClosed("the other side closed the connection")
            frames = self._frames(data)
            if frames or not self._blocking:
                return frames

    def has_mail(self) -> bool:
        """Whether `receive` would find something at once."""
        return bool(self._poll.poll(0))

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the message just received; the caller owns it."""
        if not self._descriptors:
            raise ChannelClosed("a message announced a descriptor that did not come")
        return self._descriptors.popleft()

    def close(self) -> None:
        self._sock.close()
        for descriptor in [*self._descriptors, *(d for _, ds in self._unsent for d in ds)]:
            os.close(descriptor)
        self._descriptors.clear()
        self._unsent.clear()

    def _frames(self, data: bytes) -> list[bytes]:
        """Return the messages that end in `data`; what is left over waits for more."""
        if self._received:
            self._received += data
            data = bytes(self._received)
        frames, at = [], 0
        while len(data) - at >= 4:
            size = int.from_bytes(data[at : at + 4], "little")
            if size > FRAME_BYTES_MAX:
                raise ChannelClosed(f"a message of {size} bytes; the most is {FRAME_BYTES_MAX}")
            if len(data) - at - 4 < size:
                break
            frames.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        self._received = bytearray(data[at:])
        return frames

    def _send_all(self, frame: memoryview, descriptor: int | None) -> None:
        try:
            if descriptor is not None:
                frame = frame[socket.send_fds(self._sock, [frame], [descriptor]) :]
            if frame:
                self._sock.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
