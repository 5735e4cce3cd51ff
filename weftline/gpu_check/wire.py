"""Messages between check processes: JSON with descriptors over sequenced-packet sockets.

One packet is one message. Every wait has an end: a check must tell a hang apart from a slow machine.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

MESSAGE_BYTES_MAX = 160 * 1024
"""Longest message; the kernel refuses packets beyond about 200 KiB."""

DESCRIPTORS_MAX = 8


class PeerGone(Exception):
    """The other side ended."""


class CheckSocket:
    """One side of a connection. Owns its socket; received descriptors are the caller's."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message, with duplicates of `fds`; PeerGone when the peer has closed."""
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            if fds:
                socket.send_fds(self.sock, [body], list(fds))
            else:
                self.sock.send(body)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """Return the next message and its descriptors; TimeoutError after `timeout_s`, PeerGone at the end."""
        if self.sock.gettimeout() != timeout_s:
            self.sock.settimeout(timeout_s)
        try:
            body, fds, _, _ = socket.recv_fds(self.sock, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from None
        if not body:
            for fd in fds:
                os.close(fd)
            raise PeerGone("the other side closed the connection")
        return json.loads(body), fds

    def pass_on(self, to: CheckSocket, timeout_s: float) -> None:
        """Send the next message on as it came; TimeoutError, and PeerGone when either side is gone."""
        if self.sock.gettimeout() != timeout_s:
            self.sock.settimeout(timeout_s)
        try:
            body = self.sock.recv(MESSAGE_BYTES_MAX)
            if not body:
                raise PeerGone("the other side closed the connection")
            to.sock.send(body)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from None

    def close(self) -> None:
        self.sock.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
