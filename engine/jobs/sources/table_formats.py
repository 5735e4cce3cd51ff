"""Folders of table formats, whose files alone are not the table: Delta, Iceberg, Hudi, Lance; found by their metadata.

Such a folder also holds files of deleted rows and of old versions. Delta tables are read (see delta_table); the others,
and single files of any of them, are refused with the remedy.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from weftline.engine.jobs.sources.formats import format_of, without_query
from weftline.engine.jobs.sources.locations import Listing
from weftline.errors import InputError

DELTA = "Delta table"

EXPORTS: Mapping[str, str] = {
    "Iceberg table": "pyiceberg: catalog.load_table(NAME).scan().to_arrow()",
    "Hudi table": "Spark: spark.read.format('hudi').load(PATH).write.parquet(FOLDER)",
    "Lance data set": "pylance: lance.dataset(PATH).to_table()",
}
"""Ways to read the tables that are refused, by format."""

_MARKERS: Mapping[str, re.Pattern[str]] = {
    DELTA: re.compile(r"(?:(.*)/)?_delta_log/[^/]+"),
    "Hudi table": re.compile(r"(?:(.*)/)?\.hoodie/.+"),
    "Iceberg table": re.compile(r"(?:(.*)/)?metadata/(?:[^/]+\.metadata\.json|version-hint\.text)"),
    "Lance data set": re.compile(r"(?:(.*)/)?(?:_versions/[^/]+\.manifest|[^/]+\.lance)"),
}
"""Metadata files of a table; the group is the table's folder."""

_METADATA = {DELTA: "_delta_log", "Hudi table": ".hoodie", "Iceberg table": "metadata", "Lance data set": "_versions"}
"""Folder of the metadata, inside the table."""

WEB = frozenset({"http", "https"})
FOLDERS_MAX = 100
"""Most folders of a glob that are searched for metadata."""


@dataclass(frozen=True, slots=True)
class TableFolder:
    """A table. root: its folder, relative to the base of the listing; '' for the base itself, `..` above it."""

    format: str
    root: str


def table_in(names: Iterable[str]) -> TableFolder | None:
    """Return the first table among files, by their paths; None if there is none."""
    found = [
        TableFolder(format, match[1] or "")
        for name in names
        for format, marker in _MARKERS.items()
        if (match := marker.fullmatch(name))
    ]
    order = list(_MARKERS)
    return min(found, key=lambda one: (one.root.count("/"), one.root, order.index(one.format)), default=None)


def table_of(listing: Listing) -> TableFolder | None:
    """Return the table that the files of an argument belong to; None for plain files."""
    inside = [posixpath.relpath(without_query(file.path), listing.base or ".") for file in listing.files]
    return table_in([*listing.hidden, *inside]) or _table_around(listing, inside)


def _table_around(listing: Listing, inside: Sequence[str]) -> TableFolder | None:
    """Look for metadata that the argument leaves out, where it is a file, a glob or a partition of a table."""
    fs, base = listing.fs, listing.base.rstrip("/")
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols & WEB or not any(format_of(name) == "parquet" for name in inside):  # web servers have no folders
        return None
    for folder in _folders(base, inside if listing.kind == "glob" else ()):
        for format, name in _METADATA.items():
            names: list[str] = []
            with suppress(Exception):  # there is none, or the client of a remote file system raises any exception
                names = [path.rsplit("/", 1)[-1] for path in fs.ls(posixpath.join(base, folder, name), detail=False)]
            if table_in(f"{name}/{one}" for one in names):
                return TableFolder(format, folder)
    return None


def _folders(base: str, inside: Sequence[str]) -> list[str]:
    """Return the folders to look into, relative to the base: it, those above its partitions, and those of the files."""
    found, folder = ["."], base
    while folder and ("=" in posixpath.basename(folder) or posixpath.basename(folder) == "data"):
        folder = posixpath.dirname(folder)
        found.append("/".join([".."] * len(found)))
    below = dict[str, None]()
    for name in inside:
        parts = list(takewhile(lambda part: "=" not in part, name.split("/")[:-1]))
        below |= dict.fromkeys("/".join(parts[:end]) for end in range(1, len(parts) + 1))
    return [*found, *list(below)[:FOLDERS_MAX]]


def refuse(listing: Listing, table: TableFolder) -> InputError:
    """Return the error for a table that is not read, or not in this way."""
    shown = posixpath.join(listing.shown if listing.kind != "file" else posixpath.dirname(listing.shown), table.root)
    shown = shown if "://" in shown else posixpath.normpath(shown)
    if table.format == DELTA:
        return InputError(
            f"{listing.shown}: found files of the Delta table {shown}, which may hold deleted rows\n"
            f"    fix: --data {shown}, without other data and without a pattern"
        )
    return InputError(
        f"{listing.shown}: found files of the {table.format} {shown}, which is not supported; its files may hold "
        f"deleted rows\n    fix: export the table to Parquet, with {EXPORTS[table.format]}"
    )
