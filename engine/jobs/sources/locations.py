"""Input files: paths, folders, globs and URLs to a sorted list of files, and their fingerprints.

Arguments keep their order; the files of a folder or a glob are sorted by path. A folder is read recursively, without
names that begin with a dot, or with an underscore unless it is a hive folder `_key=value`.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from weftline.engine.jobs.sources.formats import shown_url, without_query
from weftline.engine.jobs.sources.reader import Origin
from weftline.errors import InputError, first_line
from weftline.pipelines.check.problems import listed

GLOB = frozenset("*?[")

CHANGED = (
    "ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "updated", "modified", "created",
)  # fmt: skip
"""Keys of fsspec's file information that change with a file's content, in order of preference."""

WHOLE_BYTES = 64 << 20
"""Table files up to this size are hashed whole."""

END_BYTES = 1 << 20
"""Bytes hashed at both ends of larger files, whose modification time counts too."""

ALL_BYTES = 256 << 20
"""Media files of at most this total size are hashed; larger sets are known by sizes and modification times."""

ENTRIES_MAX = 1_000
"""Most files with a fingerprint entry each; more files share one entry."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An input file.

    base:       folder of the argument that named it.
    size_bytes: None if the file system does not report it.
    about:      change information of a remote file system, by the keys of CHANGED.
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
        """Identity of the file: equal for two names of one file."""
        return os.path.realpath(self.path) if self.local else self.url

    @property
    def url(self) -> str:
        """Local path, or URL, for fsspec.open."""
        return self.path if self.local else str(self.fs.unstrip_protocol(self.path))

    @property
    def base_url(self) -> str:
        """Path or URL of `base`."""
        return self.base if self.local else str(self.fs.unstrip_protocol(self.base))

    def open(self) -> BinaryIO:
        """Open the file for reading; InputError if that fails."""
        try:
            return cast(BinaryIO, Path(self.path).open("rb") if self.local else self.fs.open(self.path, "rb"))
        except Exception as error:  # remote file systems raise any exception of their client
            raise unreadable(self.shown, error) from None


@dataclass(frozen=True, slots=True)
class Listing:
    """Files of one argument.

    kind:   file, folder or glob.
    base:   folder that contains the files.
    hidden: skipped paths, relative to the base.
    """

    shown: str
    kind: str
    fs: Any
    base: str
    files: tuple[SourceFile, ...]
    hidden: tuple[str, ...] = ()


def look(argument: str, storage: Mapping[str, str]) -> Listing:
    """List the files of one argument; InputError if there are none."""
    fs, path = file_system(argument, storage)
    shown = shown_url(argument)
    try:
        return _look(fs, path, shown)
    except Exception as error:  # remote file systems raise any exception of their client
        raise unreadable(shown, error) from None


def _look(fs: Any, path: str, shown: str) -> Listing:
    if fs.isfile(path):
        base = posixpath.dirname(without_query(path))
        return Listing(shown, "file", fs, base, (_source_file(fs, path, shown, base, fs.info(path)),))
    if fs.isdir(path):
        return _below(fs, path.rstrip("/") or "/", shown.rstrip("/"), "folder", fs.find(path, detail=True))
    if not GLOB & set(path):
        raise InputError(f"{shown}: there is no such file or folder")
    return _below(fs, _before_glob(path), _before_glob(shown), "glob", fs.glob(path, detail=True))


def _below(fs: Any, base: str, written: str, kind: str, infos: Mapping[str, Any]) -> Listing:
    files, hidden = [], []
    found = sorted(path for path, info in infos.items() if _is_file(fs, path, info))
    if is_local(fs):
        _check_links(found, base)
    for path in found:
        inside = posixpath.relpath(path, base)
        if any(is_hidden(part) for part in inside.split("/")):
            hidden.append(inside)
        else:
            files.append(_source_file(fs, path, posixpath.join(written, inside), base, infos[path]))
    if not files and not any(name.startswith("_delta_log/") for name in hidden):  # a Delta table without rows
        folders = [path for path, info in sorted(infos.items()) if kind == "glob" and info["type"] == "directory"]
        if folders:
            names = [posixpath.join(written, posixpath.relpath(path, base)) for path in folders]
            raise InputError(
                f"{written or '.'}: the pattern matches only folders ({listed(names)}), expected files\n"
                f"    fix: --data {names[0]} reads a folder or a table; a pattern of its files ends in /* or /*.parquet"
            )
        what = "holds no files" if kind == "folder" else "matches no files"
        raise InputError(f"{written or '.'}: {what}{f' but {len(hidden)} hidden ones' if hidden else ''}")
    return Listing(written, kind, fs, base, tuple(files), tuple(hidden))


def is_hidden(name: str) -> bool:
    """Return True for names that are no data: `_SUCCESS`, `.x.crc`, `_weftline`, but not a hive folder `_key=value`."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _source_file(fs: Any, path: str, shown: str, base: str, info: Mapping[str, Any]) -> SourceFile:
    about = {} if is_local(fs) else {key: info[key] for key in CHANGED if info.get(key)}
    return SourceFile(fs, path, shown_url(shown), base, info.get("size"), about)


def _is_file(fs: Any, path: str, info: Mapping[str, Any]) -> bool:
    """Return True for a file or a link to one; links to folders are not followed."""
    return info["type"] == "file" or (is_local(fs) and bool(info.get("islink")) and Path(path).is_file())


def _check_links(paths: Sequence[str], base: str) -> None:
    """Raise InputError for a local file below `base` that a link leads out of it: a data set is not trusted.

    Links to the blobs of huggingface_hub's cache, beside the folder of a snapshot, are followed.
    """
    top = os.path.realpath(base or ".")
    allowed = [f"{top.rstrip('/')}/"]
    if posixpath.basename(posixpath.dirname(top)) == "snapshots":
        allowed.append(posixpath.join(posixpath.dirname(posixpath.dirname(top)), "blobs/"))
    folders: dict[str, str] = {}
    for path in paths:
        folder, name = posixpath.split(path)
        real = os.path.realpath(path) if Path(path).is_symlink() else posixpath.join(_real(folder, folders), name)
        if not real.startswith(tuple(allowed)):
            raise InputError(
                f"{path}: a link leads out of the folder {base or '.'}\n"
                "    fix: remove the link, or name the file itself where you trust it: --data FILE"
            )


def _real(folder: str, known: dict[str, str]) -> str:
    """Return a folder with all links followed."""
    if folder not in known:
        known[folder] = os.path.realpath(folder or ".")
    return known[folder]


def _before_glob(path: str) -> str:
    """Return the folder before the first pattern in a path."""
    parts = path.split("/")
    first = next((place for place, part in enumerate(parts) if GLOB & set(part)), len(parts) - 1)
    return "/".join(parts[:first]) or ("/" if path.startswith("/") else "")


def origins(files: Sequence[SourceFile]) -> tuple[Origin, ...]:
    """Return one origin for each file, named by its path below the folder common to all files."""
    common = _common({(str(one.fs.protocol), one.base) for one in files})
    names = _unique([
        shown_url(one.url if common is None else posixpath.relpath(without_query(one.path), common)) for one in files
    ])  # fmt: skip
    return tuple(
        Origin(name, one.shown, posixpath.dirname(without_query(one.url)), one.base_url)
        for name, one in zip(names, files, strict=True)
    )


def root_urls(files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return the folders of the arguments that named files, as paths or URLs."""
    return tuple(dict.fromkeys(one.base_url for one in files))


def _unique(names: Sequence[str]) -> list[str]:
    """Number duplicate names: two URLs can differ in their removed queries alone."""
    written, unique = set(names), dict[str, None]()
    for name in names:
        other, number = name, 1
        while other in unique or (number > 1 and other in written):
            number += 1
            other = f"{name} ({number})"
        unique[other] = None
    return list(unique)


def _common(bases: set[tuple[str, str]]) -> str | None:
    if len({protocol for protocol, _ in bases}) > 1:
        return None
    paths = [base or "." for _, base in bases]
    if len({path.startswith("/") for path in paths}) > 1:
        return None
    return posixpath.commonpath(paths)


def file_system(argument: str, storage: Mapping[str, str]) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path on it; InputError if there is none."""
    try:
        if "://" not in argument:
            return fsspec.filesystem("file"), posixpath.abspath(posixpath.expanduser(argument))
        fs, path = fsspec.core.url_to_fs(argument, **storage)
        return fs, str(path)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(shown_url(f"{argument}: {first_line(error):.300}")) from None
    except TypeError as error:
        raise InputError(shown_url(f"{argument}: unknown storage option of this file system ({error})")) from None


def is_local(fs: Any) -> bool:
    """Return True for fsspec's local file system."""
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def unreadable(shown: str, error: Exception) -> InputError:
    """Return the InputError for a file that cannot be read."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, FileNotFoundError):
        return InputError(f"{shown_url(shown)}: there is no such file")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{first_line(error):.300}"
    return InputError(shown_url(f"{shown}: cannot be read: {reason}"))


def of_tables(files: Sequence[SourceFile], origins: Sequence[Origin]) -> dict[str, str]:
    """Return the fingerprint entries of table files: size and SHA-256, sampled for large files."""
    return _entries(files, origins, _table_entry)


def of_media(files: Sequence[SourceFile], origins: Sequence[Origin]) -> dict[str, str]:
    """Return the fingerprint entries of media files: size and SHA-256, or modification time of large sets."""
    sizes = [one.size_bytes for one in files]
    hashed = None not in sizes and sum(size or 0 for size in sizes) <= ALL_BYTES
    return _entries(files, origins, (lambda one: f"{one.size_bytes} bytes {_sha256(one)}") if hashed else _status)


def _entries(
    files: Sequence[SourceFile], origins: Sequence[Origin], entry: Callable[[SourceFile], str]
) -> dict[str, str]:
    entries = ((origin.name, entry(one)) for one, origin in zip(files, origins, strict=True))
    if len(files) <= ENTRIES_MAX:
        return dict(entries)
    digest = hashlib.sha256()
    for name, text in entries:
        digest.update(f"{len(name)} {name} {text}\n".encode("utf-8", "surrogateescape"))
    return {f"{len(files)} files": f"sha256:{digest.hexdigest()}"}


def _table_entry(file: SourceFile) -> str:
    size = file.size_bytes
    if size is None or size <= WHOLE_BYTES:
        return f"{'?' if size is None else size} bytes {_sha256(file)}"
    return f"{_status(file)} ends {_sha256(file, ends_of=size)}"


def _status(file: SourceFile) -> str:
    """Return size and modification time, or their remote equivalent."""
    if file.local:
        return f"{file.size_bytes} bytes mtime_ns {Path(file.path).stat().st_mtime_ns}"
    key = next((key for key in CHANGED if key in file.about), None)
    return f"{file.size_bytes} bytes{'' if key is None else f' {key} {file.about[key]}'}"


def _sha256(file: SourceFile, ends_of: int | None = None) -> str:
    """Return the digest of a file, or of both ends of a file of `ends_of` bytes."""
    digest = hashlib.sha256()
    try:
        with file.open() as stream:
            if ends_of is not None:
                digest.update(stream.read(END_BYTES))
                stream.seek(ends_of - END_BYTES)
            while data := stream.read(_READ_BYTES):
                digest.update(data)
    except Exception as error:  # remote file systems raise any exception of their client
        raise unreadable(file.shown, error) from None
    return f"sha256:{digest.hexdigest()}"
