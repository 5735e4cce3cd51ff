"""Data types of a job: rows, blocks and answers.

    source --Rows--> blocks --RowBlock--> runner --BlockResult--> parts

A *row* has an id from the data set and a *row number*: its index among the rows that the job selects, from 0. A *block*
is the unit of execution: no batch holds rows of two blocks, so that the same rows always form the same batches. A
*part* is the unit of commit: consecutive whole blocks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from weftline.engine.jobs.progress import Tally
from weftline.errors import KEEPS_FAILING_TO_START, StepUnavailable, WeftlineError, WorkerDied, traceback_of
from weftline.nodes.ports import PortType
from weftline.nodes.urgency import SEEDS

if TYPE_CHECKING:
    import pyarrow as pa


CSV_CELL, JSON_CELL = b"cell", b"value"
"""Marks of columns that hold the values of a text file as they stand there; see sources/cells.py."""

Position = Mapping[str, Any]
"""Read position of a source, as JSON values; opaque outside the source."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive selected rows, as read.

    row_number: of the first row.
    ids:        one per row, unique in the data set and equal in every run.
    table:      the columns of the data set; images and audio may be paths.
    after:      read position after the last row.
    """

    row_number: int
    ids: Sequence[str]
    table: pa.Table
    after: Position

    def __len__(self) -> int:
        return len(self.ids)


class Source(Protocol):
    """A data set with the job's selection applied: filters, order, shard, limit."""

    @property
    def schema(self) -> pa.Schema:
        """Columns, from the data set's schema or its first rows."""

    @property
    def expected(self) -> int | None:
        """Number of selected rows; None while unknown."""

    def fingerprint(self) -> Mapping[str, str]:
        """Return the identity of the data: equal data has equal entries."""

    def read(self, after: Position | None = None, row_number: int = 0) -> Iterator[Rows]:
        """Yield the selected rows in order, from a position of earlier Rows on; `row_number`: of the next row.

        InputError names the file that cannot be read, and the position in it.
        """

    def close(self) -> None:
        """Close the files. Idempotent."""


class Unusable:
    """A value that cannot be used, such as a missing file or a value of the wrong type.

    Not a dataclass: a JSON port would convert it to a value.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unusable) and self.reason == other.reason

    def __hash__(self) -> int:
        return hash(self.reason)

    def __repr__(self) -> str:
        return f"Unusable({self.reason!r})"


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows that run together.

    part:        the part of its results.
    row_number:  of its first row.
    ids:         one per row.
    row_numbers: one per row, if they are not consecutive (retry of error rows).
    inputs:      by mapped pipeline input, one value per row: bytes, str, numbers, arrays, lists, mappings, None if
                 absent, or Unusable.
    table:       the columns that are copied to the output.
    """

    part: int
    row_number: int
    ids: Sequence[str]
    inputs: Mapping[str, Sequence[Any]]
    table: pa.Table
    row_numbers: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def row_number_of(self, row: int) -> int:
        return self.row_number + row if self.row_numbers is None else self.row_numbers[row]


@dataclass(frozen=True, slots=True)
class RowError:
    """Failure of a row.

    step:   the step that failed; '' if the row reached none, or its output does not fit the results.
    error:  name of the error's class.
    reason: one sentence.
    traceback: of the exception in the step's code, '' if unknown; never part of a result.
    """

    step: str
    error: str
    reason: str
    traceback: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Result of a block.

    outputs: by pipeline output, one value per row, as Session.run returns it; None if absent or if the row failed.
    errors:  by row of the block, from 0.
    tally:   statistics of the steps.
    """

    outputs: Mapping[str, Sequence[Any]]
    errors: Mapping[int, RowError] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class JobRunner(Protocol):
    """Executes blocks. Thread-safe.

    ahead:       number of concurrent blocks that keeps it busy.
    block_rows:  rows of a block.
    inputs:      types by pipeline input.
    outputs:     types by computed pipeline output.
    repeatable:  by output: 'exact' if equal rows produce equal bytes in every run, 'rounding' if numbers may differ by
                 rounding.
    """

    @property
    def ahead(self) -> int: ...
    @property
    def block_rows(self) -> int: ...
    @property
    def inputs(self) -> Mapping[str, PortType]: ...
    @property
    def outputs(self) -> Mapping[str, PortType]: ...
    @property
    def repeatable(self) -> Mapping[str, str]: ...

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        """Execute a block. Failed rows are errors of the result; an exception ends the job."""

    def figures(self) -> Mapping[str, float]:
        """Return current totals, such as `tokens`, and `busy:STEP` as a fraction. Does not block."""

    def wait_for_figures(self) -> None:
        """Wait after the last block until `figures` is complete, at most about two seconds."""

    def close(self) -> None:
        """Stop everything it started. Idempotent."""


Stop = Callable[[], bool]
"""Returns True once a stop of the job is requested."""


_STEP = re.compile(r"^step ([A-Za-z_][\w.-]*): ")


def usable(block: RowBlock, row: int, errors: dict[int, RowError]) -> dict[str, Any] | None:
    """Return a row's inputs; None if one is unusable, which is recorded as the row's error."""
    given = {name: values[row] for name, values in block.inputs.items()}
    for name, value in given.items():
        if isinstance(value, Unusable):
            errors[row] = RowError("", "InputError", f"input {name}: {value.reason}")
            return None
    return {name: value for name, value in given.items() if value is not None}


def row_seed(seed: int, row_number: int) -> int:
    """Derive a row's random seed from the job's seed and its row number."""
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (seed, row_number), digest_size=8).digest()) % SEEDS


def is_permanent(error: WeftlineError) -> bool:
    """Return True if a step has no worker left, so that every other row would fail as well."""
    given_up = isinstance(error, WorkerDied) and KEEPS_FAILING_TO_START in str(error)
    return given_up or isinstance(error, StepUnavailable)


def row_error(error: WeftlineError) -> RowError:
    """Convert an exception to a row error, with the step apart from the reason."""
    text = str(error)
    found = _STEP.match(text)
    step = getattr(error, "step", "") or (found[1] if found else "")
    reason = text[found.end() :] if found and found[1] == step else text
    return RowError(step, type(error).__name__, " ".join(reason.split()), traceback_of(error))
