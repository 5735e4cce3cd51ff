"""Open a data set: discover its files, detect the format and create the reader.

Optional packages are imported on use; a missing one raises MissingPackage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from weftline.engine.jobs.rows import Source
from weftline.engine.jobs.sources.formats import (
    alternatives_in,
    check_format,
    chosen,
    expanded,
    mixed,
    separator_of,
    shown_url,
)
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError, MissingPackage

if TYPE_CHECKING:
    from weftline.engine.jobs.sources.locations import Listing, SourceFile
    from weftline.engine.jobs.sources.media import Loader
    from weftline.engine.jobs.sources.reader import DatasetReader
    from weftline.engine.jobs.sources.table_formats import TableFolder

STDIN = "-"
HUB = "hf:"
EXPECTED = "a file, a folder, a glob, a URL, hf:NAME, or - for standard input"
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder written by `save_to_disk`."""

PROBLEMS_MAX = 10
"""Most missing files that an error names."""

JOB_FOLDER = "_weftline/"
"""State folder of job results; `errors.jsonl` beside it is no data."""


def open_source(spec: DataSpec, stdin: BinaryIO | None = None, optional: Collection[str] = ()) -> Source:
    """Open the data of `spec` with its selection; InputError lists the problems.

    stdin:    read for `-`; None: the standard input of this process.
    optional: columns that are read even where the first rows lack them, as are alternatives to a column that they have.
    """
    for package in ("pyarrow", "fsspec"):
        need(package)
    from weftline.engine.jobs.sources.reader import LateColumnReader
    from weftline.engine.jobs.sources.selection import SelectedSource

    check_format(spec.format)
    if not spec.data:
        raise InputError(f"--data is missing: {EXPECTED}")
    if not all(one.strip() for one in spec.data):
        raise InputError(f"--data '': names nothing; expected {EXPECTED}")
    reader = _reader(spec, stdin)
    if reader.rows == 0 or not reader.schema.names:
        reader.close()
        raise InputError(f"{_shown(spec)}: the data set is empty")
    if isinstance(reader, LateColumnReader):
        known = reader.schema.names
        others = [one for group in alternatives_in(spec.maps) if not set(group).isdisjoint(known) for one in group]
        reader.expect([*optional, *others])
    return SelectedSource(reader, spec)


def open_loader(source: Source, spec: DataSpec) -> Loader:
    """Return a loader of the files named in a source's rows; close it after the last row."""
    from weftline.engine.jobs.sources.media import Loader

    folder = getattr(source, "folder", "")
    roots = (*getattr(source, "roots", (folder,)), *spec.media_roots)
    return Loader(folder=folder, storage=spec.storage, roots=roots, urls=spec.media_urls)


def need(package: str, extra: str = "batch") -> Any:
    """Import an optional package; MissingPackage if it is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackage(error.name or package, extra) from None


def _reader(spec: DataSpec, stdin: BinaryIO | None) -> DatasetReader:
    hub = [one for one in spec.data if one.startswith(HUB) and not one.startswith("hf://")]
    if len(spec.data) > 1 and (hub or STDIN in spec.data):
        raise InputError(f"{hub[0] if hub else STDIN} cannot be combined with other data; found {_shown(spec)}")
    if hub:
        need("datasets")
        from weftline.engine.jobs.sources.arrow_readers import by_name

        if spec.format not in (None, "hf"):
            raise InputError(f"{hub[0]}: --format {spec.format} is for files")
        _check_options(spec, "hf")
        return by_name(hub[0].removeprefix(HUB), spec.split)
    if spec.data == (STDIN,):
        return _of_stdin(spec, stdin or sys.stdin.buffer)
    return _of_files(spec)


def _shown(spec: DataSpec) -> str:
    return ", ".join(map(shown_url, spec.data))


def _of_stdin(spec: DataSpec, stream: BinaryIO) -> DatasetReader:
    from weftline.engine.jobs.sources.arrow_readers import StreamReader
    from weftline.engine.jobs.sources.csv_reader import CsvReader
    from weftline.engine.jobs.sources.jsonl_reader import JsonlReader
    from weftline.engine.jobs.sources.text_reader import StandardInput

    readers: dict[str, Callable[[StandardInput], DatasetReader]] = {
        "jsonl": JsonlReader,
        "csv": partial(CsvReader, separator=separator_of(spec.separator)),
        "arrow": StreamReader,
    }
    format = spec.format or ("jsonl" if spec.separator is None else "csv")
    if format not in readers:
        raise InputError(f"standard input: --format {format} cannot be read from it; expected jsonl, csv or arrow")
    _check_options(spec, format)
    return readers[format](StandardInput(stream))


def _of_files(spec: DataSpec) -> DatasetReader:
    from weftline.engine.jobs.sources.partitions import PartitionedReader, hive_columns, pruned
    from weftline.engine.jobs.sources.table_formats import table_of

    listings = _listings(spec)
    for listing in listings:
        if table := table_of(listing):
            return _of_table(listing, table, spec)
    if len(listings) == 1 and listings[0].kind == "folder" and _is_saved(listings[0], spec.format):
        return _saved(listings[0], spec)
    if spec.split is not None:
        raise InputError(f"--split {spec.split:.80}: only Hugging Face data sets have splits")
    if spec.format == "hf":
        raise InputError(f"{listings[0].shown}: --format hf expects one folder written by save_to_disk, or hf:NAME")
    if spec.format == "delta":
        raise InputError(
            f"{listings[0].shown}: --format delta expects the folder of a Delta table; there is no _delta_log"
        )
    found = [_usable(listing, spec.format) for listing in listings]
    formats = list(dict.fromkeys(format for format, _ in found))
    if len(formats) > 1:
        raise InputError(mixed(_shown(spec), formats))
    _check_twice([files for _, files in found])
    _check_options(spec, formats[0])
    every = [file for _, files in found for file in files]
    files, columns = pruned(every, hive_columns(every), spec.where)
    reader = _of_format(formats[0], files, spec)
    return PartitionedReader(reader, columns, formats[0] == "files") if columns else reader


def _listings(spec: DataSpec) -> list[Listing]:
    """List the files of all arguments; InputError lists the names of braces that are missing."""
    from weftline.engine.jobs.sources.locations import look

    listings, problems = [], []
    for argument in spec.data:
        names = [argument] if _is_here(argument) else expanded(argument)
        for name in names:
            try:
                listings.append(look(name, spec.storage))
            except InputError as error:
                problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - PROBLEMS_MAX} more"] if len(problems) > PROBLEMS_MAX else []
        raise InputError("\n".join([*problems[:PROBLEMS_MAX], *more]))
    return listings


def _is_here(argument: str) -> bool:
    """Return True for the name of a local file or folder, which may have braces of its own."""
    try:
        return Path(argument).exists()
    except (OSError, ValueError):  # longer than a name can be, as lists in braces are
        return False


def _check_options(spec: DataSpec, format: str) -> None:
    """Refuse options of one format for data of another."""
    if spec.separator is not None and format != "csv":
        raise InputError(f"--separator {spec.separator!r:.20} is for CSV; the format of {_shown(spec)} is {format}")
    if spec.table_version is not None and format != "delta":
        raise InputError(
            f"{_shown(spec)}: --table-version {spec.table_version} expects the folder of a Delta table; the format is "
            f"{format}"
        )


def _of_table(listing: Listing, table: TableFolder, spec: DataSpec) -> DatasetReader:
    """Open a Delta table; InputError for other tables, and for parts of one."""
    from weftline.engine.jobs.sources.table_formats import DELTA, refuse

    if table.format != DELTA or table.root or listing.kind != "folder" or len(spec.data) > 1:
        raise refuse(listing, table)
    if spec.format not in (None, "delta", "parquet"):
        raise InputError(f"{listing.shown}: --format {spec.format}: the folder is a Delta table")
    if spec.split is not None:
        raise InputError(f"--split {spec.split:.80}: only Hugging Face data sets have splits")
    _check_options(spec, "delta")
    need("deltalake", "delta")
    from weftline.engine.jobs.sources.arrow_readers import ParquetReader
    from weftline.engine.jobs.sources.delta_table import UndeletedReader, delta_files
    from weftline.engine.jobs.sources.partitions import FileColumns, PartitionedReader, pruned

    found = delta_files(listing, spec.table_version)
    if not found.files:
        raise InputError(f"{listing.shown}: the data set is empty")
    files, columns = pruned(found.files, FileColumns(found.partitions, found.partitions.schema), spec.where)
    kept = {origin: found.kept[file.path] for origin, file in enumerate(files) if file.path in found.kept}
    reader: DatasetReader = ParquetReader(files, found.schema)
    if kept:
        reader = UndeletedReader(reader, kept)
    return PartitionedReader(reader, columns, order=found.names) if columns else reader


def _is_saved(listing: Listing, format: str | None) -> bool:
    here = {file.path.rsplit("/", 1)[-1] for file in listing.files if file.path.rsplit("/", 1)[0] == listing.base}
    return format in (None, "hf") and any(name in here for name in SAVED)


def _saved(listing: Listing, spec: DataSpec) -> DatasetReader:
    _check_options(spec, "hf")
    need("datasets")
    from weftline.engine.jobs.sources.arrow_readers import from_disk

    url = listing.base if listing.files[0].local else str(listing.fs.unstrip_protocol(listing.base))
    return from_disk(url, listing.shown, spec.split, spec.storage)


def _usable(listing: Listing, format: str | None) -> tuple[str, list[SourceFile]]:
    files = listing.files
    if any(path.startswith(JOB_FOLDER) for path in listing.hidden):
        files = tuple(file for file in files if file.path != f"{listing.base}/errors.jsonl")
    names = [file.shown for file in files]
    found, places = chosen(names, format, listing.kind == "file", listing.shown)
    return found, [files[place] for place in places]


def _check_twice(arguments: Sequence[Sequence[SourceFile]]) -> None:
    """Refuse a file named by several arguments; links in one folder may lead to one file."""
    before: dict[str, SourceFile] = {}
    for files in arguments:
        for file in files:
            if other := before.get(file.same):
                also = f", as {other.shown} too" if other.shown != file.shown else ""
                raise InputError(f"{file.shown}: named twice{also}; each of its rows would be processed twice")
        before |= {file.same: file for file in files}


def _of_format(format: str, files: Sequence[SourceFile], spec: DataSpec) -> DatasetReader:
    if format in ("parquet", "arrow"):
        from weftline.engine.jobs.sources.arrow_readers import ArrowReader, ParquetReader

        return ParquetReader(files) if format == "parquet" else ArrowReader(files)
    if format == "jsonl":
        from weftline.engine.jobs.sources.jsonl_reader import JsonlReader

        return JsonlReader(files)
    if format == "csv":
        from weftline.engine.jobs.sources.csv_reader import CsvReader

        return CsvReader(files, separator_of(spec.separator))
    if format == "webdataset":
        need("webdataset")
        from weftline.engine.jobs.sources.media import TarReader

        return TarReader(files, alternatives_in(spec.maps))
    from weftline.engine.jobs.sources.media import MediaReader

    return MediaReader(files)
