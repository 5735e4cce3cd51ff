"""Format and compression of a data set by file name, and URLs without secrets; pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import PurePosixPath

from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean, listed

FORMATS = ("parquet", "jsonl", "csv", "arrow", "files", "webdataset", "delta", "hf")

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


EXPANDED_MAX = 100_000
"""Most names that the braces of one argument may stand for."""

_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")


def expanded(argument: str) -> list[str]:
    """Expand braces as webdataset does: `x-{00..09}.tar`, `{a,b}/*.jsonl`, nested; InputError for too many names."""
    if "{" not in argument:
        return [argument]
    from braceexpand import braceexpand

    large = any(abs(int(end) - int(start)) >= EXPANDED_MAX for start, end in _RANGE.findall(argument))
    try:
        names = [] if large else list(islice(braceexpand(argument), EXPANDED_MAX + 1))
    except ValueError as error:  # unbalanced
        raise InputError(f"{shown_url(argument)}: {error}; expected {{00..09}} or {{a,b}}") from None
    if large or len(names) > EXPANDED_MAX:
        raise InputError(f"{shown_url(argument)}: its braces stand for more than {EXPANDED_MAX} names")
    return names


SEPARATORS: Mapping[str, str] = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
"""Names of separators, for shells."""


def separator_of(text: str | None) -> str | None:
    """Return the character of `--separator`; InputError if it is none that can separate values."""
    if text is None:
        return None
    sign = SEPARATORS.get(text, text)
    if len(sign) != 1 or not sign.isascii() or sign.isalnum() or sign in '"\r\n\0':
        raise InputError(
            f"--separator {text!r:.20}: expected one ASCII character other than letters, digits and quotes, such as "
            f"';' or '|', or one of {', '.join(name for name in SEPARATORS if name.isalpha())}"
        )
    return sign


def alternatives(column: str, columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that `jpg;png` stands for: the first that has a value counts, as in webdataset."""
    return (column,) if column in columns or ";" not in column else tuple(column.split(";"))


def alternatives_in(maps: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Return the alternatives of each mapped column that has some."""
    return tuple(found for column in maps.values() if len(found := alternatives(column, ())) > 1)


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
