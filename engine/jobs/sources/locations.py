"""File discovery: paths, folders, globs and URLs to a sorted list of files.

What was named first comes first; the files of a folder or a glob are sorted by path. A folder is read with everything
below it; names that begin with a dot or an underscore are passed over there.

Fingerprint of input files: sizes and sampled contents.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from weftline.engine.jobs.sources.formats import shown_url, without_query
from weftline.engine.jobs.sources.reader import Origin
from weftline.errors import InputError

GLOB = frozenset("*?[")

CHANGED = (
    "ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "updated", "modified", "created",
)  # fmt: skip
"""What file systems call what changes with a file's content."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file.

    base:       the folder that its argument named.
    size_bytes: None where the file system does not tell.
    about:      what a file system elsewhere says of its last change.
    """

    fs: Any
    path: str
    shown: str
    base: str
    size_bytes: int | None
    about: Mapping[str, Any]

    @property
    def local(self) -> bool:
        return is_local(self.fs)

    @property
    def same(self) -> str:
        """What is equal for two names of one file."""
        return os.path.realpath(self.path) if self.local else self.url

    @property
    def url(self) -> str:
        """The file as fsspec opens it: a path, or a URL."""
        return self.path if self.local else str(self.fs.unstrip_protocol(self.path))

    def open(self) -> BinaryIO:
        """Open it for reading; InputError when it cannot be."""
        try:
            return cast(BinaryIO, Path(self.path).open("rb") if self.local else self.fs.open(self.path, "rb"))
        except Exception as error:  # a file system elsewhere raises whatever its client raises
            raise unreadable(self.shown, error) from None


@dataclass(frozen=True, slots=True)
class Listing:
    """What one argument stands for.

    kind:   file, folder or glob.
    base:   the folder that its files lie below.
    hidden: paths below the base that were passed over.
    """

    shown: str
    kind: str
    fs: Any
    base: str
    files: tuple[SourceFile, ...]
    hidden: tuple[str, ...] = ()


def look(argument: str, storage: Mapping[str, str]) -> Listing:
    """Return the files that one argument stands for; InputError when there are none."""
    fs, path = file_system(argument, storage)
    shown = shown_url(argument)
    try:
        return _look(fs, path, shown)
    except Exception as error:  # a file system elsewhere raises whatever its client raises
        raise unreadable(shown, error) from None


def _look(fs: Any, path: str, shown: str) -> Listing:
    if fs.isfile(path):
        base = posixpath.dirname(without_query(path))
        return Listing(shown, "file", fs, base, (_found(fs, path, shown, base, fs.info(path)),))
    if fs.isdir(path):
        return _below(fs, path.rstrip("/") or "/", shown.rstrip("/"), "folder", fs.find(path, detail=True))
    if not GLOB & set(path):
        raise InputError(f"{shown}: there is no such file or folder")
    base, written = _before_glob(path), _before_glob(shown)
    matches = {one: info for one, info in fs.glob(path, detail=True).items() if _is_file(fs, one, info)}
    return _below(fs, base, written, "glob", matches)


def _below(fs: Any, base: str, written: str, kind: str, infos: Mapping[str, Any]) -> Listing:
    files, hidden = [], []
    for path in sorted(path for path, info in infos.items() if _is_file(fs, path, info)):
        inside = posixpath.relpath(path, base)
        if any(part.startswith((".", "_")) for part in inside.split("/")):
            hidden.append(inside)
        else:
            files.append(_found(fs, path, posixpath.join(written, inside), base, infos[path]))
    what = "holds no files" if kind == "folder" else "matches no files"
    if not files:
        raise InputError(f"{written or '.'}: {what}{f' but {len(hidden)} hidden ones' if hidden else ''}")
    return Listing(written, kind, fs, base, tuple(files), tuple(hidden))


def _found(fs: Any, path: str, shown: str, base: str, info: Mapping[str, Any]) -> SourceFile:
    about = {} if is_local(fs) else {key: info[key] for key in CHANGED if info.get(key)}
    return SourceFile(fs, path, shown_url(shown), base, info.get("size"), about)


def _is_file(fs: Any, path: str, info: Mapping[str, Any]) -> bool:
    """Whether an entry is a file, or a link to one; links to folders are not followed."""
    return info["type"] == "file" or (is_local(fs) and bool(info.get("islink")) and Path(path).is_file())


def _before_glob(path: str) -> str:
    """Return the folder before the first part of a path that is a pattern."""
    parts = path.split("/")
    first = next((place for place, part in enumerate(parts) if GLOB & set(part)), len(parts) - 1)
    return "/".join(parts[:first]) or ("/" if path.startswith("/") else "")


def origins(files: Sequence[SourceFile]) -> tuple[Origin, ...]:
    """Return one origin for each file: its name is its path below the folder that all of them lie in."""
    common = _common({(str(one.fs.protocol), one.base) for one in files})
    plain = [without_query(one.path) for one in files]
    names = _told_apart([
        shown_url(one.url if common is None else posixpath.relpath(path, common))
        for one, path in zip(files, plain, strict=True)
    ])  # fmt: skip
    return tuple(
        Origin(name, one.shown, posixpath.dirname(without_query(one.url)))
        for name, one in zip(names, files, strict=True)
    )


def _told_apart(names: Sequence[str]) -> list[str]:
    """Return names of which each comes once: what told them apart may have been a query."""
    written, given = set(names), dict[str, None]()
    for name in names:
        other, number = name, 1
        while other in given or (number > 1 and other in written):
            number += 1
            other = f"{name} ({number})"
        given[other] = None
    return list(given)


def _common(bases: set[tuple[str, str]]) -> str | None:
    if len({protocol for protocol, _ in bases}) > 1:
        return None
    paths = [base or "." for _, base in bases]
    if len({path.startswith("/") for path in paths}) > 1:
        return None
    return posixpath.commonpath(paths)


def file_system(argument: str, storage: Mapping[str, str]) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path on it; InputError when there is none."""
    try:
        if "://" not in argument:
            return fsspec.filesystem("file"), posixpath.abspath(posixpath.expanduser(argument))
        fs, path = fsspec.core.url_to_fs(argument, **storage)
        return fs, str(path)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(shown_url(f"{argument}: {_one_line(error)}")) from None
    except TypeError as error:
        raise InputError(
            shown_url(f"{argument}: a storage option that this file system does not have ({error})")
        ) from None


def is_local(fs: Any) -> bool:
    """Whether paths of a file system are paths of this machine."""
    protocol = fs.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def unreadable(shown: str, error: Exception) -> InputError:
    """Return what to raise when a file cannot be read."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, FileNotFoundError):
        return InputError(f"{shown_url(shown)}: there is no such file")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _one_line(error)
    return InputError(shown_url(f"{shown}: cannot be read: {reason}"))


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


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
