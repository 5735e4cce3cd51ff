"""Dispatch of `map` inputs by kind of data set.

A Hugging Face data set, an Arrow table (or what else has an Arrow stream, such as a pandas or polars frame), any
iterable of mappings, or the path of a data set as `weftline batch --data` has it. Reading goes only as far as it is
asked to.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from weftline.engine.jobs.dataset_mappings import runs_of_mappings
from weftline.engine.jobs.dataset_run import DatasetQuery, Runs
from weftline.engine.jobs.dataset_tables import as_tables, numbered, runs_of_path, runs_of_tables, streamed
from weftline.engine.jobs.sources.source import need
from weftline.errors import InputError


def runs_of(dataset: Any, wanted: DatasetQuery) -> Runs:
    """Return a data set's rows in runs; InputError for what is no data set, or lacks a column that is needed."""
    need("pyarrow")
    if isinstance(dataset, str | os.PathLike):
        return runs_of_path(os.fspath(dataset), wanted)
    if callable(getattr(dataset, "with_format", None)) and callable(getattr(dataset, "iter", None)):
        tables = dataset.with_format("arrow").iter(batch_size=wanted.rows)
        return Runs(runs_of_tables(numbered(as_tables(tables)), wanted))
    if hasattr(dataset, "__arrow_c_stream__"):
        return Runs(runs_of_tables(numbered(streamed(dataset)), wanted))
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, itertools.islice(dataset, 8)))
        raise InputError(f"data set: found a mapping of {splits}; give one of its values, such as dataset['train']")
    if isinstance(dataset, Iterable) and not isinstance(dataset, bytes | bytearray):
        return Runs(runs_of_mappings(dataset, wanted))
    raise InputError(
        f"data set: found {type(dataset).__name__}; expected a Hugging Face data set, an Arrow table, a path, or an "
        "iterable of dicts"
    )
