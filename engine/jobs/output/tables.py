"""Merge of retried rows into their committed part, in row order.

What comes out is the part that would have been written had they not failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import BinaryIO

import numpy as np

from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.lines import lines
from weftline.engine.jobs.output.reading import batches
from weftline.engine.jobs.output.writers import write_part
from weftline.errors import OutputFailed


def merge_rows(old: pa.Table, old_places: Sequence[int], new: pa.Table, new_places: Sequence[int]) -> pa.Table:
    """Return the rows of both tables in the order of their places; ValueError when places do not fit the rows.

    Both have the same schema, and no place in common.
    """
    order = _order(old_places, len(old), new_places, len(new))
    return pa.concat_tables([old, new]).take(pa.array(order, pa.int64()))


def amend_part(
    old: BinaryIO,
    old_places: Sequence[int],
    new: Iterable[pa.RecordBatch],
    new_places: Sequence[int],
    format: str,
    schema: pa.Schema,
    out: BinaryIO,
) -> None:
    """Write a part's next revision onto `out`: its rows, and those that have been answered since.

    old, old_places: the part as it is, and the place of each row in it.
    new, new_places: the rows that are added, and their places.
    OutputFailed when the part cannot be read, or has another number of rows.
    """
    if format == "jsonl":
        before, after = old.read().splitlines(True), []
        for batch in new:
            for text in lines(schema, batch):
                after += text.splitlines(True)
        _check_length(len(before), old_places)
        both = before + after
        out.writelines(both[place] for place in _order(old_places, len(before), new_places, len(after)))
        return
    kept = pa.Table.from_batches(batches(old, format, schema), schema)
    _check_length(len(kept), old_places)
    merged = merge_rows(kept, old_places, pa.Table.from_batches(new, schema), new_places)
    write_part(format, schema, merged.to_batches(), out)


def _check_length(rows: int, places: Sequence[int]) -> None:
    if rows != len(places):
        raise OutputFailed(f"a part of the results has {rows} rows, expected {len(places)}\n    fix: --restart")


def _order(old_places: Sequence[int], old_rows: int, new_places: Sequence[int], new_rows: int) -> np.ndarray:
    """Return which row of both together comes when."""
    if len(old_places) != old_rows or len(new_places) != new_rows:
        counts = f"{len(old_places)} and {len(new_places)} places for {old_rows} and {new_rows} rows"
        raise ValueError(counts)
    places = np.array([*old_places, *new_places], np.int64)
    if len(np.unique(places)) < len(places):
        raise ValueError("two rows have the same place")
    return np.argsort(places, kind="stable")
