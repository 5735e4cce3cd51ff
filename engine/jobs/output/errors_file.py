"""Error rows as JSON lines on disk, in row order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

import msgspec

from weftline.engine.jobs.output.documents import Unreadable, decode, encode


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that has no outputs.

    place, id: of the row, as in `rows`.
    step, error, reason: as in `rows.RowError`.
    part:      the part it belongs to.
    """

    place: int
    id: str
    step: str
    error: str
    reason: str
    part: int


def encode_rows(rows: Iterable[ErrorRow]) -> bytes:
    """Return error rows as lines, in the order of their places."""
    return b"".join(encode(row) for row in sorted(rows, key=lambda row: row.place))


def read_rows(file: BinaryIO) -> Iterator[ErrorRow]:
    """Yield the error rows of a file; Unreadable names the line."""
    for number, line in enumerate(file, 1):
        try:
            yield decode(line, ErrorRow)
        except Unreadable as error:
            raise Unreadable(f"line {number}: {error}") from None
