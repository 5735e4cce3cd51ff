"""Standard input as a data set, with look-ahead and a single pass."""

from __future__ import annotations

import io
import threading
from typing import Any, BinaryIO, cast

from weftline.engine.jobs.sources.piece import Origin
from weftline.errors import InputError

BUFFER_BYTES = 1 << 20


class StandardInput:
    """Holds what was looked at until it is read. A resumed job is given the same stream again, from its start."""

    origin = Origin("stdin", "standard input")

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._head = b""
        self._opened = False
        self._lock = threading.Lock()

    def head(self, size_bytes: int) -> bytes:
        """Return the first bytes; fewer when it ends before."""
        while len(self._head) < size_bytes and not self._opened:
            more = self._stream.read(size_bytes - len(self._head))
            if not more:
                break
            self._head += more
        return self._head[:size_bytes]

    def open(self) -> BinaryIO:
        """Return a stream of everything; InputError the second time."""
        with self._lock:
            if self._opened:
                raise InputError("standard input can be read once only\n    fix: put the data into a file")
            self._opened = True
        return cast(BinaryIO, io.BufferedReader(_Replayed(self._head, self._stream), BUFFER_BYTES))


class _Replayed(io.RawIOBase):
    """First what was looked at, then the rest. Closing it leaves the stream open."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._at, self._stream = head, 0, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._head[self._at : self._at + len(buffer)]
        self._at += len(data)
        data = data or self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
