"""Format and compression of a data set by file name, and URLs without secrets; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean, listed

FORMATS = ("parquet", "jsonl", "csv", "arrow", "files", "webdataset", "hf")

SUFFIXES: Mapping[str, str] = {
    ".parquet": "parquet", ".pq": "parquet",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".csv": "csv", ".tsv": "csv",
    ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow", ".arrows": "arrow",
    ".tar": "webdataset", ".tgz": "webdataset",
}  # fmt: skip
"""Format by the suffix of a file."""

COMPRESSED: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""Compression by suffix, for formats that are read sequentially."""

MAY_BE_COMPRESSED = ("jsonl", "csv", "webdataset")

MEDIA: Mapping[str, tuple[str, ...]] = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"),
    "audio": (".wav", ".flac", ".ogg", ".mp3", ".opus", ".m4a", ".aiff", ".aif"),
    "text": (".txt", ".md", ".text"),
}
"""Suffixes of files that hold one value each, by kind."""

_KINDS = {suffix: kind for kind, suffixes in MEDIA.items() for suffix in suffixes}

_URL = re.compile(r"""\b([a-z][a-z0-9+.-]*)://(?:[^\s/?#'"<>@]*@)*([^\s'"<>]*)""", re.IGNORECASE)
_QUERY = re.compile(r"[?#].*?(?=[:,;)]*$)")
_WEB = re.compile(r"https?://", re.IGNORECASE)


def suffixes_of(name: str) -> tuple[str, str]:
    """Return the suffixes of format and compression, '' for none: ('.jsonl', '.gz')."""
    path = PurePosixPath(name.lower())
    outer = path.suffix
    return (PurePosixPath(path.stem).suffix, outer) if outer in COMPRESSED else (outer, "")


def compression_of(name: str) -> str | None:
    """Return the compression of a file by its name: gzip, zstd, bz2, xz or None."""
    return "gzip" if name.lower().endswith(".tgz") else COMPRESSED.get(suffixes_of(name)[1])


def format_of(name: str) -> str | None:
    """Return the format of a file by its name, `files` for an image, audio or text file; None if unknown."""
    inner, outer = suffixes_of(name)
    found = SUFFIXES.get(inner)
    if outer:
        return found if found in MAY_BE_COMPRESSED else None
    return found or ("files" if inner in _KINDS else None)


def media_kind(name: str) -> str:
    """Return the kind of a file of format `files`: image, audio, text, or bytes for any other."""
    return _KINDS.get(PurePosixPath(name.lower()).suffix, "bytes")


def check_format(format: str | None) -> None:
    """Refuse an unknown format."""
    if format is not None and format not in FORMATS:
        hint = did_you_mean(format, FORMATS)
        raise InputError(f"--format {format:.40}: no such format{f'; {hint}' if hint else ''} ({', '.join(FORMATS)})")


def chosen(names: Sequence[str], format: str | None, named: bool, shown: str) -> tuple[str, list[int]]:
    """Return the format of one argument's files, and the indices of the files that belong to the data set.

    named: the user named each file: none may be left out. Otherwise (folder, glob) files of unknown format are skipped.
    shown: the argument as the user wrote it.
    """
    found = [format_of(name) for name in names]
    if format is not None:
        of_format = [place for place, one in enumerate(found) if one == format]
        return format, of_format if of_format and not named and format != "files" else list(range(len(names)))
    if named and None in found:
        raise InputError(
            f"{shown}: the file name has no suffix of a known format\n"
            f"    fix: add --format, one of {', '.join(FORMATS)}"
        )
    tables = sorted({one for one in found if one is not None and one != "files"})
    if len(tables) > 1:
        raise InputError(mixed(shown, tables))
    one = tables[0] if tables else "files"
    of_format = [place for place, each in enumerate(found) if each == one]
    if not of_format:
        raise InputError(
            f"{shown}: none of its {len(names)} files is data ({listed(names)})\n"
            f"    looked for: {', '.join([*SUFFIXES, *_KINDS])}\n    fix: add --format"
        )
    return one, of_format


def mixed(shown: str, formats: Iterable[str]) -> str:
    """Return the error message for a data set of several formats."""
    several = f"{shown}: files of several formats ({', '.join(formats)}); a data set has one"
    return f"{several}\n    fix: name the files to read, or add --format"


def shown_url(text: str) -> str:
    """Remove user, password and, of http and https, the query from all URLs in a text."""
    return _URL.sub(_without_secrets, text)


def without_query(url: str) -> str:
    """Remove the query of an http or https URL; other URLs and paths stay unchanged."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if _WEB.match(url) else url


def _without_secrets(found: re.Match[str]) -> str:
    url = f"{found[1]}://{found[2]}"
    return _QUERY.sub("", url) if _WEB.match(url) else url
