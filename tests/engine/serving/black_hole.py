"""A TCP proxy on this machine that can become a black hole: from one moment on the network swallows every packet.

Its sockets get a kernel filter that drops whatever comes, before TCP sees it: nothing is acknowledged and nothing is
refused any more, on either side, nor is the end of a connection noticed. That is what a cable that was pulled, or a
firewall that forgot a connection, look like to both ends. It takes no privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Iterator

SO_ATTACH_FILTER = 26
_RETURN_0 = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction: of each packet, keep 0 bytes (linux/filter.h, BPF_RET | BPF_K)."""


class BlackHole:
    """Forwards connections to a port of this machine until `swallow` is called. `address`: where it listens."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.port: int = self._listening.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._threads[0].start()

    def swallow(self) -> None:
        """Let no packet through any more, of connections that are open and of new ones."""
        for one in [self._listening, *self._sockets]:
            program = ctypes.create_string_buffer(_RETURN_0)
            filter = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter)

    def close(self) -> None:
        for one in [self._listening, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._to)
                self._sockets += [near, far]
                for here, there in ((near, far), (far, near)):
                    copying = threading.Thread(target=self._copy, args=(here, there), daemon=True)
                    self._threads.append(copying)
                    copying.start()

    def _copy(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(65536):
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def black_hole(port: int) -> Iterator[BlackHole]:
    """Open a proxy to a port of this machine."""
    proxy = BlackHole(port)
    try:
        yield proxy
    finally:
        proxy.close()
