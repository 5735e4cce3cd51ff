"""Results of `map` as one in-memory Hugging Face data set.

Types of outputs come from the pipeline's ports, as in the results of a job, with pictures and recordings inline; types
of kept columns come from the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weftline.engine.jobs.dataset_run import Run, error_json
from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.columns import Columns, columns_of
from weftline.engine.jobs.output.values import MediaEncoder, settled
from weftline.engine.jobs.rows import BlockResult, RowBlock
from weftline.errors import InputError, MissingPackage
from weftline.nodes.ports import PortType

if TYPE_CHECKING:
    import datasets

NOTHING = pa.table({})
WHY = pa.struct([("step", pa.string()), ("error", pa.string()), ("reason", pa.string())])
"""The type of the column with errors."""


def made_dataset(
    each: Iterator[tuple[Run, BlockResult]], outputs: Mapping[str, PortType], why: str | None = None
) -> datasets.Dataset:
    """Return the data set of all rows.

    why: name of a column that says why rows have no outputs; None: there is none.
    """
    try:
        import datasets
    except ModuleNotFoundError:
        raise MissingPackage("datasets", "batch") from None
    columns = columns_of(outputs, pa.schema([]), media="inline")
    kept: list[pa.Table] = []
    made: list[pa.Table] = []
    reasons: list[dict[str, str] | None] = []
    with MediaEncoder() as encoder:
        for run, answered in each:
            answered, table = _outputs(run, answered, columns, encoder)
            kept.append(run.table())
            made.append(table)
            reasons += [error_json(answered.errors.get(row)) for row in range(len(run.ids))]
    extra = {} if why is None else {why: pa.array(reasons, WHY)}
    outputs_made = pa.concat_tables(made) if made else columns.schema.empty_table().drop_columns(columns.each[0].name)
    return datasets.Dataset(_beside(_together(kept), outputs_made, extra, outputs))


def _outputs(run: Run, answered: BlockResult, columns: Columns, encoder: MediaEncoder) -> tuple[BlockResult, pa.Table]:
    """Return the outputs of a run's rows, nulls where a row failed; a value that cannot be written fails its row."""
    answered, batch = settled(columns, answered, RowBlock(0, 0, run.ids, {}, NOTHING), encoder)
    rows, places = iter(range(len(batch))), range(len(run.ids))
    chosen = pa.array([None if place in answered.errors else next(rows) for place in places], pa.int64())
    table = pa.Table.from_batches([batch]).drop_columns(columns.each[0].name)
    return answered, table.take(chosen) if answered.errors else table


def _together(tables: Sequence[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables, promote_options="permissive") if tables else NOTHING
    except pa.ArrowException as error:
        raise InputError(f"columns that are kept change their type: {error}; choose others with keep=") from None


def _beside(
    kept: pa.Table, outputs: pa.Table, extra: Mapping[str, pa.Array], types: Mapping[str, PortType]
) -> pa.Table:
    """Return one table, named as the results of a job are, with what `datasets` needs to see pictures as pictures."""
    named = columns_of({**types, **dict.fromkeys(extra, PortType("json"))}, kept.schema, media="inline")
    fields: list[Any] = []
    arrays: list[Any] = []
    for one in named.each:
        field = named.schema.field(one.name)
        if one.origin == "kept":
            fields.append(field)
            arrays.append(kept.column(one.of).cast(field.type))
        elif one.name in extra:
            fields.append(pa.field(one.name, WHY))
            arrays.append(extra[one.name])
        elif one.origin == "output":
            fields.append(field)
            arrays.append(outputs.column(one.of))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, named.schema.metadata))
