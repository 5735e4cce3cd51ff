"""Cells: values of CSV and JSONL as the file has them, converted only where a type is needed.

A value of a text file belongs to its row alone. So a reader of text files passes on cells, in a text column whose field
has the mark CSV_CELL or JSON_CELL:

    CSV_CELL   the text between two delimiters, or of a hive folder's name after the equals sign
    JSON_CELL  the JSON text of the row's value; null where the row lacks the key

The reader's schema has the same field with the type that the first rows have. This type is used for checks before the
first row, and where all rows need one type: in `--where`, and in results with typed columns. A cell that does not have
that type is reported, and never changed to fit.

    input of a pipeline     the row's own value (`json_values`, `csv_value`, `csv_numbers`)
    --where                 `typed`; CSV cells are numbers only where they are compared with numbers
    results in JSONL        the text itself (`kept`)
    results in other files  `typed`, or the text where Arrow's types would change the value
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weftline.engine.jobs.rows import CSV_CELL, JSON_CELL, Unusable
from weftline.engine.jobs.sources.arrow_types import is_text
from weftline.engine.jobs.sources.reader import MEANS
from weftline.errors import InputError
from weftline.nodes.json_value import SURROGATE, NotJson
from weftline.nodes.strict_json import FILES, kind_of, parse, parse_all, parse_syntax

MIXED = pa.json_()
"""Type of a JSON column whose first values have no common type."""

TOO_LARGE = "a number that no double holds"

NUMBER_NULLS = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA", "NULL",
    "NaN", "n/a", "nan", "null",
)  # fmt: skip
"""Cells of CSV that are null in `--where`, as in pyarrow and pandas, and all but NaN in inputs."""

SOME_NUMBERS = b"weftline.numbers"
"""Metadata key of CSV cells without a common number type, of which a number may be read: the first rows have one, or
only empty cells."""

NO_FIT = (pa.ArrowException, TypeError, ValueError, OverflowError)

_CLASSES: Mapping[Callable[[pa.DataType], bool], type] = {
    pa.types.is_string: str, pa.types.is_int64: int, pa.types.is_float64: float, pa.types.is_boolean: bool,
}  # fmt: skip
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,16}")
_FRACTION = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
_NUMBER = rf"^(?i:{_HEX.pattern}|{_FRACTION.pattern}|true|false)$"
"""Cells that `_number` reads as numbers, but for NaN."""

_TRUTH: Mapping[str, bool] = {
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_NUMBER_TYPES = (pa.int64(), pa.uint64(), pa.float64(), pa.bool_())
_FIRST_ROWS = 256
_SURROGATES = r"\\u[dD][89a-fA-F]"
_LINE_END = r"[\r\n][ \t\r\n]*"
"""Line ends in the text of a cell: they stand between JSON tokens, since a text has them escaped."""

_EXACT = 1 << 53
"""All whole numbers up to this are exact as floats."""


def cell_kind(field: pa.Field) -> bytes:
    """Return CSV_CELL, JSON_CELL, or b"" for a column of typed values."""
    mark = (field.metadata or {}).get(MEANS, b"")
    return mark if mark in (CSV_CELL, JSON_CELL) else b""


def cell_field(name: str, type: pa.DataType, kind: bytes) -> pa.Field:
    """Return a field of a reader's schema, or with type string that of a batch."""
    return pa.field(name, type, metadata={MEANS: kind})


def json_values(cells: Sequence[str | None]) -> list[Any]:
    """Return the values of JSON cells: None for null, Unusable for a value that Python cannot hold."""
    found = parse_all(cells, FILES)
    return [None if one is None else _json_value(one) for one in cells] if found is None else found


def _json_value(cell: str) -> Any:
    try:
        return parse(cell, FILES)
    except NotJson as error:
        return Unusable(error.at("").partition("\n")[0])


def csv_value(cell: str) -> Any:
    """Return the JSON value of a CSV cell: a number, true or false if it is written as in JSON, otherwise text.

    None for an empty cell. A number that JSON writes otherwise (01234, +49, 0x10) stays text.
    """
    if not cell:
        return None
    text = cell.strip()
    if text in _TRUTH:
        return _TRUTH[text]
    if not _JSON_NUMBER.fullmatch(text):
        return cell
    value = _json_value(text)
    return value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else cell


def csv_numbers(cells: pa.ChunkedArray | pa.Array, field: pa.Field) -> list[Any]:
    """Return the numbers in CSV cells, as `_number` does, cast together where that changes none of them."""
    if pa.types.is_string(field.type):
        return [_number(one) for one in cells.to_pylist()]
    array, reasons = _numbers(cells, field.type)
    values: list[Any] = array.to_pylist()
    beyond = [row for row, one in enumerate(values) if one is None or (one.__class__ is float and abs(one) >= _EXACT)]
    for row in sorted({*reasons, *beyond}):
        values[row] = _number(cells[row].as_py())
    return values


def _number(cell: str | None) -> Any:
    """Return the number in a CSV cell: int, float or bool; None for NUMBER_NULLS, Unusable for anything else.

    cell: None in a malformed record. NaN is a number here: it fits floats only.
    """
    text = (cell or "").strip()
    if text.lower() in ("nan", "+nan", "-nan"):
        return math.nan
    if text in NUMBER_NULLS:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    try:
        if _WHOLE.fullmatch(text):
            return int(text)
        if _HEX.fullmatch(text):
            return int(text, 16)
        if _FRACTION.fullmatch(text):
            number = float(text)
            return Unusable(TOO_LARGE) if math.isinf(number) and text[-1].isdigit() else number
    except ValueError:  # too many digits
        pass
    return Unusable(f"expected a number, found {text[:40]!r}")


def csv_field(name: str, cells: pa.ChunkedArray | pa.Array) -> pa.Field:
    """Return the field of a reader's schema for CSV cells, given the first of them."""
    field = cell_field(name, learned_csv(cells), CSV_CELL)
    numbers = _trimmed(cells)
    if pa.types.is_string(field.type) and (numbers.null_count == len(numbers) or _has(numbers, _NUMBER)):
        return field.with_metadata({**field.metadata, SOME_NUMBERS: b""})
    return field


def may_hold_numbers(field: pa.Field) -> bool:
    """Return True for CSV cells of which some may be numbers, though the first rows have no number type."""
    return SOME_NUMBERS in (field.metadata or {})


def learned_csv(cells: pa.ChunkedArray | pa.Array) -> pa.DataType:
    """Return the number type that all of these cells have, or string."""
    numbers = _trimmed(cells)
    if numbers.null_count == len(numbers):
        return pa.string()
    first = numbers.slice(0, _FIRST_ROWS)  # a failing cast takes as long as one that succeeds
    return next((type for type in _NUMBER_TYPES if _casts(first, type) and _casts(numbers, type)), pa.string())


def _casts(cells: pa.Array, type: pa.DataType) -> bool:
    try:
        cells.cast(type)
    except pa.ArrowInvalid:
        return False
    return True


def learned_json(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """Return the columns of these objects, each with the type of its values: null without values, else MIXED."""
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    return pa.schema([cell_field(name, _json_type([row.get(name) for row in rows]), JSON_CELL) for name in names])


def _json_type(values: list[Any]) -> pa.DataType:
    try:
        return pa.array(values).type
    except NO_FIT:
        return MIXED


def is_json_text(field: pa.Field) -> bool:
    """Return True for a typed column of JSON text, as results and archives have."""
    marked = (field.metadata or {}).get(MEANS) == b"json" and is_text(field.type)
    return marked or isinstance(field.type, pa.JsonType)


def is_learned_text(field: pa.Field) -> bool:
    """Return True for JSON cells that are texts in the first rows."""
    return cell_kind(field) == JSON_CELL and bool(pa.types.is_string(field.type))


def shown_type(field: pa.Field) -> str:
    """Return a column's type for messages: string for CSV, and for JSON cells the type of the first rows."""
    if cell_kind(field) == CSV_CELL:
        return "string"
    return "json" if field.type == MIXED else str(field.type)


def view_type(field: pa.Field) -> pa.DataType:
    """Return the type of `typed`: MIXED columns are text, and so are values that no row has."""
    return pa.string() if field.type == MIXED else _null_as_text(field.type)


def _null_as_text(type: pa.DataType) -> pa.DataType:
    if pa.types.is_null(type):
        return pa.string()
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_null_as_text(field.type)) for field in type])
    if pa.types.is_list(type):
        return pa.list_(_null_as_text(type.value_type))
    return type


def typed(cells: pa.ChunkedArray | pa.Array, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    """Return the cells as one array of `view_type`, and by row why a cell has another type; it is null there."""
    if cell_kind(field) == CSV_CELL:
        numbers, reasons = _numbers(cells, field.type)
        return numbers, {row: f"column {field.name}: {why}" for row, why in reasons.items()}
    type = view_type(field)
    values = json_values(cells.to_pylist())
    if field.type == MIXED:
        values = [_as_text(one) for one in values]
    if {value.__class__ for value in values} <= {_class_of(type), NoneType}:  # the usual case, checked together
        try:
            return pa.array(values, type), {}
        except NO_FIT:
            pass
    reasons = {row: why for row, value in enumerate(values) if (why := _misfit(value, type))}
    values = [None if row in reasons else value for row, value in enumerate(values)] if reasons else values
    return pa.array(values, type), {row: f"column {field.name}: {why}" for row, why in reasons.items()}


def _class_of(arrow_type: pa.DataType) -> type | None:
    """Return the class of all values that a type of scalars holds; None for other types."""
    return next((one for is_of, one in _CLASSES.items() if is_of(arrow_type)), None)


def _as_text(value: Any) -> Any:
    return value if value is None or isinstance(value, str | Unusable) else json.dumps(value, ensure_ascii=False)


def _misfit(value: Any, type: pa.DataType) -> str:
    if isinstance(value, Unusable):
        return value.reason
    if _fits(value, type):
        return ""
    if isinstance(value, str) and pa.types.is_string(type):
        return SURROGATE
    return f"expected {type}, as in the lines before, found {kind_of(value)}"


def _fits(value: Any, type: pa.DataType) -> bool:
    """Return True if Arrow holds a value unchanged in this type; of objects, it holds the known keys."""
    if value is None:
        return True
    if pa.types.is_string(type):
        return isinstance(value, str) and (value.isascii() or is_unicode(value))
    if pa.types.is_boolean(type):
        return isinstance(value, bool)
    if pa.types.is_integer(type):
        return value.__class__ is int and -(1 << 63) <= value < 1 << 63
    if pa.types.is_floating(type):
        return value.__class__ is float or (value.__class__ is int and abs(value) <= _EXACT)
    if pa.types.is_list(type):
        return isinstance(value, list) and all(_fits(one, type.value_type) for one in value)
    return isinstance(value, dict) and all(_fits(value.get(field.name), field.type) for field in type)


def is_unicode(text: str) -> bool:
    """Return False for a text with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _trimmed(cells: pa.ChunkedArray | pa.Array) -> pa.Array:
    cells = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
    cells = pc.ascii_trim_whitespace(cells)
    return pc.if_else(pc.is_in(cells, pa.array(NUMBER_NULLS)), pa.scalar(None, cells.type), cells)


def _numbers(cells: pa.ChunkedArray | pa.Array, type: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    trimmed, reasons = _trimmed(cells), dict[int, str]()
    try:
        return trimmed.cast(type), {}
    except pa.ArrowInvalid:
        pass
    found: list[Any] = []
    for row, one in enumerate(trimmed):
        try:
            found.append(one.cast(type).as_py())
        except pa.ArrowInvalid:
            found.append(None)
            reasons[row] = f"expected {type}, as in the lines before, found {one.as_py()[:40]!r}"
    return pa.array(found, type), reasons


def kept_field(field: pa.Field, lines: bool) -> pa.Field:
    """Return the field of a kept column in the results; a column of typed values keeps its own.

    lines: the results are JSON lines, whose values need no common type. In other formats a column of scalars, or of
           lists of scalars, has its type. Any other column is JSON text: Arrow's objects would get keys of other rows.
           A typed column of JSON text, from the results of another job, is one here too.
    """
    if is_json_text(field) and (lines or not isinstance(field.type, pa.JsonType)):
        return cell_field(field.name, pa.string(), JSON_CELL)
    if not cell_kind(field):
        return field
    if cell_kind(field) == CSV_CELL:
        return pa.field(field.name, pa.string())
    inner = type = view_type(field)
    while pa.types.is_list(inner):
        inner = inner.value_type
    if lines or field.type == MIXED or pa.types.is_struct(inner):
        return cell_field(field.name, pa.string(), JSON_CELL)
    return pa.field(field.name, type)


def kept(table: pa.Table, source: pa.Schema, wanted: pa.Schema) -> tuple[pa.Table, dict[int, str]]:
    """Return the columns to copy into the results, and by row why a cell cannot be copied.

    source: the reader's schema. wanted: the columns; those of cells as in `kept_field`.
    """
    arrays: list[Any] = []
    reasons: dict[int, str] = {}
    for field in wanted:
        array, origin = table.column(field.name), source.field(field.name)
        if cell_kind(field) == JSON_CELL:
            array, wrong = _lines(array if cell_kind(origin) else _json_texts(array), field.name)
            reasons = wrong | reasons
        elif cell_kind(origin) == JSON_CELL:
            array, wrong = typed(array, origin)
            reasons = wrong | reasons
        arrays.append(array)
    return pa.table(arrays, schema=wanted) if arrays else table.select([]), reasons


def _lines(cells: pa.ChunkedArray, name: str) -> tuple[Any, dict[int, str]]:
    """Return JSON cells as they stand in the results, null for null; and by row why a cell cannot stand there."""
    cells = pc.if_else(pc.equal(cells, "null"), pa.scalar(None, pa.string()), cells)
    if _has(cells, _LINE_END):
        cells = pc.replace_substring_regex(cells, _LINE_END, "")
    doubtful = pc.fill_null(pc.match_substring_regex(cells, _SURROGATES), False)
    if not pc.any(doubtful).as_py():
        return cells, {}
    texts, reasons = cells.to_pylist(), dict[int, str]()
    for row in np.flatnonzero(doubtful).tolist():
        if isinstance(found := _json_value(texts[row]), Unusable) and SURROGATE in found.reason:
            reasons[row], texts[row] = f"column {name}: {found.reason}", None
    return pa.array(texts, pa.string()), reasons


def _has(cells: pa.ChunkedArray | pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(cells, pattern)).as_py())


def _json_texts(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a typed column of JSON text as JSON cells; a text that is not JSON becomes a JSON string."""
    texts = column.to_pylist()
    return pa.array([one if one is None or _is_json(one) else json.dumps(one) for one in texts], pa.string())


def _is_json(text: str) -> bool:
    try:
        parse_syntax(text.encode())
        return True
    except NotJson:
        return False


def python_rows(table: pa.Table, source: pa.Schema) -> list[dict[str, Any]]:
    """Return the rows as Python values; JSON cells as their own values. InputError for one that Python cannot hold."""
    columns: dict[str, list[Any]] = {}
    for name in table.schema.names:
        columns[name] = table.column(name).to_pylist()
        if cell_kind(source.field(name)) != JSON_CELL:
            continue
        columns[name] = json_values(columns[name])
        if bad := next((one for one in columns[name] if isinstance(one, Unusable)), None):
            raise InputError(f"column {name}: {bad.reason}\n    fix: choose the columns to keep, without it")
    return [dict(zip(columns, row)) for row in zip(*columns.values())] if columns else [{} for _ in range(len(table))]
