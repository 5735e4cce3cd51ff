"""Base of line-oriented readers: sequential reading in blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from weftline.engine.jobs.sources import fingerprint
from weftline.engine.jobs.sources.finding import SourceFile, origins
from weftline.engine.jobs.sources.formats import compression_of
from weftline.engine.jobs.sources.lines import BOM, Cut, LineBlock, blocks, seek, unpacked, whole_lines
from weftline.engine.jobs.sources.piece import UNUSABLE, Batch, Mark, Origin, RowRange
from weftline.engine.jobs.sources.standard_input import StandardInput

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
        return fingerprint.of_tables(self._files, self.origins)

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
