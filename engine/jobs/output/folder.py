"""Result folder of a job: locate, create, resume, restart and finish.

A restart is recorded on disk first, in `_weftline/restart`. From then on, any run that opens the folder removes the old
job's files, replaces the manifest, and removes the marker last.

`done.json` is written last. It holds a digest of the commit records, so that it does not match after a part is amended.
"""

from __future__ import annotations

import posixpath
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from weftline.engine.jobs.output.files import (
    CHUNK_BYTES,
    Files,
    Lock,
    LockHeld,
    Written,
    as_output_failed,
    measure,
    put,
    put_bytes,
    read,
)
from weftline.engine.jobs.output.layout import (
    Leftovers,
    ResultLayout,
    ResultNames,
    by_part,
    damage,
    everything,
    foreign,
    leftovers,
    staged_files,
)
from weftline.engine.jobs.output.local_files import LocalFiles
from weftline.engine.jobs.output.manifest import (
    VERSION,
    Done,
    Manifest,
    PartRecord,
    Unreadable,
    decode,
    differences,
    digest,
    encode,
    gaps,
    in_order,
    version_differences,
)
from weftline.engine.jobs.output.remote_files import RemoteFiles
from weftline.engine.jobs.sources.formats import shown_url
from weftline.errors import InputError, JobChanged, MissingPackage, OutputFailed

LOCAL = ("file", "local")


@dataclass(frozen=True, slots=True)
class ResultFolder:
    """Result folder, its layout, and its name as the user wrote it.

    out:    the --out argument, without a password.
    folder: the folder that contains the results, likewise.
    """

    out: str
    folder: str
    files: Files
    layout: ResultLayout

    def shown(self, name: str) -> str:
        """Return a name as the user would write it."""
        return posixpath.join(self.folder, name).rstrip("/") if self.folder else name.rstrip("/")


def find(out: str, single_file: bool, suffix: str, storage: Mapping[str, str]) -> ResultFolder:
    """Return the result folder of `out`; InputError if it is no writable location."""
    written = shown_url(out)
    protocol, _, path = out.rpartition("://")
    folder, final = posixpath.split(out) if single_file else (out, "")
    if single_file and not final:
        raise InputError(f"--out {written}: names no file")
    folder += "//" if folder.endswith(":") else ""
    layout = ResultLayout(f"{final}.job/", final, suffix) if single_file else ResultLayout("", "", suffix)
    if protocol and protocol not in LOCAL:
        return ResultFolder(written, shown_url(folder), _remote(written, folder, storage), layout)
    try:
        root = Path(posixpath.dirname(path) if single_file else path).expanduser()
    except RuntimeError:
        raise InputError(f"--out {written}: there is no home folder of this name") from None
    _check_kinds(out, root, root / final if final else None)
    return ResultFolder(out, folder, LocalFiles(root), layout)


def _check_kinds(out: str, root: Path, final: Path | None) -> None:
    if root.is_file():
        raise InputError(
            f"--out {out}: {root.name} is a file; results go to a folder, or to a file with a known suffix"
        )
    if final is not None and final.is_dir():
        raise InputError(f"--out {out}: {final.name} is a folder, and one file is to be written there")


def _remote(out: str, folder: str, storage: Mapping[str, str]) -> RemoteFiles:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingPackage("fsspec", "batch") from None
    try:
        system, root = url_to_fs(folder, **storage)
    except (ImportError, ValueError, TypeError, OSError) as error:  # of the address, its package, or its options
        raise InputError(shown_url(f"--out {out}: {error}")) from None
    return RemoteFiles(system, root)


READ_AGAIN_BYTES_MAX = 4 << 30
"""Largest total size of parts that are verified on resume; beyond it only the last part is."""

PROBLEMS_MAX = 10


@dataclass(frozen=True, slots=True)
class OpenedResults:
    """Opened results. manifest: as stored; warnings: tolerated differences."""

    manifest: Manifest
    records: list[PartRecord]
    lock: Lock
    warnings: tuple[str, ...]


def open_results(folder: ResultFolder, manifest: Manifest, restart: bool) -> OpenedResults:
    """Create or resume a result folder and return its state, locked.

    JobChanged if it holds another job's results, or damaged ones; InputError if it holds foreign files; OutputFailed if
    another run writes there, or the disk fails.
    """
    files, layout = folder.files, folder.layout
    with as_output_failed(folder.out, "could not be opened"):
        found = _look(files, layout)
        if not _begun(files, layout):
            _refuse_foreign(folder, found)
        try:
            lock = files.lock(layout.state)
        except LockHeld as holder:
            raise OutputFailed(
                f"{folder.out}: another run of this job is writing here ({holder})\n    fix: wait for it, or end it"
            ) from None
        try:
            if not _begun(files, layout):
                _refuse_foreign(folder, _look(files, layout))
                put_bytes(files, layout.manifest, encode(manifest))
            elif restart or files.size(layout.restart) is not None:
                _begin_anew(files, layout, manifest)
            else:
                return _resume(folder, manifest, lock)
            return OpenedResults(manifest, [], lock, ())
        except BaseException:
            lock.release()
            raise


def _begun(files: Files, layout: ResultLayout) -> bool:
    return files.size(layout.manifest) is not None or files.size(layout.restart) is not None


def _look(files: Files, layout: ResultLayout) -> ResultNames:
    return ResultNames(files.entries(layout.work), files.entries(layout.state), files.entries(layout.media))


def _refuse_final(folder: ResultFolder) -> None:
    if folder.layout.final and folder.files.size(folder.layout.final) is not None:
        raise InputError(
            f"{folder.out}: is there already, and no job in {folder.shown(folder.layout.work)} wrote it\n"
            "    fix: remove it, or write elsewhere"
        )


def _refuse_foreign(folder: ResultFolder, found: ResultNames) -> None:
    _refuse_final(folder)
    if strangers := foreign(found):
        shown = ", ".join(strangers[:3]) + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else "")
        raise InputError(
            f"{folder.shown(folder.layout.work) or folder.out}: holds {shown}, and no manifest of a job\n"
            "    fix: name an empty folder, or one that is not there yet; --restart removes only what a job wrote"
        )


def _begin_anew(files: Files, layout: ResultLayout, manifest: Manifest) -> None:
    try:
        old = decode(read(files, layout.manifest), Manifest).extras
    except (Unreadable, FileNotFoundError):
        old = ()
    put_bytes(files, layout.restart, b"")
    _remove(files, everything(layout, _look(files, layout), (*old, *manifest.extras)))
    for name in (layout.work, layout.state):
        files.sync_names(name)
    if layout.final:
        files.sync_names("")
    put_bytes(files, layout.manifest, encode(manifest))
    files.remove(layout.restart)
    files.sync_names(layout.state)


def _resume(folder: ResultFolder, manifest: Manifest, lock: Lock) -> OpenedResults:
    files, layout = folder.files, folder.layout
    try:
        old = decode(read(files, layout.manifest), Manifest)
        if old.version > VERSION:
            raise Unreadable("it was written by a newer Weftline")
    except Unreadable as error:
        raise _changed(folder, [f"its manifest cannot be used: {error}"]) from None
    found = _look(files, layout)
    if changes := differences(old, manifest):
        if by_part(found.state):
            raise _changed(folder, changes, "run the command as it was when the job began")
        _refuse_final(folder)
        _begin_anew(files, layout, manifest)  # no loss: the earlier job has committed nothing
        return OpenedResults(manifest, [], lock, ())
    records = _read_records(folder, found)
    for data, base in staged_files(found).items():
        _settle_staged(files, layout.work + base, layout.work + data, [one for one in records if one.file == data])
    if problems := _damages(files, layout, records):
        raise _changed(folder, problems)
    _remove(files, leftovers(layout, found, records))
    for name in (layout.work, layout.state):
        files.sync_names(name)  # the last run may have ended before its names were durable
    return OpenedResults(old, records, lock, tuple(version_differences(old, manifest)))


def _read_records(folder: ResultFolder, found: ResultNames) -> list[PartRecord]:
    records, problems = {}, []
    for part, base in by_part(found.state).items():
        try:
            records[part] = decode(read(folder.files, folder.layout.state + base), PartRecord)
        except Unreadable as error:
            problems.append(f"the record of part {part} cannot be read: {error}")
    if problems := problems or gaps(records):
        raise _changed(folder, problems)
    return list(in_order(records))


def _settle_staged(files: Files, name: str, to: str, records: Sequence[PartRecord]) -> None:
    """Publish a staged revision if its record exists; otherwise remove it."""
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
    folder: ResultFolder, problems: Sequence[str], remedy: str = "put its files back as they were"
) -> JobChanged:
    shown = [f"    {one}" for one in problems[:PROBLEMS_MAX]]
    more = [f"    and {len(problems) - PROBLEMS_MAX} more"] if len(problems) > PROBLEMS_MAX else []
    where = folder.shown(folder.layout.work) or folder.out
    return JobChanged(
        "\n".join([
            f"{where}: holds the results of a job that cannot go on:", *shown, *more,
            f"    fix: {remedy}; --restart begins anew and removes its results",
        ])
    )  # fmt: skip


Opener = Callable[[], BinaryIO]
Join = Callable[[Sequence[Opener], BinaryIO], None]
"""Concatenates parts, in order, into one file."""


def is_finished(folder: ResultFolder, records: Sequence[PartRecord]) -> bool:
    """Return True if all files of the completion marker exist and match these records."""
    if folder.files.size(folder.layout.done) is None:
        return False
    try:
        done = decode(read(folder.files, folder.layout.done), Done)
    except Unreadable:
        return False
    whole = done.records == digest(records)
    return whole and all(folder.files.size(name) == size for name, size in done.files.items())


def finish_results(
    folder: ResultFolder, records: Sequence[PartRecord], lock: Lock, join: Join | None, extras: Mapping[str, bytes]
) -> None:
    """Write the error rows, the single file, the extras, and the completion marker."""
    files, layout = folder.files, folder.layout
    made = {}
    errors = sum(len(one.error_places) for one in records)
    if errors:
        made[layout.errors] = put(files, layout.errors, lambda out: _join_errors(folder, records, out)).size_bytes
    else:
        files.remove(layout.errors)
    if layout.final:
        if join is None:
            raise ValueError("a single file requires a join function")
        openers = [_opener(folder, one) for one in records]
        made[layout.final] = put(files, layout.final, lambda out: join(openers, out)).size_bytes
    for name, data in extras.items():
        made[layout.work + name] = put_bytes(files, layout.work + name, data).size_bytes
    files.sync_names(layout.work)
    lock.check()
    rows = sum(one.rows for one in records)
    done = Done(records=digest(records), parts=len(records), rows=rows, errors=errors, files=made)
    put_bytes(files, layout.done, encode(done))


def result_names(folder: ResultFolder, records: Sequence[PartRecord]) -> dict[str, str]:
    """Return the result names of a finished job, as the user would write them."""
    found = {"results": folder.out, "manifest": folder.shown(folder.layout.manifest)}
    if any(one.error_places for one in records):
        found["errors"] = folder.shown(folder.layout.errors)
    if any(one.media for one in records):
        found["media"] = folder.shown(folder.layout.media)
    return found


def _opener(folder: ResultFolder, record: PartRecord) -> Opener:
    return lambda: folder.files.open(folder.layout.work + record.file)


def _join_errors(folder: ResultFolder, records: Sequence[PartRecord], out: BinaryIO) -> None:
    for one in records:
        if one.errors_file:
            with folder.files.open(folder.layout.state + one.errors_file) as part:
                shutil.copyfileobj(part, out, CHUNK_BYTES)
