"""File names of a job's results; pure.

    OUT/                          or x.parquet.job/ beside a single file x.parquet
      part-00000.parquet          rows of a part
      .part-00000.parquet.new     its next revision, until its record is there
      _errors.jsonl               error rows of all parts
      _media/part-00000/          pictures and recordings of a part; part-00000.r1/ those of revision 1
      _weftline/manifest.json     what the job is
      _weftline/part-00000.json   the record of a part: without it there is no part
      _weftline/errors-00000.jsonl  error rows of a part; errors-00000.r1.jsonl those of revision 1
      _weftline/restart           the job is being thrown away
      _weftline/done.json         all is there
      _weftline/lock              held by the run that writes

Any of these may have a `.NAME.tmp` beside it for as long as it is being written. Names are relative, with `/` between
folders, and folders end in `/`. What is no table begins with `_`, so that whoever reads the folder as a data set passes
over it.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

STATE = "_weftline/"
MEDIA = "_media/"
OWNER = "owner.json"

_DATA = re.compile(r"part-(\d{5,})(\.[A-Za-z0-9.]+)")
_RECORD = re.compile(r"part-(\d{5,})\.json")
_ERRORS = re.compile(r"errors-\d{5,}(\.r\d+)?\.jsonl")
_MEDIA = re.compile(r"part-\d{5,}(\.r\d+)?/")
_BEING_WRITTEN = re.compile(r"\..+\.tmp")
_STAGED = re.compile(r"\.(part-\d{5,}\.[A-Za-z0-9.]+)\.new")


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Where a job's files lie, relative to the folder in which its results lie.

    work:   folder of parts and state: '' for the results' folder itself.
    final:  the single file that is put together at the end; '' when results are a folder.
    suffix: of a part's file, with its dot.
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
    """Return the name that a file has until it is whole."""
    folder, base = posixpath.split(name)
    return posixpath.join(folder, f".{base}.tmp")


def staged(name: str) -> str:
    """Return the name that a data file's next revision has until it takes the place of the last one."""
    folder, base = posixpath.split(name)
    return posixpath.join(folder, f".{base}.new")


def is_being_written(base: str) -> bool:
    return _BEING_WRITTEN.fullmatch(base) is not None


def staged_of(base: str) -> str:
    """Return the data file whose next revision this is; '' when it is none."""
    match = _STAGED.fullmatch(base)
    return match[1] if match else ""


def part_of_record(base: str) -> int | None:
    """Return the part of a record's name; None for another name."""
    match = _RECORD.fullmatch(base)
    return int(match[1]) if match else None


def is_data(base: str, suffix: str | None = None) -> bool:
    """Whether a name is that of a part's data; of any format when no suffix is given."""
    match = _DATA.fullmatch(base)
    return match is not None and suffix in (None, match[2])


def is_errors(base: str) -> bool:
    return _ERRORS.fullmatch(base) is not None


def is_media_folder(base: str) -> bool:
    return _MEDIA.fullmatch(base) is not None
