"""Block reader for text files, with blocks cut at line ends.

Where blocks end follows from where the first begins: a file read anew from the beginning of any block is cut as before.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa

from weftline.engine.jobs.sources.finding import unreadable
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
