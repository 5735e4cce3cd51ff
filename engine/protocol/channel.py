"""Send and receive messages over a Unix stream socket: a four-byte little-endian length, then the body.

Sequenced-packet sockets refuse messages beyond about 200 KiB, and a message may hold many inline values. File
descriptors are sent with a frame and queued in order: each message that announces a descriptor consumes the next one.
Bytes that the socket does not accept at once are buffered (`unsent_bytes`) until `flush`.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from array import array
from collections import deque
from collections.abc import Sequence

FRAME_BYTES_MAX = 1 << 30
"""Longest message. Inline values have at most 16 KiB each and batches at most 4 096 items: a dozen inputs of that size
fit, so a longer frame is a protocol error of the peer."""

READ_BYTES = 64 * 1024
"""Most bytes of one read: below malloc's mmap threshold, above which page faults cost more than the read."""

DESCRIPTORS_MAX = 16
_CONTROL_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * array("i").itemsize)
SOCKET_BUFFER_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The connection is closed or broken."""


class Channel:
    """One end of the connection between the runtime and a worker.

    `send` on a blocking channel is thread-safe; every other method may be called by one thread at a time.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._sock = sock
        self._blocking = blocking
        # A thread blocked in recvmsg also wakes when the peer frees buffer space by reading. A thread blocked in poll
        # does not, which saves a context switch per message.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._received = bytearray()  # start of an incomplete message
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
        """Send one message, with a duplicate of `descriptor` if given; ChannelClosed when the peer is gone.

        Returns True if all of it was sent. A blocking channel waits until then. A non-blocking one buffers the rest for
        `flush`.
        """
        frame = len(body).to_bytes(4, "little") + body
        if self._blocking:
            with self._sending:
                self._send_all(frame, descriptor)
            return True
        if self._unsent or descriptor is not None:
            self._unsent.append((memoryview(frame), [] if descriptor is None else [os.dup(descriptor)]))
            return self.flush()
        try:
            sent = self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if sent < len(frame):
            self._unsent.append((memoryview(frame)[sent:], []))
        return sent == len(frame)

    def try_send(self, body: bytes) -> bool:
        """Send one short message on a blocking channel if no other thread sends and the socket accepts it at once."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            frame = len(body).to_bytes(4, "little") + body
            sent = self._sock.send(frame, socket.MSG_DONTWAIT)
            self._send_all(frame[sent:], None)  # a frame that was begun must be completed
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        finally:
            self._sending.release()

    def flush(self) -> bool:
        """Send unsent bytes; True when none are left."""
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
        """Return the complete messages; a blocking channel waits for at least one.

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
            if not self._received and int.from_bytes(data[:4], "little") == len(data) - 4:  # one message
                return [data[4:]]
            frames = self._frames(data)
            if frames or not self._blocking:
                return frames

    def has_mail(self) -> bool:
        """Return True if `receive` would return without waiting."""
        return bool(self._poll.poll(0))

    def wait_mail(self, beside: Sequence[int]) -> bool:
        """Wait until something is received, or a descriptor of `beside` is readable; True in the first case."""
        poll = select.poll()
        for descriptor in (self.fileno(), *beside):
            poll.register(descriptor, select.POLLIN)
        return any(descriptor == self.fileno() for descriptor, _ in poll.poll())

    def take_descriptor(self) -> int:
        """Return the descriptor that was sent with the last received message; the caller owns it."""
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
        """Return the messages completed by `data`; buffer the rest."""
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

    def _send_all(self, frame: bytes, descriptor: int | None) -> None:
        try:
            if descriptor is not None:
                frame = frame[socket.send_fds(self._sock, [frame], [descriptor]) :]
            if frame:
                self._sock.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
