"""JSONL reader: pyarrow with a fallback to Python for blocks pyarrow rejects.

The columns and their types are those of the first LEARN_ROWS lines of the first file. A key that comes up later is left
out. A line that is no JSON object, or has a value that does not fit its column, is a row whose columns are all null and
whose UNUSABLE says why. A column with values of several types is text: what is no text there is written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from weftline.engine.jobs.sources.text_reader import BOM, HIDDEN_FIELD, LINE_BYTES_MAX, LineBlock, TextReader, is_utf8
from weftline.errors import InputError

LEARN_ROWS = 10_000
LEARN_BYTES = 4 << 20
"""How much of the first file the columns are learned from."""

_NO_FIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
_WHAT: Mapping[type, str] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip


class JsonlReader(TextReader):
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
        """Return whole lines of the first file, one at least, without blank ones before them."""
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
        table = _at_once(block.data, self.schema)
        if table is not None:
            return table.append_column(HIDDEN_FIELD, pa.nulls(table.num_rows, pa.string()))
        return _one_by_one(block, self.schema)


def learned(rows: list[dict[str, Any]]) -> pa.Schema:
    """Return the columns that these objects have, each with the type that holds all of its values."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.schema([(name, _type([row.get(name) for row in rows])) for name in names])


def _type(values: list[Any]) -> pa.DataType:
    try:
        found = pa.array(values).type
    except _NO_FIT:
        return pa.string()
    return _without_null(found)


def _without_null(type: pa.DataType) -> pa.DataType:
    """Return a type with text wherever nothing but nulls was seen."""
    if pa.types.is_null(type):
        return pa.string()
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_without_null(field.type)) for field in type])
    if pa.types.is_list(type):
        return pa.list_(_without_null(type.value_type))
    return type


def _at_once(data: bytes, schema: pa.Schema) -> pa.Table | None:
    """Return the rows of lines that are one object each; None when pyarrow cannot, or might see other lines."""
    data = data.strip()
    lines = data.count(b"\n") + 1
    apart = data.count(b"}\n{") + data.count(b"}\r\n{")
    whole = data[:1] == b"{" and data[-1:] == b"}" and apart == lines - 1
    if not whole or not is_utf8(data):
        return None
    reading = pj.ReadOptions(use_threads=False, block_size=len(data) + 64)
    parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pj.read_json(pa.BufferReader(data), read_options=reading, parse_options=parsing)
    except pa.ArrowException:
        return None
    return table.cast(schema) if table.num_rows == lines and table.schema.names == schema.names else None


def _one_by_one(block: LineBlock, schema: pa.Schema) -> pa.Table:
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
    """Return the object that a line holds, or why it holds none."""
    try:
        found = json.loads(line.decode())
    except json.JSONDecodeError as error:
        return f"not valid JSON at character {error.pos + 1}: {error.msg}"
    except UnicodeDecodeError as error:
        return f"text that is not UTF-8 (byte {error.start + 1})"
    except (ValueError, RecursionError):
        return "not valid JSON: nested too deeply, or a number of too many digits"
    return found if isinstance(found, dict) else f"expected an object, found {_what(found)}"


def _unfit(values: list[tuple[int, Any]], field: pa.Field) -> dict[int, str]:
    """Return which of these values do not fit a column, and why."""
    if not _why([value for _, value in values], field.type):
        return {}
    return {place: why for place, value in values if (why := _why([value], field.type))}


def _why(values: list[Any], type: pa.DataType) -> str:
    try:
        pa.array([_as_text(value, type) for value in values], type)
        fits = not any(_would_be_cut(value, type) for value in values)
    except _NO_FIT:
        fits = False
    return "" if fits else f"expected {type}, as in the lines before, found {_what(values[0]) if values else 'nothing'}"


def _would_be_cut(value: Any, type: pa.DataType) -> bool:
    """Whether pyarrow would take the fraction off a number in silence."""
    if pa.types.is_integer(type):
        return isinstance(value, float)
    if pa.types.is_list(type):
        return any(_would_be_cut(one, type.value_type) for one in value or ())
    if pa.types.is_struct(type):
        return any(_would_be_cut(value.get(field.name), field.type) for field in type) if value else False
    return False


def _as_text(value: Any, type: pa.DataType) -> Any:
    if not pa.types.is_string(type) or value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _what(value: Any) -> str:
    return "null" if value is None else _WHAT.get(type(value), "something else")
