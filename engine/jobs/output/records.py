"""Commit record of a part, written last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

VERSION = 1


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
