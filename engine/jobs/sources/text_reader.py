"""Block reader for text files, with blocks cut at line ends.

Where blocks end follows from where the first begins: a file read anew from the beginning of any block is cut as before.

Standard input as a data set, with look-ahead and a single pass.

Base of line-oriented readers: sequential reading in blocks.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa

from weftline.engine.jobs.sources.formats import compression_of
from weftline.engine.jobs.sources.locations import SourceFile, of_tables, origins, unreadable
from weftline.engine.jobs.sources.reader import UNUSABLE, Batch, Mark, Origin, RowRange
from weftline.errors import InputError

BLOCK_BYTES = 1 << 20
"""What is read at a time."""

LINE_BYTES_MAX = 256 << 20
"""Longest line, or record of CSV."""

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines of a file.

    byte: where they begin, in the file or in what it unpacks to.
    line: number of the first line, from 1.
    """

    data: bytes
    byte: int
    line: int


Cut = Callable[[bytes, bool], int]
"""Says how many of these bytes are whole lines (True: the file ends after them); 0 when none is."""


def whole_lines(data: bytes, end: bool) -> int:
    """The Cut of files in which every line end ends a line."""
    return len(data) if end else data.rfind(b"\n") + 1


def is_utf8(data: bytes) -> bool:
    """Whether these bytes are text."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def unpacked(stream: BinaryIO, compression: str | None) -> BinaryIO:
    """Return a stream of what a compressed stream holds."""
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(stream))
    if compression == "bz2":
        return cast(BinaryIO, bz2.open(stream))
    if compression == "xz":
        return cast(BinaryIO, lzma.open(stream))
    if compression == "zstd":
        return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd"))
    return stream


def seek(stream: BinaryIO, byte: int, packed: bool) -> None:
    """Move to a byte; what is packed, or comes through a pipe, is read up to there."""
    if not packed and stream.seekable():
        stream.seek(byte)
        return
    while byte > 0:
        got = len(stream.read(min(byte, BLOCK_BYTES)))
        if not got:
            return
        byte -= got


def blocks(stream: Any, shown: str, byte: int = 0, line: int = 1, cut: Cut = whole_lines) -> Iterator[LineBlock]:
    """Yield a stream's blocks; it stands at `byte` of its file already. InputError when it cannot be read.

    A block is cut from the next BLOCK_BYTES, and from twice as much as long as no line ends in them: never from what
    happens to have been read.
    """
    held, wanted = b"", BLOCK_BYTES
    while True:
        try:
            held += _read(stream, wanted + 1 - len(held))  # one more shows whether the file goes on
        except Exception as error:  # as in Found.open
            raise unreadable(f"{shown}, near line {line}", error) from None
        if not held:
            return
        end = len(held) <= wanted
        size = cut(held[:wanted], end)
        if size:
            data, held, wanted = held[:size], held[size:], BLOCK_BYTES
            yield LineBlock(data, byte, line)
            byte, line = byte + size, line + data.count(b"\n")
        elif end:
            raise InputError(f"{shown}:{line}: a quoted value begins here or below and never ends")
        elif wanted >= LINE_BYTES_MAX:
            raise InputError(f"{shown}:{line}: more than {LINE_BYTES_MAX} bytes without an end of line")
        else:
            wanted *= 2


def _read(stream: Any, size_bytes: int) -> bytes:
    """Return so many bytes, fewer at the end alone: a pipe gives what it has."""
    data = b""
    while len(data) < size_bytes:
        more = stream.read(size_bytes - len(data))
        if not more:
            break
        data = data + more if data else more
    return data


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


HIDDEN_FIELD = pa.field(UNUSABLE, pa.string())


class TextReader(ABC):
    """Reads files of lines. A piece is a file; a mark is a byte, a line and a row.

    files: what is read; or standard input, which can be read once.
    """

    def __init__(self, files: Sequence[SourceFile] | StandardInput) -> None:
        self._stdin = files if isinstance(files, StandardInput) else None
        self._files = () if isinstance(files, StandardInput) else files
        self.origins: Sequence[Origin] = origins(self._files) if self._stdin is None else (self._stdin.origin,)
        self.schema: pa.Schema = self._learn()

    @property
    def rows(self) -> int | None:
        return None

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return [RowRange(origin) for origin in range(len(self.origins))]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield batches, a block each."""
        shown = self.origins[piece.origin].shown
        with self._opened(piece.origin) as stream:
            byte, line, row = at or (*self._start(piece.origin, stream), 0)
            if at is not None:
                seek(stream, byte, self._packed(piece.origin))
            for block in blocks(stream, shown, byte, line, self._cut(piece.origin)):
                table = self._parsed(block, piece.origin)
                if table.num_rows:
                    yield Batch([block.byte, block.line, row], row, table)
                row += table.num_rows

    def fingerprint(self) -> Mapping[str, str]:
        if self._stdin is not None:
            return {"stdin": "cannot be checked"}
        return of_tables(self._files, self.origins)

    def close(self) -> None:
        """Nothing stays open between reads."""

    @abstractmethod
    def _learn(self) -> pa.Schema:
        """Return the columns, from the beginning of the first file."""

    @abstractmethod
    def _parsed(self, block: LineBlock, origin: int) -> pa.Table:
        """Return a block's rows, with the hidden column UNUSABLE last."""

    def _cut(self, origin: int) -> Cut:
        return whole_lines

    def _start(self, origin: int, stream: BinaryIO) -> tuple[int, int]:
        """Read up to the first row, and return the byte and the line at which it begins."""
        skip = self._before_rows(origin)
        seek(stream, len(skip), self._packed(origin))
        return len(skip), 1 + skip.count(b"\n")

    def _before_rows(self, origin: int) -> bytes:
        """Return what stands in a file before its rows."""
        head = self._head(origin, len(BOM))
        return BOM if head.startswith(BOM) else b""

    def _head(self, origin: int, size_bytes: int) -> bytes:
        """Return the first bytes of a file; standard input can still be read from its start."""
        if self._stdin is not None:
            return self._stdin.head(size_bytes)
        with self._opened(origin) as stream:
            for block in blocks(
                _Once(stream, size_bytes), self.origins[origin].shown, cut=lambda data, end: end * len(data)
            ):
                return block.data
        return b""

    def _packed(self, origin: int) -> bool:
        return self._stdin is not None or compression_of(self._files[origin].shown) is not None

    @contextmanager
    def _opened(self, origin: int) -> Iterator[BinaryIO]:
        if self._stdin is not None:
            with self._stdin.open() as stream:
                yield stream
            return
        file = self._files[origin]
        with file.open() as packed, unpacked(packed, compression_of(file.shown)) as stream:
            yield stream


class _Once:
    """A stream that ends after so many bytes."""

    def __init__(self, stream: BinaryIO, size_bytes: int) -> None:
        self._stream, self._left = stream, size_bytes

    def read(self, size_bytes: int) -> bytes:
        data = self._stream.read(min(size_bytes, self._left)) if self._left else b""
        self._left -= len(data)
        return data
