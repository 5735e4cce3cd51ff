"""Split of a block into spans of rows, and merge of their answers; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weftline.engine.jobs.ray.trials import ROW_DEATHS_MAX, Span
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError
from weftline.engine.jobs.tally import Tally

LOST = RowError("", "WorkerDied", f"the row ended the replica that answered it, alone, {ROW_DEATHS_MAX} times")


def cut(block: RowBlock, span: Span) -> RowBlock:
    """Return the rows of a span as a block; the block itself when that is all of it."""
    start, stop = span
    if (start, stop) == (0, len(block)):
        return block
    return RowBlock(
        block.part,
        block.place_of(start),
        block.ids[start:stop],
        {name: values[start:stop] for name, values in block.inputs.items()},
        block.table.slice(start, stop - start),
        None if block.places is None else block.places[start:stop],
    )


def joined(
    rows: int, outputs: Iterable[str], answers: Mapping[Span, BlockResult], lost: Sequence[int], reason: RowError = LOST
) -> BlockResult:
    """Return the answer to a block of so many rows from those to its spans; rows that were given up get `reason`.

    outputs: names of the outputs, for a block of which nothing was answered.
    """
    columns: dict[str, list[Any]] = {name: [None] * rows for name in outputs}
    errors = dict.fromkeys(lost, reason)
    tally = Tally()
    for (start, stop), answered in answers.items():
        for name, values in answered.outputs.items():
            columns.setdefault(name, [None] * rows)[start:stop] = values
        errors |= {start + row: error for row, error in answered.errors.items()}
        tally.merge(answered.tally)
    return BlockResult(columns, dict(sorted(errors.items())), tally)
