"""Opening of a result folder: create, resume or overwrite.

Beginning anew is decided by a note on disk, `_weftline/restart`. From then on whoever opens the folder first removes
all that the old job wrote; the new manifest takes the old one's place, and the note goes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftline.engine.jobs.output.documents import Unreadable, decode, encode
from weftline.engine.jobs.output.failing import told
from weftline.engine.jobs.output.files import Files, Held, Lock, Written, measure, put_bytes, read
from weftline.engine.jobs.output.manifest import VERSION, Manifest, differences, version_differences
from weftline.engine.jobs.output.naming import ResultLayout
from weftline.engine.jobs.output.place import ResultFolder
from weftline.engine.jobs.output.records import PartRecord, gaps, in_order
from weftline.engine.jobs.output.recovery import (
    Leftovers,
    ResultNames,
    by_part,
    damage,
    everything,
    foreign,
    leftovers,
    staged_files,
)
from weftline.errors import InputError, JobChanged, OutputFailed

READ_AGAIN_BYTES_MAX = 4 << 30
"""Parts are read again when a job is resumed, as long as all together are smaller; else only the newest is."""

PROBLEMS_MAX = 10


@dataclass(frozen=True, slots=True)
class OpenedResults:
    """manifest: as it stands on disk; warnings: what differs and is no reason to refuse."""

    manifest: Manifest
    records: list[PartRecord]
    lock: Lock
    warnings: tuple[str, ...]


def open_place(place: ResultFolder, manifest: Manifest, restart: bool) -> OpenedResults:
    """Return what is there, with the lock held.

    JobChanged when another job's results are there, or these are damaged; InputError when somebody else's files are;
    OutputFailed when another run writes there, or the disk fails.
    """
    files, layout = place.files, place.layout
    with told(place.out, "could not be opened"):
        found = _look(files, layout)
        if not _begun(files, layout):
            _refuse_foreign(place, found)
        try:
            lock = files.lock(layout.state)
        except Held as holder:
            raise OutputFailed(
                f"{place.out}: another run of this job is writing here ({holder})\n    fix: wait for it, or end it"
            ) from None
        try:
            if not _begun(files, layout):
                _refuse_foreign(place, _look(files, layout))
                put_bytes(files, layout.manifest, encode(manifest))
            elif restart or files.size(layout.restart) is not None:
                _begin_anew(files, layout, manifest)
            else:
                return _resume(place, manifest, lock)
            return OpenedResults(manifest, [], lock, ())
        except BaseException:
            lock.release()
            raise


def _begun(files: Files, layout: ResultLayout) -> bool:
    return files.size(layout.manifest) is not None or files.size(layout.restart) is not None


def _look(files: Files, layout: ResultLayout) -> ResultNames:
    return ResultNames(files.entries(layout.work), files.entries(layout.state), files.entries(layout.media))


def _refuse_final(place: ResultFolder) -> None:
    if place.layout.final and place.files.size(place.layout.final) is not None:
        raise InputError(
            f"{place.out}: is there already, and no job in {place.shown(place.layout.work)} wrote it\n"
            "    fix: remove it, or write elsewhere"
        )


def _refuse_foreign(place: ResultFolder, found: ResultNames) -> None:
    _refuse_final(place)
    if strangers := foreign(found):
        shown = ", ".join(strangers[:3]) + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else "")
        raise InputError(
            f"{place.shown(place.layout.work) or place.out}: holds {shown}, and no manifest of a job\n"
            "    fix: name an empty folder, or one that is not there yet; --restart removes only what a job wrote"
        )


def _begin_anew(files: Files, layout: ResultLayout, manifest: Manifest) -> None:
    try:
        old = decode(read(files, layout.manifest), Manifest).extras
    except (Unreadable, FileNotFoundError):
        old = ()
    put_bytes(files, layout.restart, b"")
    _remove(files, everything(layout, _look(files, layout), (*old, *manifest.extras)))
    for folder in (layout.work, layout.state):
        files.settle(folder)
    if layout.final:
        files.settle("")
    put_bytes(files, layout.manifest, encode(manifest))
    files.remove(layout.restart)
    files.settle(layout.state)


def _resume(place: ResultFolder, manifest: Manifest, lock: Lock) -> OpenedResults:
    files, layout = place.files, place.layout
    try:
        old = decode(read(files, layout.manifest), Manifest)
        if old.version > VERSION:
            raise Unreadable("it was written by a newer Weftline")
    except Unreadable as error:
        raise _changed(place, [f"its manifest cannot be used: {error}"]) from None
    found = _look(files, layout)
    if changes := differences(old, manifest):
        if by_part(found.state):
            raise _changed(place, changes, "run the command as it was when the job began")
        _refuse_final(place)
        _begin_anew(files, layout, manifest)  # nothing is lost: the job that began here has committed nothing
        return OpenedResults(manifest, [], lock, ())
    records = _read_records(place, found)
    for data, base in staged_files(found).items():
        _settle_staged(files, layout.work + base, layout.work + data, [one for one in records if one.file == data])
    if problems := _damages(files, layout, records):
        raise _changed(place, problems)
    _remove(files, leftovers(layout, found, records))
    for folder in (layout.work, layout.state):
        files.settle(folder)  # what was seen is now on disk, should the last run have ended before it had settled
    return OpenedResults(old, records, lock, tuple(version_differences(old, manifest)))


def _read_records(place: ResultFolder, found: ResultNames) -> list[PartRecord]:
    records, problems = {}, []
    for part, base in by_part(found.state).items():
        try:
            records[part] = decode(read(place.files, place.layout.state + base), PartRecord)
        except Unreadable as error:
            problems.append(f"the record of part {part} cannot be read: {error}")
    if problems := problems or gaps(records):
        raise _changed(place, problems)
    return list(in_order(records))


def _settle_staged(files: Files, name: str, to: str, records: Sequence[PartRecord]) -> None:
    """Let a staged revision take its place if its record is there; else it does not exist."""
    if records and measure(files, name).sha256 == records[0].sha256:
        files.move(name, to)
    else:
        files.remove(name)


def _damages(files: Files, layout: ResultLayout, records: Sequence[PartRecord]) -> list[str]:
    read_all = files.reads_cheap and sum(one.size_bytes for one in records) <= READ_AGAIN_BYTES_MAX
    problems = []
    for one in records:
        name = layout.work + one.file
        size_bytes, content = files.size(name), None
        if size_bytes == one.size_bytes and (read_all or one is records[-1]):
            content = measure(files, name)
        problems.append(damage(one, size_bytes, content))
        problems.append(_damaged_errors(files, layout, one))
    return [one for one in problems if one]


def _damaged_errors(files: Files, layout: ResultLayout, record: PartRecord) -> str:
    if not record.errors_file:
        return ""
    name = layout.state + record.errors_file
    content: Written | None = measure(files, name) if files.size(name) is not None else None
    if content is None:
        return f"{name} is missing"
    return "" if content.sha256 == record.errors_sha256 else f"{name} does not hold what was written"


def _remove(files: Files, what: Leftovers) -> None:
    for name in what.files:
        files.remove(name)
    for name in what.folders:
        files.remove_folder(name)


def _changed(
    place: ResultFolder, problems: Sequence[str], remedy: str = "put its files back as they were"
) -> JobChanged:
    shown = [f"    {one}" for one in problems[:PROBLEMS_MAX]]
    more = [f"    and {len(problems) - PROBLEMS_MAX} more"] if len(problems) > PROBLEMS_MAX else []
    where = place.shown(place.layout.work) or place.out
    return JobChanged(
        "\n".join([
            f"{where}: holds the results of a job that cannot go on:", *shown, *more,
            f"    fix: {remedy}; --restart begins anew and removes its results",
        ])
    )  # fmt: skip
