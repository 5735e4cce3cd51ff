"""Job manifest: pipeline, data and settings, compared on resume; pure.

Commit record of a part, written last.

Error rows as JSON lines on disk, in row order.

Strict reader of small JSON documents; keeps file names that are not valid Unicode.
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
"""Most differences of one kind that are listed; the rest is counted."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A job.

    pipeline: `name`, `fingerprint`, and, where they are known, `text` and what it is made of: `graph`, and `file NAME`
              for each model and Python file.
    input:    what `Source.fingerprint` says.
    settings: everything else that decides the results, as JSON values; never secrets.
    versions: of Weftline, Python and frameworks; when they differ the job goes on with a warning.
    schema:   the output's columns, as text.
    suffix, single_file, extras: how results lie, as `Store.open` was told.
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
    """Return why a job that began as `old` cannot go on as `new`, one sentence each; none when it can."""
    found = [*_pipeline(old.pipeline, new.pipeline), *_input(old.input, new.input)]
    found += _settings(_plain(old.settings), _plain(new.settings))
    if old.schema != new.schema and not found:
        found.append("the output's columns are not the ones the job began with")
    if (old.suffix, old.single_file) != (new.suffix, new.single_file) and not found:
        found.append(f"results were written as {_form(old)}, and are now wanted as {_form(new)}")
    return found


def version_differences(old: Manifest, new: Manifest) -> list[str]:
    """Return what the job began with and is not what runs now: its results may then differ in bytes."""
    return [
        f"{name}: {new.versions.get(name, 'none')} now, {old.versions.get(name, 'none')} when the job began"
        for name in sorted({*old.versions, *new.versions})
        if old.versions.get(name) != new.versions.get(name)
    ]


def _pipeline(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    if old.get("fingerprint") == new.get("fingerprint"):
        return []
    files = _changes(
        {name: said for name, said in old.items() if name.startswith("file ")},
        {name: said for name, said in new.items() if name.startswith("file ")},
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
        f"{name} is {_said(new.get(name))}, and was {_said(old.get(name))} when the job began"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _said(value: Any) -> str:
    return "not set" if value is None else f"{json.dumps(value, ensure_ascii=False):.200}"


def _form(one: Manifest) -> str:
    return f"one {one.suffix} file" if one.single_file else f"a folder of {one.suffix} files"


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they come back from a file: tuples as lists, keys as text."""
    plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(settings, str_keys=True)))
    return plain


class MediaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures and recordings that were written together.

    folder: below the job's media folder, with `/` at the end.
    sha256: over their names and contents, in the order of names.
    """

    folder: str
    files: int
    size_bytes: int
    sha256: str


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A committed part.

    place:        of its first row.
    rows:         how many rows it answers for, error rows among them.
    error_places: of its error rows, rising.
    file:         its data, a name in the job's folder.
    errors_file:  its error rows, a name in the job's state folder; '' when it has none.
    media:        one entry for each revision that has any.
    after:        where the source stands after its last row.
    tally:        how the steps fared in it, as Tally.to_json gives it.
    seconds:      how long it took, all its revisions together.
    revision:     how often its error rows were run again.
    """

    version: int = VERSION
    part: int
    place: int
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
    """Written when everything is there.

    records: digest of the records that it was made from.
    files:   size by name of what was put together at the end.
    """

    version: int = VERSION
    records: str
    parts: int
    rows: int
    errors: int
    files: dict[str, int]


def digest(records: Iterable[PartRecord]) -> str:
    """Return what changes when any record does."""
    sha256 = hashlib.sha256()
    for one in records:
        sha256.update(f"{one.part} {one.revision} {one.sha256} {one.errors_sha256}\n".encode())
    return sha256.hexdigest()


def gaps(records: Mapping[int, PartRecord]) -> list[str]:
    """Return what does not fit together in the records by the part of their names, as sentences."""
    problems = []
    for part in range(max(records, default=-1) + 1):
        one, before = records.get(part), records.get(part - 1)
        if one is None:
            problems.append(f"the record of part {part} is missing, and later ones are there")
        elif one.part != part:
            problems.append(f"the record of part {part} is that of part {one.part}")
        elif one.place != (before.place + before.rows if before is not None else 0) and (before or part == 0):
            problems.append(
                f"the record of part {part} begins at row {one.place}, which the part before does not reach"
            )
    return problems


def in_order(records: Mapping[int, PartRecord]) -> Sequence[PartRecord]:
    return [records[part] for part in sorted(records)]


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that has no outputs.

    place, id: of the row, as in `rows`.
    step, error, reason: as in `rows.RowError`.
    part:      the part it belongs to.
    """

    place: int
    id: str
    step: str
    error: str
    reason: str
    part: int


def encode_rows(rows: Iterable[ErrorRow]) -> bytes:
    """Return error rows as lines, in the order of their places."""
    return b"".join(encode(row) for row in sorted(rows, key=lambda row: row.place))


def read_rows(file: BinaryIO) -> Iterator[ErrorRow]:
    """Yield the error rows of a file; Unreadable names the line."""
    for number, line in enumerate(file, 1):
        try:
            yield decode(line, ErrorRow)
        except Unreadable as error:
            raise Unreadable(f"line {number}: {error}") from None


T = TypeVar("T")


class Unreadable(ValueError):
    """A document is torn, or holds something else; says what was found."""


def encode(value: Any) -> bytes:
    """Return a value of plain data or a msgspec struct as one line of JSON; a lone surrogate stands as its escape."""
    written = json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=False, allow_nan=False)
    return written.encode("utf-8", "backslashreplace") + b"\n"


def decode(data: bytes, type: type[T]) -> T:
    """Return what `encode` wrote; Unreadable when it is not whole or not of that type."""
    try:
        return msgspec.convert(json.loads(data), type)
    except msgspec.ValidationError as error:
        raise Unreadable(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable("it is not whole" if data.strip() else "it is empty") from error
