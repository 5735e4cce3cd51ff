"""Job settings as values, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PART_ROWS = 10_000
"""Default rows per part in block mode."""

ERRORS_FROM_ROWS = 100
"""The share of errors is checked from this number of rows on."""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Input rows and their selection.

    data:    files, folders, globs and fsspec URLs, `hf:NAME` for a Hugging Face data set, `-` for stdin.
    format:  parquet, jsonl, csv, arrow, files, webdataset, delta or hf; None: by the names.
    maps:    columns by pipeline input, where the names differ.
    id:      the column that has row ids; None: ids are made from file and row.
    where:   conditions on columns, all of which must hold, in the language of `when:`.
    shuffle: seed of an order; None: the data set's own.
    shard:   (i, n): the i-th of n shares, from 1.
    limit:   most rows.
    split:   of a Hugging Face data set.
    storage: options for fsspec, such as keys of an object store.
    media_roots: further folders and URLs below which rows may name files, beside the folders of `data`.
    media_urls:  rows may name public http and https URLs.
    separator: character between values of CSV, or its name, such as tab; None: a comma, and a tab in .tsv.
    table_version: version of a Delta table; None: the newest.
    """

    data: tuple[str, ...]
    format: str | None = None
    maps: Mapping[str, str] = field(default_factory=dict)
    id: str | None = None
    where: tuple[str, ...] = ()
    shuffle: int | None = None
    shard: tuple[int, int] | None = None
    limit: int | None = None
    split: str | None = None
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)
    media_roots: tuple[str, ...] = ()
    media_urls: bool = False
    separator: str | None = None
    table_version: int | None = None


@dataclass(frozen=True, slots=True)
class OutSpec:
    """Destination and format of the results.

    out:       a folder, or one file that is put together at the end; a path or URL.
    format:    parquet, jsonl, arrow or hf; None: by the name, else parquet.
    outputs:   pipeline outputs that are written; None: all.
    keep:      input columns that are written too; None: all but media.
    media:     'files' writes pictures and recordings beside the table, 'inline' into it.
    part_rows: rows per part; None: chosen for the pipeline.
    storage:   as in DataSpec.
    """

    out: str
    format: str | None = None
    outputs: tuple[str, ...] | None = None
    keep: tuple[str, ...] | None = None
    media: str = "files"
    part_rows: int | None = None
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ErrorsMax:
    """Error budget: a number or a share of error rows; more stop the job."""

    rows: int | None = None
    share: float | None = None

    def exceeded(self, errors: int, done: int) -> bool:
        """Return True if `errors` among `done` rows exceed the budget."""
        if self.rows is not None:
            return errors > self.rows
        return self.share is not None and done >= ERRORS_FROM_ROWS and errors > self.share * done


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job.

    pipeline:     the file.
    errors_max:   stop at more error rows than that; no bound by default.
    restart:      delete the results of an earlier run, and start again.
    retry_errors: run the error rows again, then the rows that are left.
    seed:         base of the rows' seeds.
    block_rows:   rows per block; None: chosen for the pipeline.
    """

    pipeline: Path
    data: DataSpec
    out: OutSpec
    errors_max: ErrorsMax = ErrorsMax()
    restart: bool = False
    retry_errors: bool = False
    seed: int = 0
    block_rows: int | None = None
