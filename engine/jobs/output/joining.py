"""Concatenation of parts into one file or a Hugging Face data set folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.reading import batches
from weftline.engine.jobs.output.writers import features, write_part

COPY_BYTES = 1 << 20


def join_parts(parts: Iterable[Callable[[], BinaryIO]], format: str, out: BinaryIO, schema: pa.Schema) -> None:
    """Write all parts, in order, onto `out` as one file, one group of rows in memory at a time.

    The file is the one that all rows would have given as a single part. OutputFailed when a part cannot be read.
    """
    if format == "jsonl":
        for opener in parts:
            with opener() as part:
                shutil.copyfileobj(part, out, COPY_BYTES)
    else:
        write_part(format, schema, _all(parts, format, schema), out)


def _all(parts: Iterable[Callable[[], BinaryIO]], format: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for opener in parts:
        with opener() as part:
            yield from batches(part, format, schema)


def hf_files(names: Sequence[str], schema: pa.Schema, fingerprint: str) -> dict[str, bytes]:
    """Return the files that make a data set of a folder with parts, by name: formats.EXTRAS["hf"].

    names:       of the parts' files, in order; at least one.
    fingerprint: `datasets` caches what it makes of the data set under it: another one for other rows.
    """
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": features(schema).to_dict(), "homepage": "", "license": ""}
    return {"dataset_info.json": _document(info), "state.json": _document(state)}


def _document(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
