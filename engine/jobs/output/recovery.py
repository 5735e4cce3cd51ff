"""Recovery plan after an interrupted run: from the files found to the actions; pure.

A part is committed in this order, each step on disk before the next:

    errors-N.jsonl, _media/part-N/*, part-N.parquet, part-N.json

so whatever lies there without a record is of a part that does not exist, and is removed. A part's next revision goes

    errors-N.r1.jsonl, _media/part-N.r1/*, .part-N.parquet.new, part-N.json (which now names the new data),
    .part-N.parquet.new -> part-N.parquet, then the old errors are removed

The record decides. Stopped before it, what is staged is of a revision that does not exist, and is removed; stopped
after it, what is staged is what the record names, and takes its place. Readers of `part-*.parquet` see the old revision
or the new, whole, and never both. On an object store "on disk" means that the object is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weftline.engine.jobs.output import naming
from weftline.engine.jobs.output.files import Written
from weftline.engine.jobs.output.naming import ResultLayout
from weftline.engine.jobs.output.records import PartRecord


@dataclass(frozen=True, slots=True)
class ResultNames:
    """Names in the job's folder, in its state folder, and in its media folder."""

    work: Sequence[str]
    state: Sequence[str]
    media: Sequence[str]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What an earlier run left that belongs to no part.

    files, folders: names to remove, relative to the results' folder.
    """

    files: Sequence[str]
    folders: Sequence[str]


def staged_files(found: ResultNames) -> dict[str, str]:
    """Return the data files whose next revision is staged, with its name."""
    return {of: base for base in found.work if (of := naming.staged_of(base))}


def leftovers(layout: ResultLayout, found: ResultNames, records: Iterable[PartRecord]) -> Leftovers:
    """Return what belongs to no record; staged revisions are not looked at."""
    records = list(records)
    kept = {one.file for one in records}
    errors = {one.errors_file for one in records}
    media = {each.folder for one in records for each in one.media}
    files = [layout.work + base for base in found.work if naming.is_data(base, layout.suffix) and base not in kept]
    files += [layout.work + base for base in found.work if naming.is_being_written(base)]
    files += [layout.state + base for base in found.state if naming.is_errors(base) and base not in errors]
    files += [layout.state + base for base in found.state if naming.is_being_written(base)]
    folders = [layout.media + base for base in found.media if naming.is_media_folder(base) and base not in media]
    return Leftovers(files, folders)


def everything(layout: ResultLayout, found: ResultNames, extras: Iterable[str]) -> Leftovers:
    """Return all that a job wrote but its manifest, its lock and the note that it is being thrown away."""
    ours = {"_errors.jsonl", *extras}
    files = [layout.final] if layout.final else []
    files += [
        layout.work + base
        for base in found.work
        if base in ours or naming.is_data(base) or naming.staged_of(base) or naming.is_being_written(base)
    ]
    files += [
        layout.state + base
        for base in found.state
        if base == "done.json" or naming.part_of_record(base) is not None or naming.is_errors(base)
        or naming.is_being_written(base)
    ]  # fmt: skip
    return Leftovers(files, [layout.media + base for base in found.media if naming.is_media_folder(base)])


def foreign(found: ResultNames) -> list[str]:
    """Return the names that stand in the way of a new job, hidden ones aside; its own first steps do not."""
    state = [base for base in found.state if base not in ("lock", naming.OWNER) and not naming.is_being_written(base)]
    strangers = [base for base in found.work if base != naming.STATE and not base.startswith(".")]
    return [*strangers, *(naming.STATE + base for base in state)]


def damage(record: PartRecord, size_bytes: int | None, content: Written | None) -> str:
    """Return what is wrong with a part's data, as a phrase; '' when it is what the record says.

    size_bytes: of the file; None when it is missing.
    content:    what was read of it; None when it was not read.
    """
    if size_bytes is None:
        return f"{record.file} is missing"
    if size_bytes != record.size_bytes:
        return f"{record.file} has {size_bytes} bytes, and {record.size_bytes} were written"
    if content is not None and content.sha256 != record.sha256:
        return f"{record.file} does not hold what was written"
    return ""


def by_part(names: Iterable[str]) -> Mapping[int, str]:
    """Return the records among the names, by part."""
    return {part: base for base in names if (part := naming.part_of_record(base)) is not None}
