"""JSONL reader: one JSON object per line, each value as a JSON cell of its row (cells.py).

Columns are the keys of the first LEARN_ROWS lines of the first file; keys that first appear later are ignored, except
those that an input needs. A line that is no JSON object becomes a row of nulls with the reason in UNUSABLE.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from weftline.engine.jobs.rows import JSON_CELL
from weftline.engine.jobs.sources.cells import cell_field, is_unicode, learned_json
from weftline.engine.jobs.sources.json_list import HEAD_BYTES, as_lines, is_list
from weftline.engine.jobs.sources.locations import SourceFile
from weftline.engine.jobs.sources.reader import HIDDEN_FIELD, UNUSABLE, Batch, Mark, RowRange, with_late
from weftline.engine.jobs.sources.text_reader import (
    BOM,
    LINE_BYTES_MAX,
    LineBlock,
    StandardInput,
    TextReader,
    is_utf8,
    peeked,
)
from weftline.errors import InputError
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import kind_of, members, parse_syntax, repeats_key

LEARN_ROWS = 10_000
LEARN_BYTES = 4 << 20
"""Limits of schema inference on the first file."""


class JsonlReader(TextReader):
    """Files of one JSON object per line, or of one JSON list of objects, which is read from its start on a resume."""

    def __init__(self, files: Sequence[SourceFile] | StandardInput) -> None:
        self._lists = set[int]()
        if isinstance(files, StandardInput) and is_list(files.head(HEAD_BYTES)):
            self._lists.add(0)
            files = StandardInput(as_lines(files.open(), files.origin.shown))
        super().__init__(files)

    def _learn(self) -> pa.Schema:
        shown = self.origins[0].shown
        head = self._first_lines()
        found = (_object(line) for line in head.split(b"\n")[:LEARN_ROWS] if line.strip())
        rows = [row for row in found if isinstance(row, dict)]
        if head.strip() and not rows:
            why = _object(head.strip().split(b"\n")[0])
            raise InputError(
                f"{shown}: none of its first lines is a JSON object; the first: {why}\n"
                "    fix: write one object on each line, or one list of objects"
            )
        if odd := [name for row in rows for name in row if not is_unicode(name)]:
            raise InputError(f"{shown}: the key {odd[0]!r:.80} has half of a surrogate pair; expected UTF-8")
        return learned_json(rows)

    def expect(self, names: Collection[str]) -> None:
        self.schema = with_late(self.schema, {name: cell_field(name, pa.null(), JSON_CELL) for name in names})

    def _first_lines(self) -> bytes:
        """Return whole lines of the first file, at least one, without leading blank lines."""
        size = LEARN_BYTES
        while True:
            head = self._head(0, size)
            lines = head.removeprefix(BOM).lstrip()
            if len(head) < size:
                return lines
            if b"\n" in lines:
                return lines[: lines.rfind(b"\n")]
            if size >= LINE_BYTES_MAX:
                raise InputError(f"{self.origins[0].shown}:1: more than {LINE_BYTES_MAX} bytes without an end of line")
            size = min(2 * size, LINE_BYTES_MAX)

    def _parsed(self, block: LineBlock, origin: int) -> pa.Table:
        names, lines = self.schema.names, list(_numbered(block))
        all_utf8 = is_utf8(block.data)
        found = [_cells(line, all_utf8 or is_utf8(line)) for _, line in lines]
        rows = [one if isinstance(one, dict) else {} for one in found]
        if repeats_key(block.data, rows):
            found = [_once(one, line) for one, (_, line) in zip(found, lines)]
            rows = [one if isinstance(one, dict) else {} for one in found]
        reasons = [None if isinstance(one, dict) else f"line {number}: {one}" for one, (number, _) in zip(found, lines)]
        columns = [
            pa.array([None if (cell := row.get(name)) is None else bytes(cell) for row in rows], pa.string())
            for name in names
        ]
        fields = [*(cell_field(name, pa.string(), JSON_CELL) for name in names), HIDDEN_FIELD]
        return pa.table([*columns, pa.array(reasons, pa.string())], schema=pa.schema(fields))

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        for batch in super().read(piece, at):
            yield _by_element(batch) if piece.origin in self._lists else batch

    @contextmanager
    def _opened(self, origin: int) -> Iterator[BinaryIO]:
        shown = self.origins[origin].shown
        with super()._opened(origin) as stream:
            if self._stdin is None:
                head, stream = peeked(stream, HEAD_BYTES, shown)
                if is_list(head):
                    self._lists.add(origin)
                    stream = as_lines(stream, shown)
            yield stream


def _by_element(batch: Batch) -> Batch:
    """Name the elements of a list in the reasons of unreadable rows, in place of lines."""
    table, place = batch.table, batch.table.column_names.index(UNUSABLE)
    reasons = pc.replace_substring_regex(table.column(place), r"^line ", "element ")
    return replace(batch, table=table.set_column(place, table.schema.field(place), reasons))


def _numbered(block: LineBlock) -> Iterator[tuple[int, bytes]]:
    for number, text in enumerate(block.data.split(b"\n"), block.line):
        if text.strip():
            yield number, text


def _cells(line: bytes, fast: bool) -> dict[str, Any] | str:
    """Return the JSON text of each value of a line's object; return the reason if it holds none."""
    try:
        return members(line, fast)
    except NotJson as error:
        return error.at("").partition("\n")[0]


def _once(cells: dict[str, Any] | str, line: bytes) -> dict[str, Any] | str:
    """Return the cells of a line, or the reason if two have the same name."""
    if isinstance(cells, str) or not repeats_key(line, [cells]):
        return cells
    return _cells(line, False)


def _object(line: bytes) -> dict[str, Any] | str:
    """Parse the object of a line; return the reason if it holds none."""
    try:
        found = parse_syntax(line)
    except NotJson as error:
        return error.at("").partition("\n")[0]
    return found if isinstance(found, dict) else f"expected an object, found {kind_of(found)}"
