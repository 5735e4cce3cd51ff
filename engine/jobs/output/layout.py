"""Names, formats and recovery plan of a job's results; pure.

    OUT/                          or x.parquet.job/ beside a single file x.parquet
      part-00000.parquet          rows of a part
      .part-00000.parquet.new     its next revision, until its record is written
      _errors.jsonl               error rows of all parts
      .huggingface.yaml           dataset card: names the parts for `datasets.load_dataset`
      _media/part-00000/          images and audio of a part; part-00000.r1/ of revision 1
      _weftline/manifest.json     the job's manifest
      _weftline/part-00000.json   commit record of a part; a part without it does not exist
      _weftline/errors-00000.jsonl  error rows of a part; errors-00000.r1.jsonl of revision 1
      _weftline/restart           marker: the old job's files are being removed
      _weftline/done.json         completion marker
      _weftline/lock              lock of the writing run

While a file is written it is called `.NAME.tmp`. Names are relative, with `/` between folders, and folders end in `/`.
Everything but tables begins with `_` or a dot, so that readers of the folder as a data set skip it.

A part is committed in this order, each step durable before the next:

    errors-N.jsonl, _media/part-N/*, part-N.parquet, part-N.json

Files without a record belong to no part and are removed. The next revision of a part is written in this order:

    errors-N.r1.jsonl, _media/part-N.r1/*, .part-N.parquet.new, part-N.json (now with the new digest),
    .part-N.parquet.new -> part-N.parquet, then the old errors are removed

The record decides. If the run stopped before it, the staged file is removed; if it stopped after it, the staged file
replaces the part. Readers of `part-*.parquet` see the old or the new revision, complete, and never both. In an object
store "durable" means that the object exists.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weftline.engine.jobs.output.files import Written
from weftline.engine.jobs.output.manifest import PartRecord
from weftline.errors import InputError

STATE = "_weftline/"
MEDIA = "_media/"
OWNER = "owner.json"

_DATA = re.compile(r"part-(\d{5,})(\.[A-Za-z0-9.]+)")
_RECORD = re.compile(r"part-(\d{5,})\.json")
_ERRORS = re.compile(r"errors-\d{5,}(\.r\d+)?\.jsonl")
_MEDIA = re.compile(r"part-\d{5,}(\.r\d+)?/")
_BEING_WRITTEN = re.compile(r"\..+\.tmp")
_STAGED = re.compile(r"\.(part-\d{5,}\.[A-Za-z0-9.]+)\.new")

FORMATS = ("parquet", "jsonl", "arrow", "hf")

BY_SUFFIX = {
    ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".arrow": "arrow",
    ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip
"""Suffixes of a single file."""

SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl", "arrow": ".arrow", "hf": ".arrow"}
"""Suffixes of parts."""

CARD = ".huggingface.yaml"
"""Dataset card beside the parts: see dataset_card."""

EXTRAS = {"hf": ("dataset_info.json", "state.json"), "parquet": (CARD,), "jsonl": (CARD,), "arrow": (CARD,)}
"""Metadata files beside the parts of a format, written at the end."""

_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,9}")
_HINTS = {
    ".csv": "CSV has no lists and no detections: write x.jsonl or x.parquet, both of which pandas reads",
    ".tsv": "TSV has no lists and no detections: write x.jsonl or x.parquet, both of which pandas reads",
    ".json": "results are one object per line: write x.jsonl",
    ".gz": "results are not compressed as a whole: write x.parquet, which is compressed inside",
    ".zst": "results are not compressed as a whole: write x.parquet, which is compressed inside",
}


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Paths of a job's files, relative to the result folder.

    work:   folder of parts and state; '' for the result folder itself.
    final:  single file written at the end; '' if the results are a folder.
    suffix: suffix of part files, with its dot.
    """

    work: str = ""
    final: str = ""
    suffix: str = ".parquet"

    @property
    def state(self) -> str:
        return self.work + STATE

    @property
    def manifest(self) -> str:
        return self.state + "manifest.json"

    @property
    def done(self) -> str:
        return self.state + "done.json"

    @property
    def restart(self) -> str:
        return self.state + "restart"

    @property
    def errors(self) -> str:
        return self.work + "_errors.jsonl"

    @property
    def media(self) -> str:
        return self.work + MEDIA

    def data_base(self, part: int) -> str:
        return f"part-{part:05d}{self.suffix}"

    def record(self, part: int) -> str:
        return f"{self.state}part-{part:05d}.json"

    def errors_base(self, part: int, revision: int) -> str:
        return f"errors-{part:05d}{_revision(revision)}.jsonl"

    def media_base(self, part: int, revision: int) -> str:
        return f"part-{part:05d}{_revision(revision)}/"


def _revision(revision: int) -> str:
    return f".r{revision}" if revision else ""


def being_written(name: str) -> str:
    """Return the temporary name of a file while it is written."""
    folder, base = posixpath.split(name)
    return posixpath.join(folder, f".{base}.tmp")


def staged(name: str) -> str:
    """Return the name of a data file's staged next revision."""
    folder, base = posixpath.split(name)
    return posixpath.join(folder, f".{base}.new")


def is_being_written(base: str) -> bool:
    return _BEING_WRITTEN.fullmatch(base) is not None


def staged_of(base: str) -> str:
    """Return the data file of a staged revision; '' for other names."""
    match = _STAGED.fullmatch(base)
    return match[1] if match else ""


def part_of_record(base: str) -> int | None:
    """Return the part number of a record's name; None for other names."""
    match = _RECORD.fullmatch(base)
    return int(match[1]) if match else None


def is_data(base: str, suffix: str | None = None) -> bool:
    """Return True for the data file of a part; of any format without a suffix."""
    match = _DATA.fullmatch(base)
    return match is not None and suffix in (None, match[2])


def is_errors(base: str) -> bool:
    return _ERRORS.fullmatch(base) is not None


def is_media_folder(base: str) -> bool:
    return _MEDIA.fullmatch(base) is not None


def format_of(out: str, format: str | None = None) -> tuple[str, bool]:
    """Return the output format, and True if `out` is a single file.

    A name with a known suffix is a single file of that format. A name without a suffix, or with a trailing `/`, is a
    folder of `format`, or of Parquet. InputError for an unknown suffix, and for one that contradicts `format`.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"output format: found {format!r:.40}, expected one of {', '.join(FORMATS)}")
    path = out.rpartition("://")[2]
    base = posixpath.basename(path)
    ending = posixpath.splitext(base)[1].lower()
    if "://" in out and "/" not in path:
        ending = ""  # a bucket, whose name may have dots
    if not out or out == "-":
        raise InputError(f"--out {out or repr(out)}: results go to a file or a folder that can be resumed")
    if not _SUFFIX.fullmatch(ending):
        return format or "parquet", False
    named = BY_SUFFIX.get(ending)
    if named is None:
        fix = _HINTS.get(ending, f"write {out}/ for a folder, or one of {', '.join(BY_SUFFIX)} for a single file")
        raise InputError(f"--out {out}: {ending} is not a supported output format\n    fix: {fix}")
    if format not in (None, named):
        what = "a folder" if format == "hf" else f"{format}, and {ending} is {named}"
        fix = f"write {out.removesuffix(base) + posixpath.splitext(base)[0]}/, or leave the format out"
        raise InputError(f"--out {out}: the format is {format}, which is {what}\n    fix: {fix}")
    return named, True


@dataclass(frozen=True, slots=True)
class ResultNames:
    """Names in the job's folder, in its state folder, and in its media folder."""

    work: Sequence[str]
    state: Sequence[str]
    media: Sequence[str]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Names to remove, relative to the result folder."""

    files: Sequence[str]
    folders: Sequence[str]


def staged_files(found: ResultNames) -> dict[str, str]:
    """Return the staged names by data file."""
    return {of: base for base in found.work if (of := staged_of(base))}


def leftovers(layout: ResultLayout, found: ResultNames, records: Iterable[PartRecord]) -> Leftovers:
    """Return the names that belong to no record, without staged revisions."""
    records = list(records)
    kept = {one.file for one in records}
    errors = {one.errors_file for one in records}
    media = {each.folder for one in records for each in one.media}
    files = [layout.work + base for base in found.work if is_data(base, layout.suffix) and base not in kept]
    files += [layout.work + base for base in found.work if is_being_written(base)]
    files += [layout.state + base for base in found.state if is_errors(base) and base not in errors]
    files += [layout.state + base for base in found.state if is_being_written(base)]
    folders = [layout.media + base for base in found.media if is_media_folder(base) and base not in media]
    return Leftovers(files, folders)


def everything(layout: ResultLayout, found: ResultNames, extras: Iterable[str]) -> Leftovers:
    """Return all names that a job wrote, except manifest, lock and restart marker."""
    ours = {"_errors.jsonl", *extras}
    files = [layout.final] if layout.final else []
    files += [
        layout.work + base
        for base in found.work
        if base in ours or is_data(base) or staged_of(base) or is_being_written(base)
    ]
    files += [
        layout.state + base
        for base in found.state
        if base == "done.json" or part_of_record(base) is not None or is_errors(base)
        or is_being_written(base)
    ]  # fmt: skip
    return Leftovers(files, [layout.media + base for base in found.media if is_media_folder(base)])


def foreign(found: ResultNames) -> list[str]:
    """Return names of files that no job wrote, without hidden files."""
    state = [base for base in found.state if base not in ("lock", OWNER) and not is_being_written(base)]
    others = [base for base in found.work if base != STATE and not base.startswith(".")]
    return [*others, *(STATE + base for base in state)]


def damage(record: PartRecord, size_bytes: int | None, content: Written | None) -> str:
    """Return the damage of a part's data as a phrase; '' if it matches the record.

    size_bytes: size of the file; None if it is missing.
    content:    size and digest; None if it was not read.
    """
    if size_bytes is None:
        return f"{record.file} is missing"
    if size_bytes != record.size_bytes:
        return f"{record.file} has {size_bytes} bytes, and {record.size_bytes} were written"
    if content is not None and content.sha256 != record.sha256:
        return f"{record.file} does not hold what was written"
    return ""


def by_part(names: Iterable[str]) -> Mapping[int, str]:
    """Return the names of records by part."""
    return {part: base for base in names if (part := part_of_record(base)) is not None}
