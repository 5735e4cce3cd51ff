"""What `map` takes: data sets of many kinds, read as runs of rows that become blocks.

A Hugging Face data set, an Arrow table (or what else has an Arrow stream, such as a pandas or polars frame), any
iterable of mappings, or the path of a data set as `weftline batch --data` has it. Reading goes only as far as it is
asked to.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftline.engine.jobs.rows import Unusable
from weftline.errors import InputError, MissingPackage
from weftline.nodes.ports import PortType

if TYPE_CHECKING:
    import pyarrow as pa

MEDIA = ("image", "audio", "bytes")
"""Kinds of inputs whose columns are not kept when nobody says: they are large."""

FILES = ("image", "audio")
"""Kinds of inputs for which a text is the path of a file."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows.

    ids:    what messages call them.
    inputs: as in rows.Block.
    kept:   makes the columns that are kept, a dict for each row.
    table:  makes the same as an Arrow table.
    """

    ids: Sequence[str]
    inputs: Mapping[str, Sequence[Any]]
    kept: Callable[[], Sequence[Mapping[str, Any]]]
    table: Callable[[], pa.Table]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is read from a data set.

    inputs: types by pipeline input.
    needed: inputs that no row may leave out.
    maps:   columns by pipeline input, where the names differ.
    keep:   columns that are kept; None: all but those that media are read from.
    rows:   most rows of a run.
    """

    inputs: Mapping[str, PortType]
    needed: Set[str]
    maps: Mapping[str, str]
    keep: Sequence[str] | None
    rows: int

    def __post_init__(self) -> None:
        for name in self.maps:
            if name not in self.inputs:
                raise InputError(f"maps: {name!r:.80} is no input of the pipeline; {_known(name, self.inputs)}")


@dataclass(frozen=True, slots=True)
class Runs:
    """A data set as runs of rows, and what is to be called when no more of them are read."""

    each: Iterator[Run]
    close: Callable[[], None] = lambda: None


def runs_of(dataset: Any, wanted: Wanted) -> Runs:
    """Return a data set's rows in runs; InputError for what is no data set, or lacks a column that is needed."""
    _needs_pyarrow()
    if isinstance(dataset, str | os.PathLike):
        return _runs_of_path(os.fspath(dataset), wanted)
    if callable(getattr(dataset, "with_format", None)) and callable(getattr(dataset, "iter", None)):
        tables = dataset.with_format("arrow").iter(batch_size=wanted.rows)
        return Runs(_runs_of_tables(_numbered(_as_tables(tables)), wanted))
    if hasattr(dataset, "__arrow_c_stream__"):
        return Runs(_runs_of_tables(_numbered(_streamed(dataset)), wanted))
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, itertools.islice(dataset, 8)))
        raise InputError(f"data set: found a mapping of {splits}; give one of its values, such as dataset['train']")
    if isinstance(dataset, Iterable) and not isinstance(dataset, bytes | bytearray):
        return Runs(_runs_of_mappings(dataset, wanted))
    raise InputError(
        f"data set: found {type(dataset).__name__}; expected a Hugging Face data set, an Arrow table, a path, or an "
        "iterable of dicts"
    )


def _needs_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        raise MissingPackage("pyarrow", "batch") from None


# tables


def _runs_of_path(path: str, wanted: Wanted) -> Runs:
    from weftline.engine.jobs.sources.opening import open_source
    from weftline.engine.jobs.spec import DataSpec

    source = open_source(DataSpec((path,)))
    try:
        each = ((rows.ids, rows.table) for rows in source.read())
        return Runs(_runs_of_tables(each, wanted, source.schema), source.close)
    except BaseException:
        source.close()
        raise


def _as_tables(tables: Iterable[Any]) -> Iterator[pa.Table]:
    import pyarrow as pa

    for table in tables:
        yield table if isinstance(table, pa.Table) else pa.table(table)


def _streamed(dataset: Any) -> Iterator[pa.Table]:
    import pyarrow as pa

    if isinstance(dataset, pa.Table):
        yield dataset
    else:
        for batch in pa.RecordBatchReader.from_stream(dataset):
            yield pa.Table.from_batches([batch])


def _numbered(tables: Iterable[pa.Table]) -> Iterator[tuple[Sequence[str], pa.Table]]:
    """Yield tables with ids for their rows: their numbers in the data set."""
    place = 0
    for table in tables:
        yield [str(row) for row in range(place, place + len(table))], table
        place += len(table)


def _runs_of_tables(
    tables: Iterator[tuple[Sequence[str], pa.Table]], wanted: Wanted, schema: pa.Schema | None = None
) -> Iterator[Run]:
    """Return the runs of tables; their columns are bound here and now, by the schema or else by the first of them."""
    from weftline.engine.jobs.sources.binding import bind

    if schema is None:
        first = next(tables, None)
        if first is None:
            return iter(())
        schema, tables = first[1].schema, itertools.chain([first], tables)
    binding = bind(schema, wanted.inputs, set(wanted.needed), wanted.maps)
    kept = _kept(schema.names, binding.media, wanted)
    return _table_runs(tables, binding, kept, wanted.rows)


def _table_runs(
    tables: Iterator[tuple[Sequence[str], pa.Table]], binding: Any, kept: Sequence[str], rows: int
) -> Iterator[Run]:
    from weftline.engine.jobs.sources.loading import Loader

    with Loader() as loader:
        for ids, table in tables:
            for start in range(0, len(table), rows):
                part = table.slice(start, rows)
                inputs = binding.inputs(part, loader)
                own = part.select(kept)
                yield Run(ids[start : start + rows], inputs, own.to_pylist, lambda own=own: own)


def _kept(columns: Sequence[str], media: Set[str], wanted: Wanted) -> list[str]:
    if wanted.keep is None:
        return [name for name in columns if name not in media]
    for name in wanted.keep:
        if name not in columns:
            raise InputError(f"keep: {name!r:.80} is no column; {_known(name, columns)}")
    return list(wanted.keep)


# mappings


def _runs_of_mappings(dataset: Iterable[Any], wanted: Wanted) -> Iterator[Run]:
    """Return runs of rows whose values are what Session.run takes; a run's columns are those of its rows."""
    rows = iter(dataset)
    first = list(itertools.islice(rows, 1))
    if first:
        _check_first(first[0], wanted)
    return _mapping_runs(itertools.chain(first, rows), wanted)


def _check_first(row: Any, wanted: Wanted) -> None:
    """Raise InputError for what no row will have, seen by the first."""
    _check_mapping(row, 0)
    for name in wanted.needed:
        column = wanted.maps.get(name, name)
        if column not in row:
            raise InputError(
                f"row 0: input {name} is needed, and there is no {column!r:.80}; {_known(column, row)}"
                f"\n    fix: maps={{{name!r}: ...}} says which column it is"
            )
    _kept(list(row), set(), wanted)


def _check_mapping(row: Any, place: int) -> None:
    if not isinstance(row, Mapping):
        raise InputError(f"row {place}: found {type(row).__name__}; expected a dict of columns")


def _mapping_runs(rows: Iterator[Any], wanted: Wanted) -> Iterator[Run]:
    from weftline.engine.jobs.sources.loading import Loader

    columns = {name: wanted.maps.get(name, name) for name in wanted.inputs}
    media = {column for name, column in columns.items() if _innermost(wanted.inputs[name]).kind in MEDIA}
    place = 0
    with Loader() as loader:
        while part := list(itertools.islice(rows, wanted.rows)):
            for row, one in enumerate(part):
                _check_mapping(one, place + row)
            inputs = {
                name: _column(part, column, wanted.inputs[name], name in wanted.needed, loader)
                for name, column in columns.items()
                if name in wanted.needed or any(column in row for row in part)
            }
            kept = [_chosen(row, media, wanted.keep) for row in part]
            ids = [str(number) for number in range(place, place + len(part))]
            yield Run(ids, inputs, lambda kept=kept: kept, lambda kept=kept: _table(kept))
            place += len(part)


def _column(rows: Sequence[Mapping[str, Any]], column: str, type: PortType, needed: bool, loader: Any) -> list[Any]:
    """Return one input of some rows; files that are named are read."""
    values = [row.get(column) for row in rows]
    named = {place: file for place, value in enumerate(values) if (file := _file_of(value, type)) is not None}
    if named:
        for place, data in zip(named, loader.read_all(list(named.values()))):
            values[place] = data
    if needed:
        empty = Unusable(f"column {column} is empty")
        values = [empty if value is None else value for value in values]
    return values


def _file_of(value: Any, type: PortType) -> str | None:
    """Return the file that a value names, which is what stands in for its content; None when it is content itself."""
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, str) and type.kind in FILES else None


def _chosen(row: Mapping[str, Any], media: Set[str], keep: Sequence[str] | None) -> dict[str, Any]:
    if keep is None:
        return {name: value for name, value in row.items() if name not in media}
    return {name: row.get(name) for name in keep}


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, TypeError) as error:
        raise InputError(f"the columns that are kept fit no table: {error}; choose others with keep=") from None


def _innermost(type: PortType) -> PortType:
    while type.item is not None:
        type = type.item
    return type


def _known(name: object, known: Iterable[str]) -> str:
    names = [str(one) for one in known]
    near = difflib.get_close_matches(str(name), names, 1)
    return (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(names) or 'none'}"
