"""File system interface of the result store, hashing writes, and error messages of failed writes.

`Files` is a folder, local or in an object store. Names are relative, with `/`; folder names end in `/`. A write is
atomic and durable when it returns. All failures are OSError.
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
"""Writes the content of a file sequentially."""

CHUNK_BYTES = 1 << 20

_REMEDIES = {
    errno.ENOSPC: "free space and ",
    errno.EDQUOT: "free space and ",
    errno.EFBIG: "raise the limit on file sizes and ",
    errno.EROFS: "make it writable and ",
    errno.EACCES: "make it writable and ",
    errno.EPERM: "make it writable and ",
    errno.EIO: "check the disk and ",
}
_REASONS = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "the quota is used up"}


class LockHeld(Exception):
    """Another process holds the lock; the message names it."""


class Lock(Protocol):
    """Exclusive lock of a job's results."""

    def check(self) -> None:
        """Raise OSError if the lock was lost."""

    def release(self) -> None:
        """Release the lock. Safe to call twice."""


class Files(Protocol):
    """Folder with files.

    reads_cheap: True if files can be read again at low cost, as on a local disk.
    """

    reads_cheap: bool

    def write(self, name: str, write: Write, *, sync_name: bool = True) -> None:
        """Create or replace a file atomically; parent folders are created.

        sync_name: make the file name durable before returning; otherwise call `sync_names` for its folder later.
        After an exception, also of `write`, nothing is visible, unless only the name could not be made durable.
        """

    def sync_names(self, folder: str) -> None:
        """Make all names in a folder durable."""

    def move(self, name: str, to: str) -> None:
        """Rename a file in its folder, atomically replacing another, and make the name durable."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its content, if it exists."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""

    def entries(self, folder: str) -> list[str]:
        """Return the sorted names in a folder, folders with a trailing `/`; empty if there is no such folder."""

    def lock(self, folder: str) -> Lock:
        """Create a folder and lock it; LockHeld if another process holds the lock."""


@dataclass(frozen=True, slots=True)
class Written:
    """Size and digest of a file."""

    size_bytes: int
    sha256: str


class HashingWriter(io.RawIOBase):
    """Forwards writes, and records their size, SHA-256 and first OSError."""

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


def put(files: Files, name: str, write: Write, *, sync_name: bool = True) -> Written:
    """Write a file and return its size and digest; OSError even if a library replaced it by another exception."""
    sinks: list[HashingWriter] = []

    def through(below: BinaryIO) -> None:
        sinks.append(HashingWriter(below))
        write(cast(BinaryIO, sinks[-1]))
        if sinks[-1].failure is not None:  # a library ignored the error
            raise sinks[-1].failure

    try:
        files.write(name, through, sync_name=sync_name)
    except OSError:
        raise
    except Exception as error:
        if sinks and sinks[-1].failure is not None:
            raise sinks[-1].failure from error
        raise
    return sinks[-1].written


def put_bytes(files: Files, name: str, data: bytes, *, sync_name: bool = True) -> Written:
    """Write a file with this content."""

    def write(file: BinaryIO) -> None:
        file.write(data)

    return put(files, name, write, sync_name=sync_name)


def read(files: Files, name: str) -> bytes:
    """Return the content of a file."""
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


@contextlib.contextmanager
def as_output_failed(out: str, what: str, committed_rows: int | None = None) -> Iterator[None]:
    """Convert OSError to OutputFailed.

    what:           such as 'part 3 could not be written'.
    committed_rows: number of committed rows for the message; None: not mentioned.
    """
    try:
        yield
    except OSError as error:
        safe = "" if committed_rows is None else f"{grouped_digits(committed_rows)} rows are committed; "
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise OutputFailed(f"{out}: {what}: {reason(error)}; {safe}{remedy}run the same command again") from error


def reason(error: OSError) -> str:
    """Return the reason of a failed call, without paths."""
    if error.errno in _REASONS:
        return _REASONS[error.errno]
    text = error.strerror or (os.strerror(error.errno) if error.errno else "") or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


def grouped_digits(number: int) -> str:
    """Return a number with spaces between thousands."""
    return f"{number:,}".replace(",", " ")
