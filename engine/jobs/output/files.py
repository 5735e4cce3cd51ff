"""File system interface of the result store, and a counting sink.

A `Files` is a folder, local or in an object store. Names in it are relative, with `/`; folders end in `/`. A write is
whole or did not happen, and has reached the disk when it returns. Whatever goes wrong there is an OSError.

Error messages for failed writes: cause, state of the results and remedy.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

from weftline.errors import OutputFailed

Write = Callable[[BinaryIO], None]
"""Writes the content of a file, from its beginning to its end and without seeking."""

CHUNK_BYTES = 1 << 20
"""Files are read in pieces of this size."""


class Held(Exception):
    """Somebody else holds the lock; says who."""


class Lock(Protocol):
    """Keeps other runs out for as long as it is held."""

    def check(self) -> None:
        """Raise OSError when it was taken away."""

    def release(self) -> None:
        """Let others in. Safe to call twice."""


class Files(Protocol):
    """A folder with files.

    reads_cheap: reading a file again costs little, as on a local disk.
    """

    reads_cheap: bool

    def write(self, name: str, write: Write, *, settled: bool = True) -> None:
        """Write a file, or put it in the place of one, at once; folders on the way are made.

        settled: its name is to be on disk too, when this returns; else `settle` is called for its folder later.
        Whatever is raised, by `write` too, nothing of it is visible, unless the name was all that could not be settled.
        """

    def settle(self, folder: str) -> None:
        """Return when all names in a folder are on disk."""

    def move(self, name: str, to: str) -> None:
        """Give a file another name in its folder, or put it in the place of one, at once, and settle the folder."""

    def remove(self, name: str) -> None:
        """Remove a file; it may be absent."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder and all in it; it may be absent."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None when there is none."""

    def entries(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted, folders with a `/` at the end; none when there is no such folder."""

    def lock(self, folder: str) -> Lock:
        """Keep other runs out of a folder, which is made; Held says who is in."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a file holds."""

    size_bytes: int
    sha256: str


class HashingWriter(io.RawIOBase):
    """Passes on what is written, and knows its size, its SHA-256 and what went wrong below."""

    def __init__(self, below: BinaryIO) -> None:
        super().__init__()
        self._below = below
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        try:
            self._below.write(view)
        except OSError as error:
            self.failure = error
            raise
        self._sha256.update(view)
        self._size_bytes += view.nbytes
        return view.nbytes

    @property
    def written(self) -> Written:
        return Written(self._size_bytes, self._sha256.hexdigest())


def put(files: Files, name: str, write: Write, *, settled: bool = True) -> Written:
    """Write a file and return what it holds; OSError also where a library between made another error of it."""
    sinks: list[HashingWriter] = []

    def through(below: BinaryIO) -> None:
        sinks.append(HashingWriter(below))
        write(cast(BinaryIO, sinks[-1]))
        if sinks[-1].failure is not None:  # a library that was told and went on
            raise sinks[-1].failure

    try:
        files.write(name, through, settled=settled)
    except OSError:
        raise
    except Exception as error:
        if sinks and sinks[-1].failure is not None:
            raise sinks[-1].failure from error
        raise
    return sinks[-1].written


def put_bytes(files: Files, name: str, data: bytes, *, settled: bool = True) -> Written:
    """Write a file that is at hand as bytes."""

    def write(file: BinaryIO) -> None:
        file.write(data)

    return put(files, name, write, settled=settled)


def read(files: Files, name: str) -> bytes:
    """Return what a file holds."""
    with files.open(name) as file:
        return file.read()


def measure(files: Files, name: str) -> Written:
    """Read a file and return its size and digest."""
    sha256, size_bytes = hashlib.sha256(), 0
    with files.open(name) as file:
        while chunk := file.read(CHUNK_BYTES):
            sha256.update(chunk)
            size_bytes += len(chunk)
    return Written(size_bytes, sha256.hexdigest())


def copy(source: BinaryIO, to: BinaryIO) -> None:
    """Write all of one file into another."""
    while chunk := source.read(CHUNK_BYTES):
        to.write(chunk)


_REMEDIES = {
    errno.ENOSPC: "free space and ",
    errno.EDQUOT: "free space and ",
    errno.EFBIG: "raise the limit on file sizes and ",
    errno.EROFS: "make it writable and ",
    errno.EACCES: "make it writable and ",
    errno.EPERM: "make it writable and ",
    errno.EIO: "see to the disk and ",
}
_REASONS = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "the quota is used up"}


@contextlib.contextmanager
def told(out: str, what: str, committed_rows: int | None = None) -> Iterator[None]:
    """Turn an OSError inside into OutputFailed.

    what:           such as 'part 3 could not be written'.
    committed_rows: rows that are safe; None: nothing is said of them.
    """
    try:
        yield
    except OSError as error:
        safe = "" if committed_rows is None else f"{count(committed_rows)} rows are committed; "
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise OutputFailed(f"{out}: {what}: {reason(error)}; {safe}{remedy}run the same command again") from error


def reason(error: OSError) -> str:
    """Return why a call failed, without paths."""
    if error.errno in _REASONS:
        return _REASONS[error.errno]
    said = error.strerror or (os.strerror(error.errno) if error.errno else "") or str(error) or type(error).__name__
    return said[:1].lower() + said[1:]


def count(number: int) -> str:
    """Return a number with its thousands apart."""
    return f"{number:,}".replace(",", " ")
