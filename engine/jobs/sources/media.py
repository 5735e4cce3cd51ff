"""Media files: folders of them, WebDataset archives, and the loader of files that rows name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tarfile import TarError
from typing import Any, Self

import pyarrow as pa

from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.cells import cell_kind, json_values, learned_json
from weftline.engine.jobs.sources.formats import compression_of, media_kind, shown_url
from weftline.engine.jobs.sources.locations import SourceFile, of_media, of_tables, origins, root_urls, unreadable
from weftline.engine.jobs.sources.reader import BATCH_BYTES, MEANS, UNUSABLE, Batch, Mark, Origin, RowRange
from weftline.engine.jobs.sources.row_files import Outside, check_url, is_url, joined, read_local, read_url
from weftline.engine.jobs.sources.text_reader import unpacked
from weftline.errors import InputError, first_line

PIECE_ROWS = 1_000
KINDS = ("image", "audio", "text", "bytes")

LEARN_ROWS = 100
TAR_ROWS_MAX = 1_000
TEXTS = ("txt", "text", "caption", "transcript", "md")
NUMBERS = ("cls", "cls2", "index", "inx", "id")
RESERVED = ("__key__", "__url__", "__bad__")
"""Keys that webdataset adds to a row; files with such a suffix would overwrite them."""

THREADS = 8
BYTES_MAX = 256 << 20
"""Largest file that is loaded as a value."""

Sample = Mapping[str, Any]


class MediaReader:
    """Folder of media files: one row for each image, audio or text file.

    Columns are `path`, `name`, and one for each kind present (image, audio, text, bytes) with the path again, null for
    files of another kind. The Loader reads the files bound to an input.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._names = [one.name for one in origins(files)]
        self.origins: Sequence[Origin] = (Origin("files", "files"),)
        self.roots = root_urls(files)
        self._kinds = [media_kind(one.shown) for one in files]
        paths = [pa.field(kind, pa.string(), metadata={MEANS: b"path"}) for kind in KINDS if kind in set(self._kinds)]
        self.schema: pa.Schema = pa.schema([pa.field("path", pa.string()), pa.field("name", pa.string()), *paths])

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
            [path if kind == column else None for path, kind in zip(paths, kinds, strict=True)]
            for column in self.schema.names[2:]
        ]
        arrays = [pa.array(column, pa.string()) for column in columns]
        yield Batch(0, piece.row, pa.table(arrays, schema=self.schema), names)

    def fingerprint(self) -> Mapping[str, str]:
        return of_media(self._files, [Origin(name, name) for name in self._names])

    def close(self) -> None:
        """Do nothing: no file is open."""


class TarReader:
    """WebDataset archives: files with a common stem form one row. A piece is an archive; a mark is a row in it.

    The suffixes are those of the first LEARN_ROWS rows of the first archive; others are ignored. TEXTS are text,
    NUMBERS JSON cells (cells.py), `json` JSON text, everything else bytes; `__key__` is the common stem. A number that
    JSON writes otherwise, such as 0042, is text.

    alternatives: groups of suffixes of which each row has one, such as (jpg, png): all are columns if one is known.
    """

    def __init__(self, files: Sequence[SourceFile], alternatives: Sequence[Sequence[str]] = ()) -> None:
        self._files = files
        self.origins: Sequence[Origin] = origins(files)
        with self._samples(0) as samples:
            first = [
                {name: value if name in NUMBERS else None for name, value in one.items()}
                for one in islice(samples, LEARN_ROWS)
            ]
        suffixes = list(dict.fromkeys(name for one in first for name in one))
        for group in alternatives:
            if any(name in suffixes for name in group):
                suffixes += [name for name in group if name not in suffixes]
        self._suffixes = [name for name in suffixes if not name.startswith("__")]
        if not self._suffixes:
            raise InputError(f"{files[0].shown}: holds no rows (files called KEY.SUFFIX)")
        self.schema: pa.Schema = pa.schema(
            [pa.field("__key__", pa.string()), *(_field(name, first) for name in self._suffixes)]
        )

    @property
    def rows(self) -> int | None:
        return None

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return [RowRange(origin) for origin in range(len(self._files))]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        name, row = self.origins[piece.origin].name, at or 0
        with self._samples(piece.origin) as samples:
            held, size_bytes = list[Sample](), 0
            for sample in islice(samples, row, None):
                held.append(sample)
                size_bytes += sum(len(value) for value in sample.values() if isinstance(value, bytes))
                if len(held) >= TAR_ROWS_MAX or size_bytes >= BATCH_BYTES:
                    yield self._batch(held, row, name)
                    row, held, size_bytes = row + len(held), [], 0
            if held:
                yield self._batch(held, row, name)

    def fingerprint(self) -> Mapping[str, str]:
        return of_tables(self._files, self.origins)

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

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
        fields = [one.with_type(pa.string()) if cell_kind(one) else one for one in fields]
        arrays = [pa.array(values, field.type) for values, field in zip([*columns, reasons], fields, strict=True)]
        table = pa.table(arrays, schema=pa.schema(fields))
        return Batch(row, row, table, [f"{name}#{one['__key__']}" for one in samples])

    @contextmanager
    def _samples(self, origin: int) -> Iterator[Iterator[Sample]]:
        from webdataset.tariterators import group_by_keys  # imports torch, if installed

        file = self._files[origin]
        try:
            with file.open() as packed, unpacked(packed, compression_of(file.shown)) as stream:
                yield group_by_keys(_members(stream, file.shown))
        except (TarError, OSError, EOFError, pa.ArrowException) as error:
            raise unreadable(file.shown, error) from None


def _members(stream: Any, shown: str) -> Iterator[Sample]:
    """Yield the members of an archive as webdataset samples; InputError for members that form no rows."""
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
                        "    fix: name every row differently, and write its files one after the other"
                    )
                keys.add(key)
                current, suffixes = key, set()
            if suffix.lower() in (*RESERVED, *suffixes):
                why = f"a row cannot have a file called {suffix}" if suffix.lower() in RESERVED else "is there twice"
                raise InputError(f"{shown}: {name}: {why}\n    fix: remove or rename it")
            suffixes.add(suffix.lower())
        yield {**member, "__url__": shown}


def _field(suffix: str, first: Sequence[Sample]) -> pa.Field:
    """Return a suffix's column, with the type of numbers in the first rows."""
    if suffix in NUMBERS:
        cells = [_value(suffix, one.get(suffix))[0] for one in first]
        return learned_json([{suffix: value} for value in json_values(cells)]).field(0)
    if suffix == "json":
        return pa.field(suffix, pa.string(), metadata={MEANS: b"json"})
    return pa.field(suffix, pa.string() if suffix in TEXTS else pa.binary())


def _value(suffix: str, data: bytes | None) -> tuple[Any, str | None]:
    """Return a member's value, and the reason if it is invalid."""
    if data is None or (suffix not in NUMBERS and suffix not in TEXTS and suffix != "json"):
        return data, None
    try:
        text = data.decode()
        return (_number_cell(text.strip()) if suffix in NUMBERS else text), None
    except UnicodeDecodeError:
        return None, f"{suffix}: text that is not UTF-8"
    except ValueError:
        return None, f"{suffix}: no whole number"


def _number_cell(text: str) -> str:
    """Return a whole number as a JSON cell; ValueError if it is none."""
    return text if str(int(text)) == text else json.dumps(text)


class Loader:
    """Reads the files that rows name, by path or URL, in a thread pool. Thread-safe.

    threads:   files read concurrently.
    bytes_max: larger files are refused.
    folder:    path or URL that relative paths are relative to; '' is the working directory.
    storage:   fsspec options, for URLs below a root.
    roots:     folders and URLs that files must be below; None: `folder`.
    urls:      other public URLs of http and https may be named.
    """

    def __init__(
        self,
        threads: int = THREADS,
        bytes_max: int = BYTES_MAX,
        folder: str = "",
        storage: Mapping[str, str] | None = None,
        roots: Sequence[str] | None = None,
        urls: bool = False,
    ) -> None:
        self.bytes_max = bytes_max
        self._folder, self._storage = folder, dict(storage or {})
        self._roots = tuple(one or "." for one in (roots if roots is not None else (folder,)))
        self._urls = urls
        self._threads = ThreadPoolExecutor(threads, "load")

    def read_all(
        self, urls: Sequence[str | Path], folders: Sequence[str | None] | None = None
    ) -> list[bytes | Unusable]:
        """Return the content of each file, in order, or Unusable with the reason.

        urls:    names of a row, or paths of the calling program, which may lead anywhere.
        folders: folder that each name is relative to; None: the loader's folder.
        """
        return list(self._threads.map(self._read, urls, folders if folders is not None else [None] * len(urls)))

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, written: str | Path, folder: str | None) -> bytes | Unusable:
        if not str(written):
            return Unusable("an empty file name")
        try:
            data = self._content(written, folder)
        except Outside as error:
            return Unusable(shown_url(f"cannot read {written!s:.200}: {error}"))
        except FileNotFoundError:
            return Unusable(shown_url(f"there is no file {written}"))
        except Exception as error:  # remote file systems raise any exception of their client
            reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            return Unusable(shown_url(f"cannot read {written}: {reason[:200]}"))
        if len(data) > self.bytes_max:
            return Unusable(f"{shown_url(str(written))} has more than {self.bytes_max} bytes, the most that are read")
        return data

    def _content(self, written: str | Path, folder: str | None) -> bytes:
        most = self.bytes_max + 1
        if isinstance(written, Path):  # of the calling program
            return read_local(str(written), ("/",), most)
        url = joined(self._folder if folder is None else folder, written)
        if not is_url(url):
            return read_local(url, self._roots, most)
        check_url(url, self._roots, self._urls)
        return read_url(url, self._roots, self._storage, most)
