"""Result store: exactly-once commits of parts.

    with Store.open("out", manifest) as store:
        for part in range(store.next_part, parts):
            store.commit(part, first_row, rows, table.write, errors=[...], after=..., tally=..., seconds=...)
        store.finish()

After OutputFailed a store writes nothing more, and the next `open` resumes from the committed parts. `layout` defines
the names and the order of writes. One thread commits.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import msgspec

from weftline.engine.jobs.output.files import Files, Write, Written, as_output_failed, put, put_bytes
from weftline.engine.jobs.output.folder import (
    Join,
    OpenedResults,
    ResultFolder,
    find,
    finish_results,
    is_finished,
    open_results,
    result_names,
)
from weftline.engine.jobs.output.layout import staged
from weftline.engine.jobs.output.manifest import (
    ErrorRow,
    Manifest,
    MediaRecord,
    PartRecord,
    Unreadable,
    encode,
    encode_rows,
    read_rows,
)
from weftline.errors import JobChanged, OutputFailed


class Store:
    """Results of a job. Holds the lock until it is closed.

    warnings: tolerated differences from the job's start, one sentence each.
    """

    def __init__(self, folder: ResultFolder, opened: OpenedResults) -> None:
        self._folder, self._files, self._layout = folder, folder.files, folder.layout
        self._lock, self._records = opened.lock, opened.records
        self._failed = self._closed = False
        self.manifest, self.warnings = opened.manifest, opened.warnings

    @classmethod
    def open(
        cls,
        out: str,
        manifest: Manifest,
        *,
        single_file: bool = False,
        suffix: str = ".parquet",
        restart: bool = False,
        storage: Mapping[str, str] | None = None,
        extras: Sequence[str] = (),
    ) -> Store:
        """Begin a job, or resume the one in `out`.

        single_file: `out` is a file, written at the end; parts and state are in `OUT.job/` beside it.
        suffix:      suffix of part files, with its dot.
        restart:     remove the files of an earlier job, and nothing else, and begin anew.
        storage:     fsspec options, if `out` is a URL.
        extras:      names of files that `finish` may write beside the parts.

        JobChanged lists what changed since the job began, or damaged results; InputError: there are foreign files;
        OutputFailed: another run is writing there, or the disk fails.
        """
        return cls.open_at(find(out, single_file, suffix, storage or {}), manifest, restart, extras)

    @classmethod
    def open_at(
        cls, folder: ResultFolder, manifest: Manifest, restart: bool = False, extras: Sequence[str] = ()
    ) -> Store:
        """Open a located result folder; see `open`."""
        layout = folder.layout
        form = {"suffix": layout.suffix, "single_file": bool(layout.final), "extras": tuple(extras)}
        return cls(folder, open_results(folder, msgspec.structs.replace(manifest, **form), restart))

    @property
    def records(self) -> tuple[PartRecord, ...]:
        return tuple(self._records)

    @property
    def next_part(self) -> int:
        return len(self._records)

    @property
    def rows(self) -> int:
        """Number of committed rows, and number of the next row."""
        return self._records[-1].row_number + self._records[-1].rows if self._records else 0

    @property
    def errors(self) -> int:
        """Number of committed error rows."""
        return sum(len(one.error_places) for one in self._records)

    @property
    def after(self) -> Mapping[str, Any] | None:
        """Resume point at or before the next row; None without rows."""
        return self._records[-1].after if self._records else None

    @property
    def finished(self) -> bool:
        """True if the job is complete, including the files written at the end."""
        with as_output_failed(self._folder.out, "could not be read", self.rows):
            return is_finished(self._folder, self._records)

    def open_part(self, part: int) -> BinaryIO:
        """Open a part's data for reading."""
        return self._files.open(self._layout.work + self._records[part].file)

    def error_rows(self) -> list[ErrorRow]:
        """Return the error rows of all parts, in order."""
        return list(self._error_rows())

    def begin(self, part: int | None = None) -> Draft:
        """Return a draft for the media of the next part, or of a committed part's next revision.

        Pass it to `commit` or `amend`. A new draft of a part removes the files of an earlier one.
        """
        part = self.next_part if part is None else part
        revision = self._records[part].revision + 1 if part < len(self._records) else 0
        base = self._layout.media_base(part, revision)
        with self._writing(f"part {part}"):
            return Draft(self._files, self._folder.out, part, revision, self._layout.media + base, base)

    def commit(
        self,
        part: int,
        row_number: int,
        rows: int,
        write: Write,
        errors: Sequence[ErrorRow] = (),
        media: Draft | Mapping[str, bytes] | Iterable[tuple[str, bytes]] = (),
        after: Mapping[str, Any] | None = None,
        tally: Mapping[str, Any] | None = None,
        seconds: float = 0.0,
    ) -> PartRecord:
        """Write the next part; it is durable on return. OutputFailed if it cannot be written.

        row_number: number of the first row.
        rows:       number of rows, error rows included.
        write:      writes the data.
        media:      a draft, or file contents by name.
        after:      resume point at or before the next row.
        """
        if part != self.next_part or row_number != self.rows:
            raise ValueError(
                f"part {part} from row {row_number}; the next one is {self.next_part} from row {self.rows}"
            )
        with self._writing(f"part {part}"):
            draft = self._drafted(part, media)
            record = PartRecord(
                part=part, row_number=row_number, rows=rows, file=self._layout.data_base(part), size_bytes=0, sha256="",
                after=dict(after or {}), tally=dict(tally or {}), seconds=seconds,
            )  # fmt: skip
            record = self._with_errors(record, errors, 0)
            record = msgspec.structs.replace(record, media=draft.settle() if draft else ())
            record = _holding(record, put(self._files, self._layout.work + record.file, write))
            self._put_record(record)
            self._records.append(record)
        return record

    def amend(
        self,
        part: int,
        write: Write,
        errors: Sequence[ErrorRow] = (),
        media: Draft | Mapping[str, bytes] | Iterable[tuple[str, bytes]] = (),
        tally: Mapping[str, Any] | None = None,
        seconds: float = 0.0,
    ) -> PartRecord:
        """Replace a committed part by its next revision, with all of its rows and remaining error rows.

        media:   of this revision only; media of earlier revisions stay.
        tally:   of all revisions; None: unchanged.
        seconds: of this revision only.
        The job is unfinished until `finish` is called again.
        """
        old = self._records[part]
        with self._writing(f"part {part}"):
            self._files.remove(self._layout.done)
            self._files.sync_names(self._layout.state)
            draft = self._drafted(part, media)
            record = self._with_errors(old, errors, old.revision + 1)
            record = msgspec.structs.replace(
                record,
                revision=old.revision + 1,
                media=(*old.media, *(draft.settle() if draft else ())),
                tally=dict(old.tally if tally is None else tally),
                seconds=old.seconds + seconds,
            )
            name = self._layout.work + record.file
            record = _holding(record, put(self._files, staged(name), write))
            self._put_record(record)
            self._records[part] = record
            self._files.move(staged(name), name)
            if old.errors_file:
                self._files.remove(self._layout.state + old.errors_file)
        return record

    def finish(self, join: Join | None = None, extras: Mapping[str, bytes] | None = None) -> Mapping[str, str]:
        """Write the final files and return the names of `results`, `manifest`, `errors` and `media`.

        join:   writes the single file; not called if the results are a folder.
        extras: contents of further files beside the parts, by name; `open` received the names.
        A finished job is not written again.
        """
        if unknown := set(extras or ()) - set(self.manifest.extras):
            raise ValueError(f"{', '.join(sorted(unknown))}: not named when the job was opened")
        if not self.finished:
            with self._writing("the final files"):
                finish_results(self._folder, self._records, self._lock, join, extras or {})
        return result_names(self._folder, self._records)

    def close(self) -> None:
        """Release the lock. Safe to call twice."""
        self._closed = True
        self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Disable the store after any failed write: only `open` can determine the state on disk."""
        if self._closed:
            raise ValueError("the store is closed")
        if self._failed:
            raise OutputFailed(f"{self._folder.out}: an earlier write failed; run the same command again")
        try:
            with as_output_failed(self._folder.out, f"{what} could not be written", self.rows):
                yield
        except BaseException:
            self._failed = True
            raise

    def _drafted(self, part: int, media: Draft | Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> Draft | None:
        if isinstance(media, Draft):
            if media.part != part or media.failed:
                raise ValueError(f"the draft is of part {media.part}, or a file of it could not be written")
            return media
        draft = None
        for name, data in media.items() if isinstance(media, Mapping) else media:
            draft = draft or self.begin(part)
            draft.add(name, data)
        return draft

    def _with_errors(self, record: PartRecord, errors: Sequence[ErrorRow], revision: int) -> PartRecord:
        row_numbers = tuple(sorted(row.row_number for row in errors))
        if len(set(row_numbers)) < len(row_numbers) or any(
            not 0 <= one - record.row_number < record.rows for one in row_numbers
        ):
            raise ValueError(
                f"error rows {row_numbers} in part {record.part}, rows {record.row_number} + {record.rows}"
            )
        base = sha256 = ""
        if errors:
            base = self._layout.errors_base(record.part, revision)
            sha256 = put_bytes(self._files, self._layout.state + base, encode_rows(errors)).sha256
        return msgspec.structs.replace(record, error_places=row_numbers, errors_file=base, errors_sha256=sha256)

    def _put_record(self, record: PartRecord) -> None:
        self._lock.check()
        put_bytes(self._files, self._layout.record(record.part), encode(record))

    def _error_rows(self) -> Iterator[ErrorRow]:
        for one in self._records:
            if one.errors_file:
                name = self._layout.state + one.errors_file
                try:
                    with self._files.open(name) as file:
                        yield from read_rows(file)
                except Unreadable as error:
                    raise JobChanged(f"{self._folder.shown(name)}: {error}") from None


def _holding(record: PartRecord, written: Written) -> PartRecord:
    return msgspec.structs.replace(record, size_bytes=written.size_bytes, sha256=written.sha256)


class Draft:
    """Media files of one uncommitted revision of a part. Thread-safe.

    failed: a file could not be written, so the part cannot be committed.
    folder: folder of the files, relative to the result folder: prefix of their paths in the table.
    """

    def __init__(self, files: Files, out: str, part: int, revision: int, folder: str, base: str) -> None:
        self.part, self.revision, self.folder = part, revision, folder
        self._files, self._out, self._base = files, out, base
        self.failed = False
        self._lock = threading.Lock()
        self._written: dict[str, tuple[int, str]] = {}
        files.remove_folder(folder)

    def add(self, name: str, data: bytes) -> str:
        """Write or replace a file and return its path relative to the result folder; OutputFailed if that fails."""
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is no name of a media file")
        try:
            with as_output_failed(self._out, f"part {self.part} could not be written"):
                written = put_bytes(self._files, self.folder + name, data, sync_name=False)
        except BaseException:
            self.failed = True
            raise
        with self._lock:
            self._written[name] = (written.size_bytes, written.sha256)
        return self.folder + name

    def settle(self) -> tuple[MediaRecord, ...]:
        """Make all files durable and return their record; empty without files."""
        with self._lock:
            written = sorted(self._written.items())
        if not written:
            return ()
        self._files.sync_names(self.folder)
        sha256 = hashlib.sha256()
        for name, (_, content) in written:
            sha256.update(f"{name} {content}\n".encode())
        size_bytes = sum(size for _, (size, _) in written)
        one = MediaRecord(folder=self._base, files=len(written), size_bytes=size_bytes, sha256=sha256.hexdigest())
        return (one,)
