"""Delta tables: the current files, columns and deleted rows of a table's log, by package `deltalake`.

The rows are read by ParquetReader, file by file in the order of their paths, so that marks, batches and fingerprints
are those of Parquet files. Deletion vectors are applied to each batch; row numbers still count the rows of the file. A
table that requires another feature is refused by its name.
"""

from __future__ import annotations

import hashlib
import posixpath
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa

from weftline.engine.jobs.sources.formats import shown_url
from weftline.engine.jobs.sources.locations import Listing, SourceFile, is_local, unreadable
from weftline.engine.jobs.sources.reader import Batch, ColumnReader, DatasetReader, Mark, Origin, RowRange
from weftline.errors import InputError, first_line

FEATURES = frozenset({
    "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint", "vacuumProtocolCheck",
})  # fmt: skip
"""Reader features that need nothing beyond this module."""

LOG_BYTES_MAX = 1 << 30
"""Largest log of a remote table, which is copied to this machine."""

LOG = "_delta_log"
_PREFIX = "partition."


@dataclass(frozen=True, slots=True)
class DeltaFiles:
    """Content of one version of a table.

    files:      current files, sorted by path.
    schema:     columns of the files, without those of partitions.
    partitions: columns of partitions, one row for each file.
    names:      all columns in the order of the table.
    kept:       mask of the rows that are not deleted, by path of a file, for files with deleted rows.
    """

    files: Sequence[SourceFile]
    schema: pa.Schema
    partitions: pa.Table
    names: Sequence[str]
    kept: Mapping[str, np.ndarray]


def delta_files(listing: Listing, version: int | None) -> DeltaFiles:
    """Read the log of the table at a listing's base; InputError names what is not supported.

    version: None: the newest.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    with tempfile.TemporaryDirectory(prefix="weftline-delta-") as copy:
        local = is_local(listing.fs)
        root = listing.base if local else _copied_log(listing, Path(copy))
        try:
            table = DeltaTable(root, version=version)
            _check_features(table, listing.shown)
            schema = pa.schema(table.schema().to_arrow())
            actions = pa.table(table.get_add_actions(flatten=True)).sort_by("path")
            kept = {
                _inside(str(uri), root, listing.shown): np.asarray(mask, bool)
                for batch in table.deletion_vectors()
                for uri, mask in zip(*(pa.array(column).to_pylist() for column in batch.columns), strict=True)
            }
        except (DeltaError, OSError, ValueError) as error:
            what = "" if version is None else f", version {version}"
            raise InputError(
                f"{listing.shown}{what}: cannot be read as a Delta table: {first_line(error):.300}"
            ) from None
    by_path = {posixpath.relpath(file.path, listing.base): file for file in listing.files}
    names = [_inside(unquote(path), root, listing.shown) for path in actions.column("path").to_pylist()]
    if missing := [name for name in names if name not in by_path]:
        raise InputError(
            f"{listing.shown}: {len(missing)} files of the Delta table are missing, such as {missing[0]}\n"
            "    fix: they may have been removed by VACUUM: leave --table-version out, or restore the table"
        )
    columns = [name for name in actions.column_names if name.startswith(_PREFIX)]
    partitions = actions.select(columns).rename_columns([name.removeprefix(_PREFIX) for name in columns])
    inner = pa.schema([field for field in schema if field.name not in partitions.column_names])
    masks = {by_path[name].path: mask for name, mask in kept.items() if name in by_path}
    return DeltaFiles([by_path[name] for name in names], inner, partitions, schema.names, masks)


def _check_features(table: Any, shown: str) -> None:
    protocol, settings = table.protocol(), table.metadata().configuration
    unknown = sorted(set(protocol.reader_features or ()) - FEATURES - {"columnMapping"})
    mapping = settings.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        unknown.append(f"columnMapping (mode {mapping})")
    if unknown:
        raise InputError(
            f"{shown}: the Delta table needs {', '.join(unknown)}, which is not supported\n"
            "    fix: export it to Parquet, with deltalake: DeltaTable(PATH).scan()"
        )


def _inside(path: str, root: str, shown: str) -> str:
    """Return a file's path relative to the table; InputError for a file elsewhere (a shallow clone)."""
    path = unquote(urlsplit(path).path) if "://" in path else path
    if path.startswith("/"):
        path = posixpath.relpath(path, root)
    if path.startswith("../"):
        raise InputError(
            f"{shown}: the Delta table uses files of another folder, such as {path} (a shallow clone), which is not "
            "supported\n    fix: export it to Parquet, with deltalake: DeltaTable(PATH).scan()"
        )
    return path


def _copied_log(listing: Listing, folder: Path) -> str:
    """Copy log and deletion vectors of a remote table, so that it is read with the file system of `--storage`."""
    names = [name for name in listing.hidden if name.startswith(f"{LOG}/")]
    vectors = [posixpath.relpath(file.path, listing.base) for file in listing.files if file.path.endswith(".bin")]
    fs, size_bytes = listing.fs, 0
    try:
        for name in [*names, *vectors]:
            data = fs.cat_file(f"{listing.base}/{name}")
            size_bytes += len(data)
            if size_bytes > LOG_BYTES_MAX:
                raise InputError(f"{listing.shown}: the log of the Delta table has more than {LOG_BYTES_MAX} bytes")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    except Exception as error:  # remote file systems raise any exception of their client
        raise unreadable(shown_url(f"{listing.shown}/{LOG}"), error) from None
    return str(folder)


class UndeletedReader:
    """Reader of files without their deleted rows. kept: mask of a file's rows, by origin."""

    def __init__(self, inner: DatasetReader, kept: Mapping[int, np.ndarray]) -> None:
        self._inner, self._kept = inner, kept
        self.origins: Sequence[Origin] = inner.origins
        self.schema: pa.Schema = inner.schema

    @property
    def rows(self) -> int | None:
        rows = self._inner.rows
        return None if rows is None else rows - sum(int((~mask).sum()) for mask in self._kept.values())

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return self._inner.pieces(fine)

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        mask, name = self._kept.get(piece.origin), self.origins[piece.origin].name
        for batch in self._inner.read(piece, at):
            if mask is None:
                yield batch
                continue
            here = np.ones(batch.table.num_rows, bool)
            part = mask[batch.row : batch.row + len(here)]  # rows behind the mask are kept
            here[: len(part)] = part
            names = [f"{name}#{batch.row + row}" for row in np.flatnonzero(here).tolist()]
            yield Batch(batch.at, batch.row, batch.table.filter(pa.array(here)), names)

    def only(self, names: Collection[str]) -> UndeletedReader:
        other = copy(self)
        if isinstance(self._inner, ColumnReader):
            other._inner = self._inner.only(names)
        other.schema = other._inner.schema
        return other

    def fingerprint(self) -> Mapping[str, str]:
        found = dict(self._inner.fingerprint())
        for origin, mask in self._kept.items():
            digest = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
            found[f"{self.origins[origin].name} without deleted rows"] = f"{int(mask.sum())} rows sha256:{digest}"
        return found

    def close(self) -> None:
        self._inner.close()
