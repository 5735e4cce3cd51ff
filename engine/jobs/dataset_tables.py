"""Data sets of tables: paths, Hugging Face data sets and Arrow streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from weftline.engine.jobs.dataset_run import DatasetQuery, Run, Runs, kept_of
from weftline.engine.jobs.sources.source import open_loader, open_source
from weftline.engine.jobs.spec import DataSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from weftline.engine.jobs.sources.inputs import Binding
    from weftline.engine.jobs.sources.media import Loader


def runs_of_path(path: str, wanted: DatasetQuery) -> Runs:
    """Return the runs of a data set that is named as `weftline batch --data` names one."""
    spec = DataSpec((path,))
    source = open_source(spec)
    try:
        each = ((rows.ids, rows.table) for rows in source.read())
        return Runs(runs_of_tables(each, wanted, source.schema, open_loader(source, spec)), source.close)
    except BaseException:
        source.close()
        raise


def as_tables(tables: Iterable[Any]) -> Iterator[pa.Table]:
    """Yield what a Hugging Face data set yields as tables."""
    import pyarrow as pa

    for table in tables:
        yield table if isinstance(table, pa.Table) else pa.table(table)


def streamed(dataset: Any) -> Iterator[pa.Table]:
    """Yield a table, or the batches of whatever has an Arrow stream."""
    import pyarrow as pa

    if isinstance(dataset, pa.Table):
        yield dataset
    else:
        for batch in pa.RecordBatchReader.from_stream(dataset):
            yield pa.Table.from_batches([batch])


def numbered(tables: Iterable[pa.Table]) -> Iterator[tuple[Sequence[str], pa.Table]]:
    """Yield tables with ids for their rows: their numbers in the data set."""
    place = 0
    for table in tables:
        yield [str(row) for row in range(place, place + len(table))], table
        place += len(table)


def runs_of_tables(
    tables: Iterator[tuple[Sequence[str], pa.Table]],
    wanted: DatasetQuery,
    schema: pa.Schema | None = None,
    loader: Loader | None = None,
) -> Iterator[Run]:
    """Return the runs of tables; their columns are bound here and now, by the schema or else by the first of them."""
    from weftline.engine.jobs.sources.inputs import bind

    if schema is None:
        first = next(tables, None)
        if first is None:
            return iter(())
        schema, tables = first[1].schema, itertools.chain([first], tables)
    binding = bind(schema, wanted.inputs, wanted.needed, wanted.maps)
    return _table_runs(tables, binding, kept_of(schema.names, binding.media, wanted), wanted.rows, loader)


def _table_runs(
    tables: Iterator[tuple[Sequence[str], pa.Table]],
    binding: Binding,
    kept: Sequence[str],
    rows: int,
    loader: Loader | None,
) -> Iterator[Run]:
    from weftline.engine.jobs.sources.media import Loader

    with loader or Loader() as files:
        for ids, table in tables:
            for start in range(0, len(table), rows):
                part = table.slice(start, rows)
                own = part.select(kept)
                yield Run(ids[start : start + rows], binding.inputs(part, files), own.to_pylist, partial(_same, own))


def _same(table: pa.Table) -> pa.Table:
    return table
