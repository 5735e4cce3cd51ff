"""Output formats and their selection by name; pure."""

from __future__ import annotations

import posixpath
import re

from weftline.errors import InputError

FORMATS = ("parquet", "jsonl", "arrow", "hf")

BY_SUFFIX = {
    ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".arrow": "arrow",
    ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip
"""Suffixes of a single file."""

SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl", "arrow": ".arrow", "hf": ".arrow"}
"""Suffixes of parts."""

EXTRAS = {"hf": ("dataset_info.json", "state.json")}
"""Files that stand beside the parts of a format when all are there."""

_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,9}")
_HINTS = {
    ".csv": "CSV has no lists and no detections: write x.jsonl or x.parquet, both of which pandas reads",
    ".tsv": "TSV has no lists and no detections: write x.jsonl or x.parquet, both of which pandas reads",
    ".json": "results are one object a line: write x.jsonl",
    ".gz": "results are not compressed from outside: write x.parquet, which is compressed inside",
    ".zst": "results are not compressed from outside: write x.parquet, which is compressed inside",
}


def suffix(format: str) -> str:
    """Return the suffix of a part's file, with its dot."""
    return SUFFIXES[format]


def format_of(out: str, format: str | None = None) -> tuple[str, bool]:
    """Return the format that results are written in, and whether `out` is a single file.

    A name with a known suffix is a single file of that format. A name without one, or with `/` at its end, is a folder:
    of `format`, or of Parquet. InputError for a suffix that is not known, and for one that `format` contradicts.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"output format: found {format!r:.40}, expected one of {', '.join(FORMATS)}")
    path = out.rpartition("://")[2]
    base = posixpath.basename(path)
    ending = posixpath.splitext(base)[1].lower()
    if "://" in out and "/" not in path:
        ending = ""  # a bucket, whose name may have dots
    if not out or out == "-":
        raise InputError(f"--out {out or repr(out)}: results go to a file or a folder that can be resumed")
    if not _SUFFIX.fullmatch(ending):
        return format or "parquet", False
    named = BY_SUFFIX.get(ending)
    if named is None:
        fix = _HINTS.get(ending, f"write {out}/ for a folder, or one of {', '.join(BY_SUFFIX)} for a single file")
        raise InputError(f"--out {out}: {ending} is no format that is written\n    fix: {fix}")
    if format not in (None, named):
        what = "a folder" if format == "hf" else f"{format}, and {ending} is {named}"
        fix = f"write {out.removesuffix(base) + posixpath.splitext(base)[0]}/, or leave the format out"
        raise InputError(f"--out {out}: the format is {format}, which is {what}\n    fix: {fix}")
    return named, True
