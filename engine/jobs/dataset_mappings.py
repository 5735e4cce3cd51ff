"""Data sets of mappings: rows as dicts of texts, arrays, pictures, bytes and file names."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftline.engine.jobs.dataset_run import DatasetQuery, Run, kept_of, known_names
from weftline.engine.jobs.rows import Unusable
from weftline.errors import InputError
from weftline.nodes.ports import PortType

if TYPE_CHECKING:
    import pyarrow as pa

    from weftline.engine.jobs.sources.media import Loader

MEDIA = ("image", "audio", "bytes")
"""Kinds of inputs whose columns are not kept when nobody says: they are large."""

FILES = ("image", "audio")
"""Kinds of inputs for which a text is the path of a file."""


def runs_of_mappings(dataset: Iterable[Any], wanted: DatasetQuery) -> Iterator[Run]:
    """Return runs of rows whose values are what Session.run takes; what all rows have is seen by the first."""
    # What makes its rows as they are read may use their memory again for the next one.
    rows = iter(dataset) if isinstance(dataset, list | tuple) else map(_as_it_is, dataset)
    first = next(rows, None)
    if first is None:
        return iter(())
    _check_mapping(first, 0)
    columns = {name: wanted.maps.get(name, name) for name in wanted.inputs}
    for name in wanted.needed:
        column = columns[name]
        if column not in first:
            raise InputError(
                f"row 0: input {name} is needed, and there is no {column!r:.80}; {known_names(column, first)}"
                f"\n    fix: maps={{{name!r}: ...}} says which column it is"
            )
    media = {column for name, column in columns.items() if _is_media(first.get(column), wanted.inputs[name])}
    kept_of(list(first), media, wanted)
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
    """Whether it is a picture, a recording or other bytes, and not the name of a file."""
    while type.item is not None:
        type = type.item
    return type.kind in MEDIA and not isinstance(value, str | Path)


def _mapping_runs(
    rows: Iterator[Any], columns: Mapping[str, str], media: Set[str], wanted: DatasetQuery
) -> Iterator[Run]:
    from weftline.engine.jobs.sources.media import Loader

    place = 0
    with Loader() as loader:
        while part := list(itertools.islice(rows, wanted.rows)):
            for row, one in enumerate(part):
                _check_mapping(one, place + row)
            inputs = {
                name: _values(part, column, wanted.inputs[name], name in wanted.needed, loader)
                for name, column in columns.items()
                if name in wanted.needed or any(column in row for row in part)
            }
            kept = [_chosen(row, media, wanted.keep) for row in part]
            ids = [str(number) for number in range(place, place + len(part))]
            yield Run(ids, inputs, partial(list, kept), partial(_table, kept))
            place += len(part)


def _values(rows: Sequence[Mapping[str, Any]], column: str, type: PortType, needed: bool, loader: Loader) -> list[Any]:
    """Return one input of some rows; files that are named are read, and features with bytes or a path opened."""
    values = [_content(row.get(column), type) for row in rows]
    named = {place: name for place, value in enumerate(values) if (name := _file_of(value, type)) is not None}
    for place, data in zip(named, loader.read_all(list(named.values())), strict=True):
        values[place] = data
    if needed:
        empty = Unusable(f"column {column} is empty")
        values = [empty if value is None else value for value in values]
    return values


def _content(value: Any, type: PortType) -> Any:
    """Return a value, or what is inside the feature of a Hugging Face data set: its bytes, else its path."""
    if type.kind in FILES and isinstance(value, Mapping) and {"bytes", "path"} <= set(value):
        return value["bytes"] if value["bytes"] is not None else value["path"]
    return value


def _file_of(value: Any, type: PortType) -> str | None:
    """Return the path or URL of the file that a value names; None when it names none."""
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
        return pa.table({name: pa.array([_plain(row.get(name)) for row in rows]) for name in names})
    except (pa.ArrowException, TypeError) as error:
        raise InputError(f"columns that are kept fit no table: {error}; choose others with keep=") from None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
