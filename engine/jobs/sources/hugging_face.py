"""Hugging Face data sets, from disk (`save_to_disk`) or by name, read as Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from weftline.engine.jobs.sources.piece import Batch, Mark, Origin, RowRange, rows_at_a_time
from weftline.engine.jobs.sources.schemas import check_names, fitted, plain
from weftline.engine.jobs.sources.shown import shown_url
from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean, listed

PIECE_ROWS = 1_000
PROBE_ROWS = 8
"""Rows that are read first, to learn how many bytes a row takes."""


class HuggingFaceReader:
    """Reads one split. For another order a piece is a range of rows; else everything is one piece."""

    def __init__(self, dataset: Any, origin: Origin) -> None:
        self._dataset = dataset.with_format("arrow")
        self._fingerprint = str(dataset._fingerprint)
        self.origins: Sequence[Origin] = (origin,)
        try:
            probe = self._table(0, PROBE_ROWS)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{origin.shown}: cannot be read: {str(error).splitlines()[0]}") from None
        check_names(probe.schema, origin.shown)
        self._batch_rows = rows_at_a_time(probe.num_rows, probe.nbytes)
        self.schema: pa.Schema = plain(probe.schema)

    @property
    def rows(self) -> int | None:
        return len(self._dataset)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        total = len(self._dataset)
        size = min(PIECE_ROWS, self._batch_rows) if fine else max(total, 1)
        return [RowRange(0, 0, row, min(size, total - row)) for row in range(0, total, size)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield batches; a mark is the number of a row in the data set."""
        shown, end = self.origins[0].shown, piece.row + (piece.rows or 0)
        for row in range(piece.row if at is None else at, end, self._batch_rows):
            try:
                table = self._table(row, min(row + self._batch_rows, end))
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"{shown}, row {row}: cannot be read: {str(error).splitlines()[0]}") from None
            yield Batch(row, row, fitted(table, self.schema, shown))

    def fingerprint(self) -> Mapping[str, str]:
        return {self.origins[0].name: f"{len(self._dataset)} rows datasets:{self._fingerprint}"}

    def close(self) -> None:
        """datasets keeps its files mapped as long as the data set lives."""

    def _table(self, start: int, end: int) -> pa.Table:
        return self._dataset[start : min(end, len(self._dataset))]


def from_disk(path: str, shown: str, split: str | None, storage: Mapping[str, str]) -> HuggingFaceReader:
    """Open a folder that `save_to_disk` wrote; InputError when it is none, or has no such split."""
    import datasets

    try:
        found = datasets.load_from_disk(path, storage_options=dict(storage) or None)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(shown_url(f"{shown}: no Hugging Face data set: {_one_line(error)}")) from None
    dataset = _one_split(found, split, shown)
    return HuggingFaceReader(dataset, Origin(str(dataset.split or "rows"), shown, path))


def by_name(name: str, split: str | None) -> HuggingFaceReader:
    """Open `NAME` or `NAME:CONFIG`; InputError when it cannot be had."""
    import datasets

    path, _, config = name.partition(":")
    if not path.strip():
        raise InputError(f"hf:{name}: names no data set; expected hf:NAME or hf:NAME:CONFIG")
    try:
        found = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # whatever a hub, a builder or a file system raises
        raise InputError(
            f"hf:{name}: cannot be had: {type(error).__name__}: {_one_line(error)}\n"
            "    fix: check the name, the split and the network; a folder that save_to_disk wrote needs neither"
        ) from None
    dataset = _one_split(found, None if split else split, f"hf:{name}")
    return HuggingFaceReader(dataset, Origin(str(dataset.split or "rows"), f"hf:{name}"))


def _one_split(found: Any, split: str | None, shown: str) -> Any:
    if not isinstance(found, Mapping):
        if split is not None and str(getattr(found, "split", None)) != split:
            raise InputError(f"{shown}: has the split {found.split} alone; --split {split} is not there")
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split is None:
        raise InputError(f"{shown}: has the splits {listed(found)}\n    fix: add --split, one of them")
    if split not in found:
        hint = did_you_mean(split, found)
        raise InputError(f"{shown}: has no split {split}; {hint or 'it has'} ({listed(found)})")
    return found[split]


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
