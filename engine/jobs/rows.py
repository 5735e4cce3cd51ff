"""Data types of a job: rows, blocks and answers.

    source --Rows--> blocks --Block--> answerer --Answered--> parts

A *row* has an id, which the data set gives it, and a *place*: its number among the rows that this job selects, from 0.
A *block* is answered together: batches never reach from one block into another, so that the same rows always form the
same batches. A *part* is what is committed together: a run of whole blocks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from weftline.engine.jobs.progress import Tally
from weftline.errors import WeftlineError, traceback_of
from weftline.nodes.ports import PortType
from weftline.nodes.urgency import SEEDS

if TYPE_CHECKING:
    import pyarrow as pa


Position = Mapping[str, Any]
"""Where a source stands, as JSON values: reading on from it gives the rows that follow. Opaque to everybody else."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive selected rows, as they were read.

    place: of the first of them.
    ids:   one for each row: unique in the data set, the same in every run.
    table: their columns, as they lie in the data set; pictures and recordings may be paths.
    after: where the source stands after the last of them.
    """

    place: int
    ids: Sequence[str]
    table: pa.Table
    after: Position

    def __len__(self) -> int:
        return len(self.ids)


class Source(Protocol):
    """A data set with the job's selection applied: filters, order, share, limit."""

    @property
    def schema(self) -> pa.Schema:
        """The columns; read from the data set's own description, or from its first rows."""

    @property
    def expected(self) -> int | None:
        """How many rows are selected; None while that is unknown without reading everything."""

    def fingerprint(self) -> Mapping[str, str]:
        """Return what identifies the data: one entry for each file or fact; two reads of equal data return equals."""

    def read(self, after: Position | None = None, place: int = 0) -> Iterator[Rows]:
        """Yield the selected rows in order; from a position on, which an earlier Rows had, with the next row's place.

        InputError says which file cannot be read, and where in it.
        """

    def close(self) -> None:
        """Let go of files. Safe to call twice."""


class Unusable:
    """Stands in a block for a value that cannot be had: a file that is missing, a value of the wrong type.

    No dataclass: a JSON port converts those, and would take the reason for the value.
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
    """Rows that are answered together.

    part:   the part its results go to.
    place:  of its first row.
    ids:    one for each row.
    places: one for each row, when they do not follow each other (a job that runs failed rows again).
    inputs: for each pipeline input that is mapped, one value for each row: bytes, str, numbers, arrays, lists,
            mappings, None where a row leaves it out, or Unusable.
    table:  the columns that are kept in the output.
    """

    part: int
    place: int
    ids: Sequence[str]
    inputs: Mapping[str, Sequence[Any]]
    table: pa.Table
    places: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def place_of(self, row: int) -> int:
        return self.place + row if self.places is None else self.places[row]


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no outputs.

    step:   the step that failed on it; '' when it never reached one.
    error:  name of the error's class.
    reason: one sentence.
    traceback: of the exception that the step's code raised, '' where it is not known; never part of a result.
    """

    step: str
    error: str
    reason: str
    traceback: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What became of a block.

    outputs: for each pipeline output one value for each row: what Session.run returns; None where it is absent, and in
             rows with an error.
    errors:  by row of the block, from 0.
    tally:   how the steps fared.
    """

    outputs: Mapping[str, Sequence[Any]]
    errors: Mapping[int, RowError] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class Runner(Protocol):
    """Whoever answers blocks. Thread-safe.

    ahead:       how many blocks it needs at a time to be kept busy.
    block_rows:  how many rows make a good block.
    inputs:      types by pipeline input.
    outputs:     types by pipeline output, of those that are answered.
    repeatable:  by output: 'exact' when the same rows give the same bytes in every run, 'rounding' when numbers may
                 differ by rounding.
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
        """Answer a block. A row that fails is an error in Answered; an exception means that nobody can answer."""

    def figures(self) -> Mapping[str, float]:
        """Return running totals for people: `tokens`, and `busy:STEP` as a fraction of now. Waits for nothing."""

    def settle(self) -> None:
        """Wait, when everything is answered, until `figures` tells of all of it: a second or two at most."""

    def close(self) -> None:
        """End everything it started. Safe to call twice."""


Stop = Callable[[], bool]
"""Says whether the job has been asked to end."""


_STEP = re.compile(r"^step ([A-Za-z_][\w.-]*): ")


def usable(block: RowBlock, row: int, errors: dict[int, RowError]) -> dict[str, Any] | None:
    """Return a row's inputs; None when one of them cannot be had, which is then its error."""
    given = {name: values[row] for name, values in block.inputs.items()}
    for name, value in given.items():
        if isinstance(value, Unusable):
            errors[row] = RowError("", "InputError", f"input {name}: {value.reason}")
            return None
    return {name: value for name, value in given.items() if value is not None}


def row_seed(seed: int, place: int) -> int:
    """Return what chance in a row is drawn from: its own in every run, and unlike its neighbours'."""
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (seed, place), digest_size=8).digest()) % SEEDS


def row_error(error: WeftlineError) -> RowError:
    """Return what a row's error says: the step at fault apart from the reason."""
    text = str(error)
    found = _STEP.match(text)
    step = getattr(error, "step", "") or (found[1] if found else "")
    reason = text[found.end() :] if found and found[1] == step else text
    return RowError(step, type(error).__name__, " ".join(reason.split()), traceback_of(error))
