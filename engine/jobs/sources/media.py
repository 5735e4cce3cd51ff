"""Media folder reader: one row for each picture, recording or text file.

Columns are `path` and `name`, and one for each kind of file there is (image, audio, text, bytes) with the path again,
null for files of another kind: whoever binds it to an input reads the file.

WebDataset reader: files with a common stem form one row.

The suffixes are those of the first LEARN_ROWS rows of the first archive; others that come up later are left out. Texts
are text, `cls` and `index` whole numbers, `json` written JSON, everything else bytes; `__key__` is the name in common.

Threaded, ordered loading of files that rows name.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tarfile import TarError
from typing import Any, Self

import fsspec
import pyarrow as pa

from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.formats import compression_of, media_kind, shown_url
from weftline.engine.jobs.sources.locations import SourceFile, of_media, of_tables, origins, unreadable
from weftline.engine.jobs.sources.reader import BATCH_BYTES, MEANS, UNUSABLE, Batch, Mark, Origin, RowRange
from weftline.engine.jobs.sources.text_reader import unpacked
from weftline.errors import InputError

PIECE_ROWS = 1_000

KINDS = ("image", "audio", "text", "bytes")


class MediaReader:
    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._names = [one.name for one in origins(files)]
        self.origins: Sequence[Origin] = (Origin("files", "files"),)
        self._kinds = [media_kind(one.shown) for one in files]
        there = [kind for kind in KINDS if kind in set(self._kinds)]
        lazy = [pa.field(kind, pa.string(), metadata={MEANS: b"path"}) for kind in there]
        self.schema: pa.Schema = pa.schema([pa.field("path", pa.string()), pa.field("name", pa.string()), *lazy])

    @property
    def rows(self) -> int | None:
        return len(self._files)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        total = len(self._files)
        return [RowRange(0, 0, row, min(PIECE_ROWS, total - row)) for row in range(0, total, PIECE_ROWS)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield the one batch of a piece."""
        here = slice(piece.row, piece.row + (piece.rows or 0))
        paths, names, kinds = [one.url for one in self._files[here]], self._names[here], self._kinds[here]
        columns: list[list[str | None]] = [[shown_url(path) for path in paths], list(names)]
        columns += [
            [path if kind == field.name else None for path, kind in zip(paths, kinds, strict=True)]
            for field in list(self.schema)[2:]
        ]
        arrays = [pa.array(column, pa.string()) for column in columns]
        yield Batch(0, piece.row, pa.table(arrays, schema=self.schema), names)

    def fingerprint(self) -> Mapping[str, str]:
        return of_media(self._files, [Origin(name, name) for name in self._names])

    def close(self) -> None:
        """Nothing is open."""


LEARN_ROWS = 100
TAR_ROWS_MAX = 1_000
TEXTS = ("txt", "text", "caption", "transcript", "md")
RESERVED = ("__key__", "__url__", "__bad__")
"""What webdataset itself writes into a row; a file of such a suffix would take its place."""

NUMBERS = ("cls", "cls2", "index", "inx", "id")

Sample = Mapping[str, Any]


class TarReader:
    """A piece is an archive; a mark is the number of a row in it."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.origins: Sequence[Origin] = origins(files)
        with self._samples(0) as samples:
            suffixes = list(dict.fromkeys(name for one in islice(samples, LEARN_ROWS) for name in one))
        self._suffixes = [name for name in suffixes if not name.startswith("__")]
        if not self._suffixes:
            raise InputError(f"{files[0].shown}: holds no rows (files called KEY.SUFFIX)")
        self.schema: pa.Schema = pa.schema([pa.field("__key__", pa.string()), *map(_field, self._suffixes)])

    @property
    def rows(self) -> int | None:
        return None

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return [RowRange(origin) for origin in range(len(self._files))]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        name = self.origins[piece.origin].name
        with self._samples(piece.origin) as samples:
            row, held, size_bytes = 0, list[Sample](), 0
            for sample in samples:
                row += 1
                if row <= (at or 0):
                    continue
                held.append(sample)
                size_bytes += sum(len(value) for value in sample.values() if isinstance(value, bytes))
                if len(held) >= TAR_ROWS_MAX or size_bytes >= BATCH_BYTES:
                    yield self._batch(held, row - len(held), name)
                    held, size_bytes = [], 0
            if held:
                yield self._batch(held, row - len(held), name)

    def fingerprint(self) -> Mapping[str, str]:
        return of_tables(self._files, self.origins)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _batch(self, samples: Sequence[Sample], row: int, name: str) -> Batch:
        reasons: list[str | None] = [None] * len(samples)
        columns: list[list[Any]] = [[one["__key__"] for one in samples]]
        for suffix in self._suffixes:
            values: list[Any] = []
            for place, one in enumerate(samples):
                value, why = _value(suffix, one.get(suffix))
                values.append(value)
                reasons[place] = reasons[place] or why
            columns.append(values)
        fields = [*self.schema, pa.field(UNUSABLE, pa.string())]
        arrays = [pa.array(values, field.type) for values, field in zip([*columns, reasons], fields, strict=True)]
        table = pa.table(arrays, schema=pa.schema(fields))
        return Batch(row, row, table, [f"{name}#{one['__key__']}" for one in samples])

    @contextmanager
    def _samples(self, origin: int) -> Iterator[Iterator[Sample]]:
        from webdataset.tariterators import group_by_keys  # brings torch, where that is installed

        file = self._files[origin]
        try:
            with file.open() as packed, unpacked(packed, compression_of(file.shown)) as stream:
                yield group_by_keys(_members(stream, file.shown))
        except (TarError, OSError, EOFError, pa.ArrowException) as error:
            raise unreadable(file.shown, error) from None


def _members(stream: Any, shown: str) -> Iterator[Sample]:
    """Yield the files of an archive as webdataset has them; InputError for those that it cannot make rows of."""
    from webdataset.tariterators import base_plus_ext, tar_file_iterator

    keys, current, suffixes = set[str](), None, set[str]()
    for member in tar_file_iterator(stream):
        name = member["fname"]
        key, suffix = base_plus_ext(name)
        if key is not None:
            if key != current:
                if key in keys:
                    raise InputError(
                        f"{shown}: {name}: row {key} was there already, with another row's files after it\n"
                        "    fix: give every row its own name, and write its files one after the other"
                    )
                keys.add(key)
                current, suffixes = key, set()
            if suffix.lower() in (*RESERVED, *suffixes):
                why = f"a row cannot have a file called {suffix}" if suffix.lower() in RESERVED else "is there twice"
                raise InputError(f"{shown}: {name}: {why}\n    fix: leave it out, or give it another name")
            suffixes.add(suffix.lower())
        yield {**member, "__url__": shown}


def _field(suffix: str) -> pa.Field:
    if suffix in NUMBERS:
        return pa.field(suffix, pa.int64())
    if suffix == "json":
        return pa.field(suffix, pa.string(), metadata={MEANS: b"json"})
    return pa.field(suffix, pa.string() if suffix in TEXTS else pa.binary())


def _value(suffix: str, data: bytes | None) -> tuple[Any, str | None]:
    """Return a member as its column has it, and why it cannot be used, if it cannot."""
    if data is None or (suffix not in NUMBERS and suffix not in TEXTS and suffix != "json"):
        return data, None
    try:
        text = data.decode()
        return (int(text) if suffix in NUMBERS else text), None
    except UnicodeDecodeError:
        return None, f"{suffix}: text that is not UTF-8"
    except ValueError:
        return None, f"{suffix}: no whole number"


THREADS = 8
BYTES_MAX = 256 << 20
"""Largest file that is read for a value."""


class Loader:
    """Reads files by path or URL. Thread-safe.

    threads:   files that are read at a time.
    bytes_max: a larger file is not read.
    folder:    path or URL that relative paths are relative to; '' is the working directory.
    storage:   options for fsspec, for URLs of the folder's own kind.
    """

    def __init__(
        self,
        threads: int = THREADS,
        bytes_max: int = BYTES_MAX,
        folder: str = "",
        storage: Mapping[str, str] | None = None,
    ) -> None:
        self.bytes_max = bytes_max
        self._folder, self._storage = folder, dict(storage or {})
        self._threads = ThreadPoolExecutor(threads, "load")

    def read_all(self, urls: Sequence[str], folders: Sequence[str | None] | None = None) -> list[bytes | Unusable]:
        """Return what each file holds, in order; Unusable, with the name as it was written, where one cannot be read.

        folders: what each is relative to, where it is not the loader's own.
        """
        return list(self._threads.map(self._read, urls, folders if folders is not None else [None] * len(urls)))

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, written: str, folder: str | None) -> bytes | Unusable:
        if not written:
            return Unusable("an empty file name")
        url = joined(self._folder if folder is None else folder, written)
        try:
            data = self._local(url) if "://" not in url else self._remote(url)
        except Exception as error:  # a file system elsewhere raises whatever its client raises
            return Unusable(_reason(written, error))
        if len(data) > self.bytes_max:
            return Unusable(f"{shown_url(written)} has more than {self.bytes_max} bytes, the most that are read")
        return data

    def _local(self, path: str) -> bytes:
        with os.fdopen(_regular(path), "rb") as stream:
            return stream.read(self.bytes_max + 1)

    def _remote(self, url: str) -> bytes:
        same = url.split("://", 1)[0] == self._folder.split("://", 1)[0]
        fs, path = fsspec.core.url_to_fs(url, **(self._storage if same else {}))
        with fs.open(path, "rb") as stream:
            data: Any = stream.read(self.bytes_max + 1)
        return bytes(data)


def _regular(path: str) -> int:
    """Return a file, opened; OSError for a pipe or a device, which may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is no regular file")


def joined(folder: str, written: str) -> str:
    """Return where a file is that is called `written` in a row of a file in `folder`."""
    if "://" in written or written.startswith("/") or not folder:
        return written
    if written.startswith("~/"):
        return str(Path(written).expanduser())
    return posixpath.join(folder, written)


def _reason(written: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return shown_url(f"there is no file {written}")
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip().split("\n")[0]
    return shown_url(f"cannot read {written}: {said[:200] or type(error).__name__}")
