"""Data types of `map`: a run of rows, its settings, and a data set as runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weftline.engine.jobs.rows import RowError
from weftline.errors import InputError
from weftline.nodes.ports import PortType
from weftline.pipelines.check.problems import did_you_mean, listed

if TYPE_CHECKING:
    import pyarrow as pa


def error_json(error: RowError | None) -> dict[str, str] | None:
    """Return a row's error as it stands under `error`; None for a row without."""
    return None if error is None else {"step": error.step, "error": error.error, "reason": error.reason}


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows.

    ids:    what messages call them.
    inputs: as in rows.RowBlock.
    kept:   makes the columns that are kept, a dict for each row.
    table:  makes the same as an Arrow table.
    """

    ids: Sequence[str]
    inputs: Mapping[str, Sequence[Any]]
    kept: Callable[[], Sequence[Mapping[str, Any]]]
    table: Callable[[], pa.Table]


@dataclass(frozen=True, slots=True)
class DatasetQuery:
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
                raise InputError(f"maps: {name!r:.80} is no input of the pipeline; {known_names(name, self.inputs)}")


@dataclass(frozen=True, slots=True)
class Runs:
    """A data set as runs of rows; `close` lets go of its files."""

    each: Iterator[Run]
    close: Callable[[], None] = lambda: None

    def end(self) -> None:
        """Let go of everything: files, threads, and whatever yields the rows."""
        try:
            if isinstance(self.each, Generator):
                self.each.close()
        finally:
            self.close()


def kept_of(columns: Sequence[str], media: Set[str], wanted: DatasetQuery) -> list[str]:
    """Return the columns that come along; InputError for one that is not there."""
    if wanted.keep is None:
        return [name for name in columns if name not in media]
    for name in wanted.keep:
        if name not in columns:
            raise InputError(f"keep: {name!r:.80} is no column; {known_names(name, columns)}")
    return list(wanted.keep)


def known_names(name: object, known: Iterable[object]) -> str:
    """Return what there is, for a message about a name that is not there."""
    names = [str(one) for one in known]
    return f"{did_you_mean(str(name), names)} there are {listed(names)}".strip()
