"""Messages over a Unix stream socket: a four-byte little-endian length, then the body.

Stream rather than sequenced-packet sockets: those refuse messages beyond about 200 KiB, and a message may carry many
inline values. Descriptors ride along with a frame and are queued in order, so the message that announces one takes the
next. Bytes that the socket does not take at once wait in `unsent_bytes` until `flush`.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from array import array
from collections import deque

FRAME_BYTES_MAX = 1 << 30
"""Longest message. Values inside are capped at 16 KiB each, and the largest batch has 4 096 items: with a dozen inputs
all of that size it stays below, and what announces more is a broken peer."""

READ_BYTES = 64 * 1024
"""Below malloc's threshold for mapping fresh pages, which would cost more than the read."""

DESCRIPTORS_MAX = 16
_CONTROL_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * array("i").itemsize)
SOCKET_BUFFER_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One side of a connection between the runtime and a worker.

    A blocking channel may be sent to from several threads; everything else is for one thread at a time.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._sock = sock
        self._blocking = blocking
        # A reader that blocks in recvmsg itself is also woken when its peer makes room by reading; one in poll is not,
        # which saves a context switch for every message.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._received = bytearray()  # the beginning of a message, and how long it must become
        self._wanted_bytes = 0
        self._sending = threading.Lock()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent_bytes(self) -> int:
        return sum(len(view) for view, _ in self._unsent) if self._unsent else 0

    def send(self, body: bytes, descriptor: int | None = None) -> bool:
        """Send one message, with a duplicate of `descriptor` if given; ChannelClosed when nobody is there.

        Returns whether everything has left. A blocking channel waits for that; the other kind keeps what does not fit
        for `flush`.
        """
        frame = len(body).to_bytes(4, "little") + body
        if self._blocking:
            with self._sending:
                self._send_all(frame, descriptor)
            return True
        if not self._unsent and descriptor is None and self._send_now(frame):
            return not self._unsent
        self._unsent.append((memoryview(frame), [] if descriptor is None else [os.dup(descriptor)]))
        return self.flush()

    def try_send(self, body: bytes) -> bool:
        """Send one short message on a blocking channel if nobody else is sending and the socket takes it at once."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            frame = len(body).to_bytes(4, "little") + body
            sent = self._sock.send(frame, socket.MSG_DONTWAIT)
            self._send_all(frame[sent:], None)  # the rest of a frame that has begun must follow
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        finally:
            self._sending.release()

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
            if len(self._received) < self._wanted_bytes:
                return []
            data = bytes(self._received)
            self._received.clear()
        self._wanted_bytes = 4
        frames, at, end = [], 0, len(data)
        while end - at >= 4:
            size = int.from_bytes(data[at : at + 4], "little")
            if size > FRAME_BYTES_MAX:
                raise ChannelClosed(f"a message of {size} bytes; the most is {FRAME_BYTES_MAX}")
            if end - at - 4 < size:
                self._wanted_bytes = 4 + size
                break
            frames.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        if at < end:
            self._received += data[at:]
        return frames

    def _send_now(self, frame: bytes) -> bool:
        """Send a frame if the socket takes all of it now; what it takes of a longer one is not sent again."""
        try:
            sent = self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if sent < len(frame):
            self._unsent.append((memoryview(frame)[sent:], []))
        return True

    def _send_all(self, frame: bytes, descriptor: int | None) -> None:
        try:
            if descriptor is not None:
                frame = frame[socket.send_fds(self._sock, [frame], [descriptor]) :]
            if frame:
                self._sock.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
