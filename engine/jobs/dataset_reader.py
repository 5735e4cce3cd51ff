"""Data sets of `map` as chunks of rows.

Accepts a Hugging Face data set, an Arrow table or any object with an Arrow stream (such as a pandas or polars frame),
an iterable of mappings, or the path of a data set as in `weftline batch --data`. Reading is lazy.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftline.engine.jobs.rows import JSON_CELL, RowError, Unusable
from weftline.engine.jobs.sources.formats import alternatives
from weftline.engine.jobs.sources.source import need, open_loader, open_source
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError, first_line
from weftline.nodes.json_value import NotJson, to_json
from weftline.nodes.ports import PortType
from weftline.pipelines.check.problems import did_you_mean, listed

if TYPE_CHECKING:
    import pyarrow as pa

    from weftline.engine.jobs.sources.inputs import Binding
    from weftline.engine.jobs.sources.media import Loader


def error_json(error: RowError | None) -> dict[str, str] | None:
    """Return a row's error as a dict; None without one."""
    return None if error is None else {"step": error.step, "error": error.error, "reason": error.reason}


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Consecutive rows.

    ids:    row ids for messages.
    inputs: as in rows.RowBlock.
    kept:   creates the copied columns, a dict per row.
    table:  creates the same as an Arrow table.
    """

    ids: Sequence[str]
    inputs: Mapping[str, Sequence[Any]]
    kept: Callable[[], Sequence[Mapping[str, Any]]]
    table: Callable[[], pa.Table]


@dataclass(frozen=True, slots=True)
class DatasetQuery:
    """Settings of reading a data set.

    inputs: types by pipeline input.
    required: inputs that every row must have.
    maps:   columns by pipeline input, where the names differ.
    keep:   columns to copy; None: all but media columns.
    rows:   most rows of a chunk.
    media_roots: folders below which rows may name files, beside the working directory, or the data's own folder.
    separator, table_version: as in DataSpec, for the path of a data set.
    """

    inputs: Mapping[str, PortType]
    required: Set[str]
    maps: Mapping[str, str]
    keep: Sequence[str] | None
    rows: int
    media_roots: Sequence[str] = ()
    separator: str | None = None
    table_version: int | None = None

    def __post_init__(self) -> None:
        for name in self.maps:
            if name not in self.inputs:
                raise InputError(
                    f"maps: {name!r:.80} is not an input of the pipeline; {known_names(name, self.inputs)}"
                )


@dataclass(frozen=True, slots=True)
class ChunkedDataset:
    """A data set as chunks of rows. close: closes its files."""

    each: Iterator[RowChunk]
    close: Callable[[], None] = lambda: None

    def end(self) -> None:
        """Release files, threads and iterators."""
        try:
            if isinstance(self.each, Generator):
                self.each.close()
        finally:
            self.close()


def kept_of(columns: Sequence[str], kept: Sequence[str], wanted: DatasetQuery) -> list[str]:
    """Return the columns to copy, by default `kept`; InputError for an unknown one."""
    if wanted.keep is None:
        return list(kept)
    for name in wanted.keep:
        if name not in columns:
            raise InputError(f"keep: {name!r:.80} is not a column; {known_names(name, columns)}")
    return list(wanted.keep)


def known_names(name: object, known: Iterable[object]) -> str:
    """Describe the known names, for a message about an unknown one."""
    names = [str(one) for one in known]
    return f"{did_you_mean(str(name), names)} there are {listed(names)}".strip()


def runs_of_path(path: str, wanted: DatasetQuery) -> ChunkedDataset:
    """Return the chunks of a data set at a path, as in `weftline batch --data`."""
    spec = DataSpec(
        (path,), maps=wanted.maps, media_roots=tuple(map(str, wanted.media_roots)), separator=wanted.separator,
        table_version=wanted.table_version,
    )  # fmt: skip
    optional = [name for name in wanted.inputs if name not in wanted.required and name not in wanted.maps]
    source = open_source(spec, optional=optional)
    try:
        each = ((rows.ids, rows.table) for rows in source.read())
        return ChunkedDataset(runs_of_tables(each, wanted, source.schema, open_loader(source, spec)), source.close)
    except BaseException:
        source.close()
        raise


def as_tables(tables: Iterable[Any]) -> Iterator[pa.Table]:
    """Yield the batches of a Hugging Face data set as tables."""
    import pyarrow as pa

    for table in tables:
        yield table if isinstance(table, pa.Table) else pa.table(table)


def streamed(dataset: Any) -> Iterator[pa.Table]:
    """Yield a table, or the batches of an Arrow stream; categories as their values."""
    import pyarrow as pa

    from weftline.engine.jobs.sources.reader import check_names

    if isinstance(dataset, pa.Table):
        check_names(dataset.schema, "data set")
        yield _without_categories(dataset)
        return
    with _as_arrow(dataset):
        for batch in pa.RecordBatchReader.from_stream(dataset):
            check_names(batch.schema, "data set")
            yield _without_categories(pa.Table.from_batches([batch]))


@contextmanager
def _as_arrow(dataset: Any) -> Iterator[None]:
    """Raise InputError for a data frame or stream with values that Arrow has no types for."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"data set: found {type(dataset).__name__}, which is no Arrow table: {first_line(error):.300}\n"
            "    fix: pass the columns that the pipeline needs, with types of Arrow"
        ) from None


def _without_categories(table: pa.Table) -> pa.Table:
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            type = field.type.value_type
            type = pa.string() if pa.types.is_string_view(type) else type  # Arrow has no `take` of it
            chunks = [one.dictionary.cast(type).take(one.indices) for one in table.column(place).chunks]
            table = table.set_column(place, field.with_type(type), pa.chunked_array(chunks, type))
    return table


def object_cells(frame: Any) -> tuple[pa.Table, pa.Schema] | None:
    """Return a pandas frame whose columns of objects are JSON cells, and its schema; None if it has no such columns.

    Arrow has one type for a column, so that objects would get each other's keys.
    """
    columns = frame.columns if type(frame).__module__.partition(".")[0] == "pandas" and frame.ndim == 2 else None
    if columns is None or not columns.is_unique:
        return None
    import pyarrow as pa

    from weftline.engine.jobs.sources.cells import cell_field, learned_json

    found = {name: cells for name in columns if (cells := _json_cells(frame[name])) is not None}
    if not found:
        return None
    with _as_arrow(frame):
        table = pa.RecordBatchReader.from_stream(frame.drop(columns=list(found))).read_all()
    fields = list(table.schema)
    for place, name in enumerate(columns):
        if name in found:
            texts, values = found[name]
            table = table.add_column(place, cell_field(str(name), pa.string(), JSON_CELL), pa.array(texts, pa.string()))
            fields.insert(place, learned_json([{str(name): value} for value in values]).field(0))
    return table, pa.schema(fields)


def _json_cells(column: Any) -> tuple[list[str | None], list[Any]] | None:
    """Return the cells of a pandas column of objects, and its values; None for a column that Arrow has a type for.

    A missing value is None: pandas has NaN there.
    """
    if column.dtype != object:
        return None
    values = [None if missing else value for value, missing in zip(column, column.isna(), strict=True)]
    kinds = {value.__class__ for value in values} - {type(None)}
    if kinds <= {str} or (len(kinds) == 1 and not kinds <= {bool, int, float, list, dict}):
        return None
    try:
        values = [to_json(value) for value in values]
        return [None if value is None else json.dumps(value) for value in values], values
    except (NotJson, TypeError, ValueError, RecursionError):
        return None


def numbered(tables: Iterable[pa.Table]) -> Iterator[tuple[Sequence[str], pa.Table]]:
    """Yield tables with row numbers as ids."""
    place = 0
    for table in tables:
        yield [str(row) for row in range(place, place + len(table))], table
        place += len(table)


def runs_of_tables(
    tables: Iterator[tuple[Sequence[str], pa.Table]],
    wanted: DatasetQuery,
    schema: pa.Schema | None = None,
    loader: Loader | None = None,
) -> Iterator[RowChunk]:
    """Return the chunks of tables; binds the columns at once, by the schema or the first table."""
    from weftline.engine.jobs.sources.inputs import bind

    if schema is None:
        first = next(tables, None)
        if first is None:
            return iter(())
        schema, tables = first[1].schema, itertools.chain([first], tables)
    binding = bind(schema, wanted.inputs, wanted.required, wanted.maps)
    kept = kept_of(schema.names, binding.kept, wanted)
    return _table_runs(tables, binding, kept, wanted.rows, loader or _loader(wanted))


def _table_runs(
    tables: Iterator[tuple[Sequence[str], pa.Table]],
    binding: Binding,
    kept: Sequence[str],
    rows: int,
    loader: Loader,
) -> Iterator[RowChunk]:
    from weftline.engine.jobs.sources.cells import python_rows

    with loader as files:
        for ids, table in tables:
            for start in range(0, len(table), rows):
                part = table.slice(start, rows)
                own = part.select(kept)
                yield RowChunk(
                    ids[start : start + rows],
                    binding.inputs(part, files),
                    partial(python_rows, own, binding.schema),
                    partial(_typed, own, binding.schema),
                )


def _typed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return copied columns as they are in a table."""
    import pyarrow as pa

    from weftline.engine.jobs.sources.cells import kept, kept_field

    wanted = pa.schema([kept_field(schema.field(name), lines=False) for name in table.schema.names])
    found, reasons = kept(table, schema, wanted)
    for why in reasons.values():
        raise InputError(f"copied columns: {why}; select others with keep=")
    return found


def _loader(wanted: DatasetQuery) -> Loader:
    """Return a loader of files that rows name by text: below the working directory, or a folder that is allowed."""
    from weftline.engine.jobs.sources.arrow_readers import hub_caches
    from weftline.engine.jobs.sources.media import Loader

    return Loader(roots=(".", *hub_caches(), *map(str, wanted.media_roots)))


MEDIA = ("image", "audio", "bytes")
"""Input kinds whose columns are not copied by default, as they are large."""

FILES = ("image", "audio")
"""Input kinds for which a string is a file path."""


def runs_of_mappings(dataset: Iterable[Any], wanted: DatasetQuery) -> Iterator[RowChunk]:
    """Return the chunks of mappings with values for Session.run; the first row determines the columns."""
    # A generator may reuse the memory of a row for the next one.
    rows = iter(dataset) if isinstance(dataset, list | tuple) else map(_as_it_is, dataset)
    first = next(rows, None)
    if first is None:
        return iter(())
    _check_mapping(first, 0)
    columns = {name: alternatives(wanted.maps.get(name, name), first) for name in wanted.inputs}
    for name in wanted.required:
        column = ";".join(columns[name])
        if not any(one in first for one in columns[name]):
            raise InputError(
                f"row 0: input {name} is required, and column {column!r:.80} is missing; {known_names(column, first)}"
                f"\n    fix: name its column with maps={{{name!r}: ...}}"
            )
    media = {
        one
        for name, parts in columns.items()
        if any(_is_media(first.get(column), wanted.inputs[name]) for column in parts)
        for one in parts
    }
    kept_of(list(first), [], wanted)
    return _mapping_runs(itertools.chain([first], rows), columns, media, wanted)


def _as_it_is(row: Any) -> Any:
    """Return a row that its source cannot change any more; what cannot be copied is left as it is."""
    if not isinstance(row, Mapping):
        return row
    fixed = {}
    for name, value in row.items():
        try:
            fixed[name] = copy.deepcopy(value)
        except Exception:
            fixed[name] = value
    return fixed


def _check_mapping(row: Any, place: int) -> None:
    if not isinstance(row, Mapping):
        raise InputError(f"row {place}: found {type(row).__name__}; expected a dict of columns")


def _is_media(value: Any, type: PortType) -> bool:
    """Return True for an image, audio or other bytes, and False for a file name."""
    while type.item is not None:
        type = type.item
    return type.kind in MEDIA and not isinstance(value, str | Path)


def _mapping_runs(
    rows: Iterator[Any], columns: Mapping[str, Sequence[str]], media: Set[str], wanted: DatasetQuery
) -> Iterator[RowChunk]:
    place = 0
    with _loader(wanted) as loader:
        while part := list(itertools.islice(rows, wanted.rows)):
            for row, one in enumerate(part):
                _check_mapping(one, place + row)
            inputs = {
                name: _values(part, parts, wanted.inputs[name], name in wanted.required, loader)
                for name, parts in columns.items()
                if name in wanted.required or any(column in row for row in part for column in parts)
            }
            kept = [_chosen(row, media, wanted.keep) for row in part]
            ids = [str(number) for number in range(place, place + len(part))]
            yield RowChunk(ids, inputs, partial(list, kept), partial(_table, kept))
            place += len(part)


def _values(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], type: PortType, required: bool, loader: Loader
) -> list[Any]:
    """Return one input of some rows, from the first column with a value; reads named files and features."""
    values = [_content(next((row[one] for one in columns if row.get(one) is not None), None), type) for row in rows]
    named = {place: name for place, value in enumerate(values) if (name := _file_of(value, type)) is not None}
    for place, data in zip(named, loader.read_all(list(named.values())), strict=True):
        values[place] = data
    if required:
        empty = Unusable(f"column {';'.join(columns)} is null")
        values = [empty if value is None else value for value in values]
    return values


def _content(value: Any, type: PortType) -> Any:
    """Return a value, or the bytes, else the path, of a Hugging Face feature."""
    if type.kind in FILES and isinstance(value, Mapping) and {"bytes", "path"} <= set(value):
        return value["bytes"] if value["bytes"] is not None else value["path"]
    return value


def _file_of(value: Any, type: PortType) -> str | Path | None:
    """Return the path or URL that a value names; None for other values. A Path is the calling program's: trusted."""
    if isinstance(value, Path):
        return value
    return value if isinstance(value, str) and type.kind in FILES else None


def _chosen(row: Mapping[str, Any], media: Set[str], keep: Sequence[str] | None) -> dict[str, Any]:
    if keep is None:
        return {name: value for name, value in row.items() if name not in media}
    return {name: row.get(name) for name in keep}


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return pa.table({name: _array([_plain(row.get(name)) for row in rows]) for name in names})
    except (pa.ArrowException, TypeError, NotJson, UnicodeEncodeError) as error:
        raise InputError(f"copied columns do not fit a table: {error}; select others with keep=") from None


def _array(values: list[Any]) -> pa.Array:
    """Return copied values; objects and mixed values as JSON text, since Arrow's objects get keys of other rows."""
    import pyarrow as pa

    from weftline.engine.jobs.sources.arrow_types import innermost
    from weftline.engine.jobs.sources.cells import NO_FIT
    from weftline.engine.jobs.sources.columns import is_encoded

    try:
        array = pa.array(values)
        inner = innermost(array.type)
        if not pa.types.is_struct(inner) or is_encoded(inner):
            return array
    except UnicodeEncodeError:
        raise
    except NO_FIT:
        pass
    texts = [None if one is None else json.dumps(to_json(one), ensure_ascii=False) for one in values]
    return pa.array(texts, pa.string())


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def runs_of(dataset: Any, wanted: DatasetQuery) -> ChunkedDataset:
    """Return a data set as chunks; InputError for another type or a missing required column."""
    need("pyarrow")
    if isinstance(dataset, str | os.PathLike):
        return runs_of_path(os.fspath(dataset), wanted)
    if wanted.separator is not None or wanted.table_version is not None:
        option = "separator" if wanted.separator is not None else "table_version"
        raise InputError(f"{option}: is for the path of a data set; found {type(dataset).__name__}")
    if callable(getattr(dataset, "with_format", None)) and callable(getattr(dataset, "iter", None)):
        if dataset.features is None:  # a stream without types: each batch would get one from its rows
            return ChunkedDataset(runs_of_mappings(dataset.with_format(None), wanted))
        tables = dataset.with_format("arrow").iter(batch_size=wanted.rows)
        return ChunkedDataset(runs_of_tables(numbered(as_tables(tables)), wanted))
    if (frame := object_cells(dataset)) is not None:
        table, schema = frame
        return ChunkedDataset(runs_of_tables(numbered([table]), wanted, schema))
    if hasattr(dataset, "__arrow_c_stream__"):
        return ChunkedDataset(runs_of_tables(numbered(streamed(dataset)), wanted))
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, itertools.islice(dataset, 8)))
        raise InputError(f"data set: found a mapping of {splits}; pass one of its values, such as dataset['train']")
    if isinstance(dataset, Iterable) and not isinstance(dataset, bytes | bytearray):
        return ChunkedDataset(runs_of_mappings(dataset, wanted))
    raise InputError(
        f"data set: found {type(dataset).__name__}; expected a Hugging Face data set, an Arrow table, a path, or an "
        "iterable of dicts"
    )
