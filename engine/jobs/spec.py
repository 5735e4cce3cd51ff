"""Job settings as values: types, defaults, and the options of `weftline batch` that set them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from weftline.engine.flags import Flag, pairs

PART_ROWS = 10_000
"""Default rows per part in block mode."""

ERRORS_FROM_ROWS = 100
"""The share of errors is checked from this number of rows on."""

DataFormat = Literal["parquet", "jsonl", "csv", "arrow", "files", "webdataset", "delta", "hf"]
OutFormat = Literal["parquet", "jsonl", "arrow", "hf"]


def _shard(text: str) -> tuple[int, int]:
    place, _, count = text.partition("/")
    if place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count):
        return int(place), int(count)
    raise ValueError(f"{text:.80}: expected I/N with I from 1 to N, such as 2/8")


def _kept(given: Sequence[str]) -> tuple[str, ...] | None:
    if {"none", "all"} & set(given) and len(given) > 1:
        raise ValueError("none, all: each stands alone")
    return None if given == ["all"] else () if given == ["none"] else tuple(given)


@dataclass(frozen=True, slots=True)
class ErrorsMax:
    """Error budget: a number or a share of error rows; more stop the job."""

    rows: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> ErrorsMax:
        """Return the budget of a number of rows such as 100, or of a share such as 1%; ValueError for other texts."""
        if text.isdecimal():
            return cls(rows=int(text))
        try:
            percent = float(text.removesuffix("%")) if text.endswith("%") else math.nan
        except ValueError:
            percent = math.nan
        if 0 <= percent <= 100:
            return cls(share=percent / 100)
        raise ValueError(f"{text:.80}: expected a number of rows such as 100, or a share such as 1%")

    def exceeded(self, errors: int, done: int) -> bool:
        """Return True if `errors` among `done` rows exceed the budget."""
        if self.rows is not None:
            return errors > self.rows
        return self.share is not None and done >= ERRORS_FROM_ROWS and errors > self.share * done


Storage = Annotated[Mapping[str, str], Flag("--storage", "KEY=VALUE", parse=pairs("KEY=VALUE"))]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Input rows and their selection."""

    data: Annotated[tuple[str, ...], Flag("--data", "INPUT")]
    """Input rows: a file, a folder, a quoted glob, a URL, hf:NAME, or - for standard input; repeatable."""

    format: Annotated[DataFormat | None, Flag("--format")] = None
    """Format of INPUT; by default from its name."""

    maps: Annotated[Mapping[str, str], Flag("--map", "INPUT=COLUMN", parse=pairs("INPUT=COLUMN"))] = field(
        default_factory=dict
    )
    """Column of a pipeline input, where the names differ; repeatable."""

    id: Annotated[str | None, Flag("--id", "COLUMN")] = None
    """Column with the row ids; FILE#ROW by default."""

    where: Annotated[tuple[str, ...], Flag("--where", "COND")] = ()
    """Select rows that match this condition, such as "lang == 'en'"; repeatable, all must hold."""

    shuffle: Annotated[int | None, Meta(ge=0), Flag("--shuffle", "SEED")] = None
    """Shuffle the rows with this seed."""

    shard: Annotated[tuple[int, int] | None, Flag("--shard", "I/N", parse=_shard)] = None
    """Process shard I of N only."""

    limit: Annotated[int | None, Meta(ge=1), Flag("--limit")] = None
    """Maximum number of rows."""

    split: Annotated[str | None, Flag("--split", "NAME")] = None
    """Split of a Hugging Face data set."""

    storage: Storage = field(default_factory=dict, repr=False)
    """fsspec option of the file system behind URLs; repeatable."""

    media_roots: Annotated[tuple[str, ...], Flag("--media-root", "FOLDER")] = ()
    """Folder or URL below which rows may name files, beside the data's own folder; repeatable."""

    media_urls: Annotated[bool, Flag("--media-urls")] = False
    """Rows may name files by http and https URL on public addresses."""

    separator: Annotated[str | None, Flag("--separator", "SIGN")] = None
    """Separator of CSV, such as ';', '|' or tab; by default a comma, and a tab in .tsv."""

    table_version: Annotated[int | None, Meta(ge=0), Flag("--table-version", "N")] = None
    """Version of a Delta table; by default the newest."""


@dataclass(frozen=True, slots=True)
class OutSpec:
    """Destination and format of the results."""

    out: Annotated[str, Flag("--out", "OUTPUT")]
    """Output: a folder, or one file such as out.parquet that is put together at the end; a path or URL."""

    format: Annotated[OutFormat | None, Flag("--out-format")] = None
    """Format of OUTPUT; by default from its name, else parquet."""

    outputs: Annotated[tuple[str, ...] | None, Flag("--output", "NAME", short="-o")] = None
    """Compute this output only, with the steps it needs; repeatable."""

    keep: Annotated[tuple[str, ...] | None, Flag("--keep", "COLUMN", parse=_kept)] = None
    """Copy this input column to the output; repeatable. none: no column; all, the default: all but media."""

    media: Annotated[Literal["files", "inline"], Flag("--media")] = "files"
    """Store images and audio beside the table, or in it."""

    part_rows: Annotated[int | None, Meta(ge=1), Flag("--part-rows")] = None
    """Rows per commit; chosen for the pipeline by default."""

    storage: Storage = field(default_factory=dict, repr=False)
    """As in DataSpec."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job."""

    pipeline: Annotated[Path, Flag("FILE")]
    """The pipeline's YAML file."""

    data: DataSpec
    out: OutSpec

    errors_max: Annotated[ErrorsMax, Flag("--errors-max", "N|P%", parse=ErrorsMax.parse)] = ErrorsMax()
    """Stop above this number or share of error rows, such as 100 or 1%."""

    restart: Annotated[bool, Flag("--restart")] = False
    """Delete the results of an earlier run at OUTPUT, and start again."""

    retry_errors: Annotated[bool, Flag("--retry-errors")] = False
    """Run only the error rows of a finished job again."""

    seed: Annotated[int, Meta(ge=0), Flag("--seed")] = 0
    """Base seed for steps that draw random numbers."""

    block_rows: Annotated[int | None, Meta(ge=1), Flag("--block-rows")] = None
    """Rows per block; chosen for the pipeline by default."""
