"""Fingerprint of input files: sizes and sampled contents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from weftline.engine.jobs.sources.finding import CHANGED, SourceFile, unreadable
from weftline.engine.jobs.sources.piece import Origin

WHOLE_BYTES = 64 << 20
"""Files up to this size are read whole."""

END_BYTES = 1 << 20
"""Of larger ones so much is read at both ends, and what the file system says of their last change counts too."""

ALL_BYTES = 256 << 20
"""Most bytes that are read of a folder of pictures, recordings or texts."""

ENTRIES_MAX = 1_000
"""Most files that get an entry each; more are one entry together."""

_READ_BYTES = 1 << 20


def of_tables(files: Sequence[SourceFile], origins: Sequence[Origin]) -> dict[str, str]:
    """Return an entry for each file of rows."""
    return _entries(files, origins, _of_table)


def of_media(files: Sequence[SourceFile], origins: Sequence[Origin]) -> dict[str, str]:
    """Return entries for files that are one value each: with what is in them unless that is much to read."""
    sizes = [one.size_bytes for one in files]
    whole = None not in sizes and sum(size or 0 for size in sizes) <= ALL_BYTES
    return _entries(files, origins, (lambda one: f"{one.size_bytes} bytes {_sha256(one)}") if whole else _outside)


def _entries(
    files: Sequence[SourceFile], origins: Sequence[Origin], tell: Callable[[SourceFile], str]
) -> dict[str, str]:
    told = ((origin.name, tell(one)) for one, origin in zip(files, origins, strict=True))
    if len(files) <= ENTRIES_MAX:
        return dict(told)
    return {f"{len(files)} files": _together(told)}


def _together(told: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for name, text in told:
        digest.update(f"{len(name)} {name} {text}\n".encode("utf-8", "surrogateescape"))
    return f"sha256:{digest.hexdigest()}"


def _of_table(file: SourceFile) -> str:
    size = file.size_bytes
    if size is None or size <= WHOLE_BYTES:
        return f"{'?' if size is None else size} bytes {_sha256(file)}"
    return f"{_outside(file)} ends {_sha256_of_ends(file, size)}"


def _outside(file: SourceFile) -> str:
    """Return what the file system says of a file."""
    if file.local:
        return f"{file.size_bytes} bytes mtime_ns {Path(file.path).stat().st_mtime_ns}"
    key = next((key for key in CHANGED if key in file.about), None)
    return f"{file.size_bytes} bytes{'' if key is None else f' {key} {file.about[key]}'}"


def _sha256(file: SourceFile) -> str:
    digest = hashlib.sha256()
    try:
        with file.open() as stream:
            while data := stream.read(_READ_BYTES):
                digest.update(data)
    except Exception as error:  # as in Found.open
        raise unreadable(file.shown, error) from None
    return f"sha256:{digest.hexdigest()}"


def _sha256_of_ends(file: SourceFile, size_bytes: int) -> str:
    digest = hashlib.sha256()
    try:
        with file.open() as stream:
            digest.update(stream.read(END_BYTES))
            stream.seek(size_bytes - END_BYTES)
            digest.update(stream.read(END_BYTES))
    except OSError as error:
        raise unreadable(file.shown, error) from None
    return f"sha256:{digest.hexdigest()}"
