"""A block cut into spans of rows, and their answers put together again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weftline.engine.jobs.cluster.trials import ROW_DEATHS_MAX, Span
from weftline.engine.jobs.rows import Answered, Block, RowError
from weftline.engine.jobs.tally import Tally

LOST = RowError("", "WorkerDied", f"the row ended the replica that answered it, alone, {ROW_DEATHS_MAX} times")


def cut(block: Block, span: Span) -> Block:
    """Return the rows of a span as a block; the block itself when that is all of it."""
    start, stop = span
    if (start, stop) == (0, len(block)):
        return block
    return Block(
        block.part,
        block.place_of(start),
        block.ids[start:stop],
        {name: values[start:stop] for name, values in block.inputs.items()},
        block.table.slice(start, stop - start),
        None if block.places is None else block.places[start:stop],
    )


def joined(
    rows: int, outputs: Iterable[str], answers: Mapping[Span, Answered], lost: Sequence[int], reason: RowError = LOST
) -> Answered:
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
    return Answered(columns, dict(sorted(errors.items())), tally)
