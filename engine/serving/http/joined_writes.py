"""Joined writes of HTTP responses: a head leaves with what follows it in the same turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Any


class JoinedWrites:
    """Stands for the transport of a connection where uvicorn writes a response.

    A transport of uvloop writes at once, so a head and its body would be two system calls and two packets.
    """

    __slots__ = ("_head", "_head_is_next", "_loop", "_transport")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head_is_next = False
        self._head = b""

    def begin(self) -> None:
        """Note that the next write is a head."""
        self._head_is_next = True

    def write(self, data: bytes) -> None:
        if self._head_is_next:
            self._head_is_next, self._head = False, data
            self._loop.call_soon(self.flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write a head that nothing has followed."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return bool(self._transport.is_closing())
