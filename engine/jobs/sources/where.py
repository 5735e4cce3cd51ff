"""Row filter of `--where`: conditions evaluated over whole columns.

A comparison with null is null, except `x == null`. A row whose condition is null is dropped. Conditions are checked on
an empty table first, so that a type error is reported before the first row.

Cells (cells.py) have the types of the first rows; a row with another value is unreadable. Cells of CSV are numbers
where they are compared with numbers, and text elsewhere; an empty one is null as a number and in `x == null`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weftline.engine.jobs.rows import CSV_CELL, JSON_CELL
from weftline.engine.jobs.sources.arrow_types import is_list, is_number, is_text
from weftline.engine.jobs.sources.cells import cell_kind, shown_type, typed
from weftline.engine.jobs.sources.reader import UNUSABLE
from weftline.errors import InputError, first_line
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.spec import condition
from weftline.pipelines.spec.condition import Condition, Tree, literal

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
}  # fmt: skip

_REFUSED = (pa.ArrowException, ValueError, TypeError, OverflowError)


class RowFilter:
    """Conjunction of conditions. Unreadable rows pass, to be reported as error rows."""

    def __init__(self, texts: Sequence[str], schema: pa.Schema) -> None:
        problems: list[str] = []
        self._schema = schema
        self._conditions = [one for text in texts if (one := _checked(text, schema, problems)) is not None]
        if problems:
            raise InputError("\n".join(problems))

    def __bool__(self) -> bool:
        return bool(self._conditions)

    @property
    def columns(self) -> set[str]:
        """Columns that the conditions use."""
        return {wire.port for one in self._conditions for wire in one.wires}

    def mask(self, table: pa.Table) -> pa.ChunkedArray | pa.Array:
        """Return the boolean mask of the rows that pass."""
        return self.evaluate(table)[0]

    def evaluate(self, table: pa.Table) -> tuple[pa.ChunkedArray | pa.Array, dict[int, str]]:
        """Return the mask, and by row why a cell could not be compared; these rows pass."""
        columns = ConditionColumns(table, self._schema)
        kept: Any = None
        for one in self._conditions:
            try:
                here = _true(_value(one.tree, one, columns), columns)
            except _REFUSED as error:
                raise InputError(f"--where {one.text}: {first_line(error):.300}") from None
            kept = here if kept is None else pc.and_(kept, here)
        if columns.reasons:
            kept = pc.or_(kept, pa.array([row in columns.reasons for row in range(table.num_rows)]))
        if UNUSABLE in table.schema.names:
            kept = pc.or_(kept, pc.is_valid(table.column(UNUSABLE)))
        return kept, columns.reasons


@dataclass
class ConditionColumns:
    """Columns of a table for a condition.

    schema:  of the reader; its types are those of cells.
    reasons: by row, why a cell that a condition used has another type.
    """

    table: pa.Table
    schema: pa.Schema
    reasons: dict[int, str] = field(default_factory=dict)
    _typed: dict[str, pa.Array] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    def get(self, name: str) -> Any:
        """Return a column as an array, or as CsvCells."""
        kind = cell_kind(self.schema.field(name))
        if kind == CSV_CELL:
            return CsvCells(name, self)
        return self.typed(name) if kind == JSON_CELL else self.table.column(name)

    def typed(self, name: str) -> pa.Array:
        """Return a column of cells with the type of the first rows."""
        if name not in self._typed:
            self._typed[name], reasons = typed(self.table.column(name), self.schema.field(name))
            self.reasons |= {row: why for row, why in reasons.items() if row not in self.reasons}
        return self._typed[name]


@dataclass(frozen=True)
class CsvCells:
    """A column of CSV in a condition: text or numbers, as its other operand requires."""

    name: str
    of: ConditionColumns

    @property
    def text(self) -> pa.ChunkedArray:
        return self.of.table.column(self.name)

    @property
    def holds_numbers(self) -> bool:
        return is_number(self.of.schema.field(self.name).type)

    def beside(self, other: Any) -> pa.ChunkedArray | pa.Array:
        """Return the array to compare with a constant, an array or other cells."""
        if other is None:
            return self.or_null()
        if isinstance(other, CsvCells):
            return self.plain() if other.holds_numbers else self.text
        is_word = is_text(other.type) if _is_array(other) else isinstance(other, str)
        return self.text if is_word else self.plain()

    def plain(self) -> pa.ChunkedArray | pa.Array:
        """Return numbers if the first rows have numbers, else text."""
        return self.of.typed(self.name) if self.holds_numbers else self.text

    def or_null(self) -> pa.ChunkedArray:
        """Return numbers if the first rows have numbers, else the text, null where the cell is empty."""
        if self.holds_numbers:
            return self.plain()
        return pc.if_else(pc.equal(self.text, ""), pa.scalar(None, pa.string()), self.text)


def possible(texts: Sequence[str], table: pa.Table, schema: pa.Schema) -> pa.ChunkedArray | pa.Array:
    """Return a mask of the rows that can pass, given some of their columns and the reader's schema of these.

    Parts of a condition that need other columns are ignored; mistakes are left to RowFilter.
    """
    kept: Any = pa.repeat(pa.scalar(True), table.num_rows)
    for part in (part for text in texts for part in _conjuncts(text)):
        try:
            one = RowFilter([part], schema)
            kept = pc.and_(kept, one.mask(table)) if one.columns else kept
        except InputError:
            continue
    return kept


def _conjuncts(text: str) -> list[str]:
    """Return the parts of a condition that must all hold."""
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [text]
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return [one for part in tree.values for one in _conjuncts(ast.unparse(part))]
    return [text]


def _checked(text: str, schema: pa.Schema, problems: list[str]) -> Condition | None:
    try:
        found = condition.resolve(condition.parse(text), schema.names)
    except ValueError as error:
        problems.append(f"--where {text:.200}: {error}")
        return None
    names = {str(wire.step or wire.port): None for wire in found.wires}
    unknown = [name for name in names if name not in schema.names]
    for name in unknown:
        hint = did_you_mean(name, schema.names)
        problems.append(
            f"--where {text:.200}: there is no column {name}{f'; {hint}' if hint else ''}\n"
            f"    columns: {listed(schema.names)}"
        )
    if unknown:
        return None
    empty = ConditionColumns(_empty(schema), schema)
    try:
        _true(_value(found.tree, found, empty), empty)
    except _REFUSED as error:
        types = ", ".join(f"{name} is {shown_type(schema.field(name))}" for name in names)
        types += "; the first rows have no value with a type" if "null" in types else ""
        problems.append(f"--where {text:.200}: {first_line(error):.300} ({types})")
        return None
    return found


def _empty(schema: pa.Schema) -> pa.Table:
    """Return a batch of a reader without rows; cells are text."""
    return pa.schema([one.with_type(pa.string()) if cell_kind(one) else one for one in schema]).empty_table()


def _value(tree: Tree, of: Condition, columns: ConditionColumns) -> Any:
    """Evaluate a tree to an array or a constant."""
    match tree:
        case ("wire", index):
            return columns.get(of.wires[index].port)
        case ("value", constant):
            return constant
        case ("key", inner, key):
            return _inside(_value(inner, of, columns), key)
        case ("len", inner):
            return _length(_value(inner, of, columns))
        case ("max" | "min" as name, default, *parts):
            found = [_value(part, of, columns) for part in parts]
            return _extreme(name, found, _value(default, of, columns) if default else None)
        case ("not", inner):
            return pc.invert(_truth(_value(inner, of, columns), columns))
        case ("and" | "or" as word, *parts):
            join = pc.and_kleene if word == "and" else pc.or_kleene
            found = [_truth(_value(part, of, columns), columns) for part in parts]
            whole = found[0]
            for part in found[1:]:
                whole = join(whole, part)
            return whole
        case ("in" | "not-in" as sign, left, right):
            held = _contained(_value(left, of, columns), _value(right, of, columns), columns)
            return pc.invert(held) if sign == "not-in" else held
        case (sign, left, right):
            return _compared(sign, _value(left, of, columns), _value(right, of, columns))
    raise ValueError(f"unknown operator {tree[0]!r} in a condition")


def _compared(sign: str, left: Any, right: Any) -> Any:
    left, right = (
        one.beside(other) if isinstance(one, CsvCells) else one for one, other in ((left, right), (right, left))
    )
    if left is None or right is None:
        if sign not in ("==", "!="):
            raise ValueError("null can only be compared with == and !=")
        one = right if left is None else left
        if not _is_array(one):
            return (one is None) is (sign == "==")
        return pc.is_null(one) if sign == "==" else pc.is_valid(one)
    if not _is_array(left) and not _is_array(right):
        return _COMPARE[sign](pa.scalar(left), pa.scalar(right))
    if not _is_array(left):
        return _COMPARE[sign](_like(left, right.type), right)
    return _COMPARE[sign](left, right if _is_array(right) else _like(right, left.type))


def _like(constant: Any, type: pa.DataType) -> pa.Scalar:
    """Return a constant as a scalar to compare with a column; text becomes a time for temporal columns."""
    if isinstance(constant, list):
        raise ValueError("a list is allowed only on the right of `in`")
    found = pa.scalar(constant)
    if pa.types.is_null(type):
        return found
    is_text = pa.types.is_string(type) or pa.types.is_large_string(type)
    if is_text is not isinstance(constant, str) and not pa.types.is_temporal(type):
        raise ValueError(f"{literal(constant)} cannot be compared with a column of {type}")
    return found.cast(type) if pa.types.is_temporal(type) else found


def _contained(one: Any, many: Any, columns: ConditionColumns) -> Any:
    """Evaluate `in`: a column in a constant list, text in a text column, or a constant in a list column."""
    many = many.text if isinstance(many, CsvCells) else many
    if isinstance(many, list):
        if not _is_array(one) and not isinstance(one, CsvCells):
            return one in many
        values = [value for value in many if value is not None]
        if isinstance(one, CsvCells):
            one = one.beside(next(iter(values), None))
        for value in values:
            _like(value, one.type)
        typed = values and not pa.types.is_null(one.type)
        held = pc.is_in(one, pa.array(values).cast(one.type) if typed else pa.array([], one.type))
        return pc.if_else(pc.is_null(one), pa.scalar(True if None in many else None, pa.bool_()), held)
    if not _is_array(many) or _is_array(one) or isinstance(one, CsvCells):
        raise ValueError(
            "`in` expects a constant list on the right, or a constant on the left and a column on the right"
        )
    if pa.types.is_string(many.type) or pa.types.is_large_string(many.type):
        if not isinstance(one, str):
            raise ValueError(f"{literal(one)} cannot be in text")
        return pc.match_substring(many, one)
    if not is_list(many.type):
        raise ValueError(f"nothing is in a column of {many.type}")
    many = many.combine_chunks() if isinstance(many, pa.ChunkedArray) else many
    equal = pc.fill_null(_compared("==", pc.list_flatten(many), one), False)
    hits = pc.unique(pc.filter(pc.list_parent_indices(many), equal))
    held = pc.is_in(pa.array(range(columns.rows), hits.type), hits)
    return pc.if_else(pc.is_null(many), pa.scalar(None, pa.bool_()), held)


def _inside(found: Any, key: str | int) -> Any:
    found = found.text if isinstance(found, CsvCells) else found
    if _is_array(found) and pa.types.is_struct(found.type) and isinstance(key, str):
        names = [field.name for field in found.type]
        if key not in names:
            hint = did_you_mean(key, names)
            raise ValueError(f"there is no {key} in it{f'; {hint}' if hint else ''} (it has {listed(names)})")
        return pc.struct_field(found, [key])
    if _is_array(found) and pa.types.is_map(found.type):
        return pc.map_lookup(found, pa.scalar(key, found.type.key_type), "first")
    if _is_array(found) and is_list(found.type) and isinstance(key, int):
        rows = (one or () for one in found.to_pylist())
        return pa.array([one[key] if -len(one) <= key < len(one) else None for one in rows], found.type.value_type)
    raise ValueError(f"{literal(key)} is no key of {found.type if _is_array(found) else 'a constant'}")


def _extreme(name: str, parts: Sequence[Any], default: Any) -> Any:
    """Return the extreme of each row's list, or of several values; null where one of them is null.

    default: for empty and absent lists; None: null.
    """
    parts = [one.plain() if isinstance(one, CsvCells) else one for one in parts]
    default = default.plain() if isinstance(default, CsvCells) else default
    if len(parts) > 1:
        pick = pc.max_element_wise if name == "max" else pc.min_element_wise
        return pick(*(one if _is_array(one) else pa.scalar(one) for one in parts), skip_nulls=False)
    (found,) = parts
    if not _is_array(found) or is_number(found.type):
        return found
    if not is_list(found.type):
        raise ValueError(f"a column of {found.type} has no {name}")
    choose = max if name == "max" else min
    lists = ([] if one is None else one for one in found.to_pylist())
    extremes = pa.array([choose(one) if one and None not in one else None for one in lists], found.type.value_type)
    if default is None:
        return extremes
    return pc.if_else(pc.equal(pc.fill_null(pc.list_value_length(found), 0), 0), default, extremes)


def _length(found: Any) -> Any:
    found = found.text if isinstance(found, CsvCells) else found
    if not _is_array(found):
        raise ValueError("len expects a column")
    if is_list(found.type):
        return pc.list_value_length(found)
    if pa.types.is_string(found.type) or pa.types.is_large_string(found.type):
        return pc.utf8_length(found)
    if pa.types.is_binary(found.type) or pa.types.is_large_binary(found.type):
        return pc.binary_length(found)
    raise ValueError(f"a column of {found.type} has no len")


def _truth(found: Any, columns: ConditionColumns) -> Any:
    """Return the truth value of each row by Python's rule; null stays null."""
    found = found.plain() if isinstance(found, CsvCells) else found
    if not _is_array(found):
        value = found.as_py() if isinstance(found, pa.Scalar) else found
        return pa.repeat(pa.scalar(bool(value)), columns.rows)
    type = found.type
    if pa.types.is_boolean(type):
        return found
    if pa.types.is_integer(type) or pa.types.is_floating(type):
        return pc.not_equal(found, pa.scalar(0, type))
    if pa.types.is_null(type):
        return pa.repeat(pa.scalar(None, pa.bool_()), columns.rows)
    return pc.greater(_length(found), 0)


def _true(found: Any, columns: ConditionColumns) -> Any:
    return pc.fill_null(_truth(found, columns), False)


def _is_array(found: Any) -> bool:
    return isinstance(found, pa.Array | pa.ChunkedArray)
