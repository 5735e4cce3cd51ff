"""Base of line-oriented readers: blocks of whole lines from files, compressed files and standard input.

The end of a block depends only on where the first block begins: reading again from the start of any block gives the
same blocks.
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
from weftline.engine.jobs.sources.reader import HIDDEN_FIELD, Batch, Mark, Origin, RowRange
from weftline.errors import InputError

BLOCK_BYTES = 1 << 20

LINE_BYTES_MAX = 256 << 20
"""Longest line, or record of CSV."""

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines of a file.

    byte: offset of the first line in the (uncompressed) file.
    line: number of the first line, from 1.
    """

    data: bytes
    byte: int
    line: int


Cut = Callable[[bytes, bool], int]
"""Returns the number of bytes that are whole lines, 0 for none. The flag is True at the end of the file."""


class StandardInput:
    """Standard input with look-ahead; can be read once. A resumed job reads the same stream from its start."""

    origin = Origin("stdin", "standard input")

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._head = b""
        self._opened = False
        self._lock = threading.Lock()

    def head(self, size_bytes: int) -> bytes:
        """Return the first bytes without consuming them; fewer if the stream ends before."""
        while len(self._head) < size_bytes and not self._opened:
            more = self._stream.read(size_bytes - len(self._head))
            if not more:
                break
            self._head += more
        return self._head[:size_bytes]

    def open(self) -> BinaryIO:
        """Return the whole stream; InputError on the second call."""
        with self._lock:
            if self._opened:
                raise InputError("standard input can be read once only\n    fix: put the data into a file")
            self._opened = True
        return cast(BinaryIO, io.BufferedReader(_Replayed(self._head, self._stream), BLOCK_BYTES))


class _Replayed(io.RawIOBase):
    """Stream that yields the look-ahead, then the rest. Closing it leaves the inner stream open."""

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


class TextReader(ABC):
    """Reads files of lines, or standard input. A piece is a file; a mark is a byte, a line and a row."""

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
        """Yield one batch for each block."""
        with self._opened(piece.origin) as stream:
            byte, line, row = at or (*self._start(piece.origin, stream), 0)
            if at is not None:
                seek(stream, byte, self._packed(piece.origin))
            for block in blocks(stream, self.origins[piece.origin].shown, byte, line, self._cut(piece.origin)):
                table = self._parsed(block, piece.origin)
                if table.num_rows:
                    yield Batch([block.byte, block.line, row], row, table)
                row += table.num_rows

    def fingerprint(self) -> Mapping[str, str]:
        if self._stdin is not None:
            return {"stdin": "cannot be checked"}
        return of_tables(self._files, self.origins)

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    @abstractmethod
    def _learn(self) -> pa.Schema:
        """Infer the columns from the beginning of the first file."""

    @abstractmethod
    def _parsed(self, block: LineBlock, origin: int) -> pa.Table:
        """Return a block's rows, with the hidden column UNUSABLE last."""

    def _cut(self, origin: int) -> Cut:
        return whole_lines

    def _start(self, origin: int, stream: BinaryIO) -> tuple[int, int]:
        """Seek to the first row and return its byte and line."""
        skip = self._before_rows(origin)
        seek(stream, len(skip), self._packed(origin))
        return len(skip), 1 + skip.count(b"\n")

    def _before_rows(self, origin: int) -> bytes:
        """Return the bytes of a file before its rows."""
        head = self._head(origin, len(BOM))
        return BOM if head.startswith(BOM) else b""

    def _head(self, origin: int, size_bytes: int) -> bytes:
        """Return the first bytes of a file, without consuming standard input."""
        if self._stdin is not None:
            return self._stdin.head(size_bytes)
        with self._opened(origin) as stream:
            return _read(stream, size_bytes, self.origins[origin].shown, 1)

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


def all_readable(table: pa.Table) -> pa.Table:
    """Append the hidden column of a table whose rows are all readable."""
    return table.append_column(HIDDEN_FIELD, pa.nulls(table.num_rows, pa.string()))


def whole_lines(data: bytes, end: bool) -> int:
    """Return the size of the whole lines: the Cut of files without quoted line ends."""
    return len(data) if end else data.rfind(b"\n") + 1


def is_utf8(data: bytes) -> bool:
    """Return True for valid UTF-8."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def unpacked(stream: BinaryIO, compression: str | None) -> BinaryIO:
    """Return the decompressed stream."""
    if compression == "zstd":
        return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd"))
    opener: Any = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}.get(compression or "")
    return stream if opener is None else cast(BinaryIO, opener(stream))


def peeked(stream: BinaryIO, size_bytes: int, shown: str) -> tuple[bytes, BinaryIO]:
    """Return the first bytes of a stream that stands at its start, and a stream of all of its bytes."""
    head = _read(stream, size_bytes, shown, 1)
    if stream.seekable():
        stream.seek(0)
        return head, stream
    return head, cast(BinaryIO, io.BufferedReader(_Replayed(head, stream), BLOCK_BYTES))


def seek(stream: BinaryIO, byte: int, packed: bool) -> None:
    """Move to a byte; compressed streams and pipes are read up to there."""
    if not packed and stream.seekable():
        stream.seek(byte)
        return
    while byte > 0:
        got = len(stream.read(min(byte, BLOCK_BYTES)))
        if not got:
            return
        byte -= got


def blocks(stream: Any, shown: str, byte: int = 0, line: int = 1, cut: Cut = whole_lines) -> Iterator[LineBlock]:
    """Yield the blocks of a stream that stands at `byte` of its file; InputError if it cannot be read.

    A block is cut from the next BLOCK_BYTES, doubled while no line ends in them. Short reads do not change blocks.
    """
    held, wanted = b"", BLOCK_BYTES
    while True:
        held += _read(stream, wanted + 1 - len(held), shown, line)  # one byte more detects the end of the file
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


def _read(stream: Any, size_bytes: int, shown: str, line: int) -> bytes:
    """Read exactly this many bytes, fewer only at the end: a pipe returns partial reads."""
    data = b""
    try:
        while len(data) < size_bytes:
            more = stream.read(size_bytes - len(data))
            if not more:
                break
            data = data + more if data else more
    except Exception as error:  # remote file systems raise any exception of their client
        raise unreadable(f"{shown}, near line {line}", error) from None
    return data
