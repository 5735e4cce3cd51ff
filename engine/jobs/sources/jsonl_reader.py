"""JSONL reader: one JSON object per line, each value as a JSON cell of its row (cells.py).

Columns are the keys of the first LEARN_ROWS lines of the first file; keys that first appear later are ignored, except
those that an input needs. A line that is no JSON object becomes a row of nulls with the reason in UNUSABLE.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import pyarrow as pa

from weftline.engine.jobs.rows import JSON_CELL
from weftline.engine.jobs.sources.cells import TOO_DEEP, cell_field, is_unicode, kind_of, learned_json
from weftline.engine.jobs.sources.reader import HIDDEN_FIELD, with_late
from weftline.engine.jobs.sources.text_reader import BOM, LINE_BYTES_MAX, LineBlock, TextReader, is_utf8
from weftline.errors import InputError

LEARN_ROWS = 10_000
LEARN_BYTES = 4 << 20
"""Limits of schema inference on the first file."""

_values = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class JsonlReader(TextReader):
    """Files of one JSON object per line."""

    def _learn(self) -> pa.Schema:
        shown = self.origins[0].shown
        head = self._first_lines()
        if head[:1] == b"[":
            raise InputError(
                f"{shown}: one JSON list; expected one object on each line\n    fix: jq -c '.[]' FILE > FILE.jsonl"
            )
        found = (_object(line) for line in head.split(b"\n")[:LEARN_ROWS] if line.strip())
        rows = [row for row in found if isinstance(row, dict)]
        if head.strip() and not rows:
            why = _object(head.strip().split(b"\n")[0])
            raise InputError(f"{shown}: none of its first lines is a JSON object; the first: {why}")
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
            if len(head) < size or lines[:1] == b"[":
                return lines
            if b"\n" in lines:
                return lines[: lines.rfind(b"\n")]
            if size >= LINE_BYTES_MAX:
                raise InputError(f"{self.origins[0].shown}:1: more than {LINE_BYTES_MAX} bytes without an end of line")
            size = min(2 * size, LINE_BYTES_MAX)

    def _parsed(self, block: LineBlock, origin: int) -> pa.Table:
        names, all_utf8 = self.schema.names, is_utf8(block.data)
        rows: list[dict[str, Any]] = []
        reasons: list[str | None] = []
        for number, line in _numbered(block):
            found = _cells(line, all_utf8 or is_utf8(line))
            rows.append(found if isinstance(found, dict) else {})
            reasons.append(None if isinstance(found, dict) else f"line {number}: {found}")
        columns = [
            pa.array([None if (cell := row.get(name)) is None else bytes(cell) for row in rows], pa.string())
            for name in names
        ]
        fields = [*(cell_field(name, pa.string(), JSON_CELL) for name in names), HIDDEN_FIELD]
        return pa.table([*columns, pa.array(reasons, pa.string())], schema=pa.schema(fields))


def _numbered(block: LineBlock) -> Iterator[tuple[int, bytes]]:
    for number, text in enumerate(block.data.split(b"\n"), block.line):
        if text.strip():
            yield number, text


def _cells(line: bytes, utf8: bool) -> dict[str, Any] | str:
    """Return the JSON text of each value of a line's object; return the reason if it holds none."""
    if utf8:
        try:
            return _values(line)
        except (msgspec.DecodeError, RecursionError):
            pass  # NaN and halves of surrogate pairs pass below, everything else gets its reason there
    found = _object(line)
    try:
        return {name: json.dumps(one).encode() for name, one in found.items()} if isinstance(found, dict) else found
    except RecursionError:
        return TOO_DEEP


def _object(line: bytes) -> dict[str, Any] | str:
    """Parse the object of a line; return the reason if it holds none."""
    try:
        found = json.loads(line.decode())
    except json.JSONDecodeError as error:
        return f"not valid JSON at character {error.pos + 1}: {error.msg}"
    except UnicodeDecodeError as error:
        return f"text that is not UTF-8 (byte {error.start + 1})"
    except (ValueError, RecursionError):
        return TOO_DEEP
    return found if isinstance(found, dict) else f"expected an object, found {kind_of(found)}"
