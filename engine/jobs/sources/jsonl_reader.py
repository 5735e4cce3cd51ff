"""JSONL reader: pyarrow with a fallback to Python for blocks pyarrow rejects.

Columns and their types are inferred from the first LEARN_ROWS lines of the first file; keys that first appear later are
ignored. A line that is no JSON object, or has a value of another type, becomes a row of nulls with the reason in
UNUSABLE. A column with values of several types is text; other values in it are written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from weftline.engine.jobs.sources.text_reader import (
    BOM,
    HIDDEN_FIELD,
    LINE_BYTES_MAX,
    LineBlock,
    TextReader,
    all_readable,
    is_utf8,
)
from weftline.errors import InputError

LEARN_ROWS = 10_000
LEARN_BYTES = 4 << 20
"""Limits of schema inference on the first file."""

_NO_FIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
_KINDS: Mapping[type, str] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip


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
        return learned(rows)

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
        table = _parsed_by_pyarrow(block.data, self.schema)
        if table is not None:
            return all_readable(table)
        return _parsed_by_line(block, self.schema)


def learned(rows: list[dict[str, Any]]) -> pa.Schema:
    """Infer the columns of these objects, each with a type that holds all of its values."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.schema([(name, _type([row.get(name) for row in rows])) for name in names])


def _type(values: list[Any]) -> pa.DataType:
    try:
        found = pa.array(values).type
    except _NO_FIT:
        return pa.string()
    return _null_as_text(found)


def _null_as_text(type: pa.DataType) -> pa.DataType:
    """Replace null types, of columns without values, by text."""
    if pa.types.is_null(type):
        return pa.string()
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_null_as_text(field.type)) for field in type])
    if pa.types.is_list(type):
        return pa.list_(_null_as_text(type.value_type))
    return type


def _parsed_by_pyarrow(data: bytes, schema: pa.Schema) -> pa.Table | None:
    """Parse lines of one object each with pyarrow; None if it fails or might split the lines otherwise."""
    data = data.strip()
    lines = data.count(b"\n") + 1
    boundaries = data.count(b"}\n{") + data.count(b"}\r\n{")
    whole = data[:1] == b"{" and data[-1:] == b"}" and boundaries == lines - 1
    if not whole or not is_utf8(data):
        return None
    reading = pj.ReadOptions(use_threads=False, block_size=len(data) + 64)
    parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pj.read_json(pa.BufferReader(data), read_options=reading, parse_options=parsing)
    except pa.ArrowException:
        return None
    return table.cast(schema) if table.num_rows == lines and table.schema.names == schema.names else None


def _parsed_by_line(block: LineBlock, schema: pa.Schema) -> pa.Table:
    rows = [(line, _object(text)) for line, text in _numbered(block)]
    reasons: list[str | None] = [None if isinstance(row, dict) else f"line {line}: {row}" for line, row in rows]
    good = [(place, row) for place, (_, row) in enumerate(rows) if isinstance(row, dict)]
    for field in schema:
        for place, why in _unfit([(place, row.get(field.name)) for place, row in good], field).items():
            reasons[place] = reasons[place] or f"line {rows[place][0]}: column {field.name}: {why}"
    columns = []
    for field in schema:
        values: list[Any] = [None] * len(rows)
        for place, row in good:
            if reasons[place] is None:
                values[place] = _as_text(row.get(field.name), field.type)
        columns.append(pa.array(values, field.type))
    fields = [*schema, HIDDEN_FIELD]
    return pa.table([*columns, pa.array(reasons, pa.string())], schema=pa.schema(fields))


def _numbered(block: LineBlock) -> Iterator[tuple[int, bytes]]:
    for number, text in enumerate(block.data.split(b"\n"), block.line):
        if text.strip():
            yield number, text


def _object(line: bytes) -> dict[str, Any] | str:
    """Parse the object of a line; return the reason if it holds none."""
    try:
        found = json.loads(line.decode())
    except json.JSONDecodeError as error:
        return f"not valid JSON at character {error.pos + 1}: {error.msg}"
    except UnicodeDecodeError as error:
        return f"text that is not UTF-8 (byte {error.start + 1})"
    except (ValueError, RecursionError):
        return "not valid JSON: nested too deeply, or a number of too many digits"
    return found if isinstance(found, dict) else f"expected an object, found {_kind_of(found)}"


def _unfit(values: list[tuple[int, Any]], field: pa.Field) -> dict[int, str]:
    """Return the reasons of values that do not fit a column, by row."""
    if not _why([value for _, value in values], field.type):
        return {}
    return {place: why for place, value in values if (why := _why([value], field.type))}


def _why(values: list[Any], type: pa.DataType) -> str:
    try:
        pa.array([_as_text(value, type) for value in values], type)
        fits = not any(_is_truncated(value, type) for value in values)
    except _NO_FIT:
        fits = False
    found = _kind_of(values[0]) if values else "nothing"
    return "" if fits else f"expected {type}, as in the lines before, found {found}"


def _is_truncated(value: Any, type: pa.DataType) -> bool:
    """Return True if pyarrow would silently truncate a fraction."""
    if pa.types.is_integer(type):
        return isinstance(value, float)
    if pa.types.is_list(type):
        return any(_is_truncated(one, type.value_type) for one in value or ())
    if pa.types.is_struct(type):
        return any(_is_truncated(value.get(field.name), field.type) for field in type) if value else False
    return False


def _as_text(value: Any, type: pa.DataType) -> Any:
    if not pa.types.is_string(type) or value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _kind_of(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "something else")
