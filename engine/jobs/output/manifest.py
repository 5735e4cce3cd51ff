"""Documents of a job: manifest, commit records, completion marker and error rows; pure.

The manifest is compared on resume. A part exists once its commit record is written. Documents are JSON, decoded
strictly; file names that are not valid Unicode survive.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

import msgspec

VERSION = 1

SHOWN_MAX = 10
"""Most differences of a kind that are listed; the others are counted."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and settings that determine a job's results.

    pipeline: `name`, `fingerprint`, and optionally `text`, `graph`, and `file NAME` for each model and Python file.
    input:    the result of `Source.fingerprint`.
    settings: all other settings that determine the results, as JSON values; never secrets.
    versions: of Weftline, Python and frameworks; a difference is a warning.
    schema:   the output's columns, as text.
    suffix, single_file, extras: layout of the results, as in `Store.open`.
    """

    version: int = VERSION
    pipeline: dict[str, str]
    input: dict[str, str]
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}
    schema: str = ""
    suffix: str = ""
    single_file: bool = False
    extras: tuple[str, ...] = ()


def differences(old: Manifest, new: Manifest) -> list[str]:
    """Return why a job that began as `old` cannot resume as `new`, one sentence each; empty if it can."""
    found = [*_pipeline(old.pipeline, new.pipeline), *_input(old.input, new.input)]
    found += _settings(_plain(old.settings), _plain(new.settings))
    if old.schema != new.schema and not found:
        found.append("the output's columns are not the ones the job began with")
    if (old.suffix, old.single_file) != (new.suffix, new.single_file) and not found:
        found.append(f"results were written as {_form(old)}, and are now requested as {_form(new)}")
    return found


def version_differences(old: Manifest, new: Manifest) -> list[str]:
    """Return changed versions, with which results may differ in bytes."""
    return [
        f"{name}: {new.versions.get(name, 'none')} now, {old.versions.get(name, 'none')} when the job began"
        for name in sorted({*old.versions, *new.versions})
        if old.versions.get(name) != new.versions.get(name)
    ]


def _pipeline(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    if old.get("fingerprint") == new.get("fingerprint"):
        return []
    files = _changes(
        {name: value for name, value in old.items() if name.startswith("file ")},
        {name: value for name, value in new.items() if name.startswith("file ")},
        "the pipeline's ",
    )
    before, now = old.get("text", ""), new.get("text", "")
    lines = [
        line
        for line in difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if not lines or not before or not now:
        return files or [f"the pipeline {new.get('name', '')} has changed"]
    shown = [f"    {line}" for line in lines[:SHOWN_MAX]]
    more = [f"    and {len(lines) - SHOWN_MAX} more lines"] if len(lines) > SHOWN_MAX else []
    return ["\n".join([f"the pipeline {new.get('name', '')} has changed:", *shown, *more]), *files]


def _input(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return _changes(old, new, "input ")


def _changes(old: Mapping[str, str], new: Mapping[str, str], kind: str) -> list[str]:
    found = [f"{kind}{name} is gone" for name in old if name not in new]
    found += [f"{kind}{name} is new" for name in new if name not in old]
    found += [f"{kind}{name} has changed" for name in old if name in new and old[name] != new[name]]
    return found if len(found) <= SHOWN_MAX else [*found[:SHOWN_MAX], f"and {len(found) - SHOWN_MAX} more of the kind"]


def _settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {_as_json(new.get(name))}, and was {_as_json(old.get(name))} when the job began"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _as_json(value: Any) -> str:
    return "not set" if value is None else f"{json.dumps(value, ensure_ascii=False):.200}"


def _form(one: Manifest) -> str:
    return f"one {one.suffix} file" if one.single_file else f"a folder of {one.suffix} files"


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON decodes them: tuples as lists, keys as text."""
    plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(settings, str_keys=True)))
    return plain


class MediaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Media files of one revision of a part.

    folder: folder below the job's media folder, with a trailing `/`.
    sha256: digest of names and contents, in the order of names.
    """

    folder: str
    files: int
    size_bytes: int
    sha256: str


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Commit record of a part.

    row_number:   number of the first row; `place` in the file.
    rows:         number of rows, error rows included.
    error_places: numbers of the error rows, ascending.
    file:         data file in the job's folder.
    errors_file:  error rows in the job's state folder; '' without error rows.
    media:        one entry for each revision with media.
    after:        resume point at or before the next row.
    tally:        step statistics, from Tally.to_json.
    seconds:      run time of all revisions.
    revision:     number of retries of the error rows.
    """

    version: int = VERSION
    part: int
    row_number: int = msgspec.field(name="place")
    rows: int
    error_places: tuple[int, ...] = ()
    file: str
    size_bytes: int
    sha256: str
    errors_file: str = ""
    errors_sha256: str = ""
    media: tuple[MediaRecord, ...] = ()
    after: dict[str, Any]
    tally: dict[str, Any]
    seconds: float
    revision: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Completion marker.

    records: digest of the commit records.
    files:   size by name of the files written at the end.
    """

    version: int = VERSION
    records: str
    parts: int
    rows: int
    errors: int
    files: dict[str, int]


def digest(records: Iterable[PartRecord]) -> str:
    """Return a digest of all records."""
    sha256 = hashlib.sha256()
    for one in records:
        sha256.update(f"{one.part} {one.revision} {one.sha256} {one.errors_sha256}\n".encode())
    return sha256.hexdigest()


def gaps(records: Mapping[int, PartRecord]) -> list[str]:
    """Return the inconsistencies of the records by part, as sentences."""
    problems = []
    for part in range(max(records, default=-1) + 1):
        one, before = records.get(part), records.get(part - 1)
        if one is None:
            problems.append(f"the record of part {part} is missing, and later ones are there")
        elif one.part != part:
            problems.append(f"the record of part {part} is that of part {one.part}")
        elif one.row_number != (before.row_number + before.rows if before is not None else 0) and (before or part == 0):
            problems.append(
                f"the record of part {part} begins at row {one.row_number}, which the part before does not reach"
            )
    return problems


def in_order(records: Mapping[int, PartRecord]) -> Sequence[PartRecord]:
    return [records[part] for part in sorted(records)]


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that failed.

    row_number, id:      as in `rows`; `place` in the file.
    step, error, reason: as in `rows.RowError`.
    part:                part of the row.
    """

    row_number: int = msgspec.field(name="place")
    id: str
    step: str
    error: str
    reason: str
    part: int


def encode_rows(rows: Iterable[ErrorRow]) -> bytes:
    """Encode error rows as JSON lines, ordered by row number."""
    return b"".join(encode(row) for row in sorted(rows, key=lambda row: row.row_number))


def read_rows(file: BinaryIO) -> Iterator[ErrorRow]:
    """Decode error rows from JSON lines; Unreadable names the line."""
    for number, line in enumerate(file, 1):
        try:
            yield decode(line, ErrorRow)
        except Unreadable as error:
            raise Unreadable(f"line {number}: {error}") from None


T = TypeVar("T")


class Unreadable(ValueError):
    """A document is incomplete, or of another type."""


def encode(value: Any) -> bytes:
    """Encode plain data or a msgspec struct as a line of JSON; lone surrogates are escaped."""
    written = json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=False, allow_nan=False)
    return written.encode("utf-8", "backslashreplace") + b"\n"


def decode(data: bytes, type: type[T]) -> T:
    """Decode a document; Unreadable if it is incomplete or not of that type."""
    try:
        return msgspec.convert(json.loads(data), type)
    except msgspec.ValidationError as error:
        raise Unreadable(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable("it is not whole" if data.strip() else "it is empty") from error
