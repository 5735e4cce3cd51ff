"""Threaded, ordered loading of files that rows name."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import fsspec

from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.shown import shown_url

THREADS = 8
BYTES_MAX = 256 << 20
"""Largest file that is read for a value."""


class Loader:
    """Reads files by path or URL. Thread-safe.

    threads:   files that are read at a time.
    bytes_max: a larger file is not read.
    folder:    path or URL that relative paths are relative to; '' is the working directory.
    storage:   options for fsspec, for URLs of the folder's own kind.
    """

    def __init__(
        self,
        threads: int = THREADS,
        bytes_max: int = BYTES_MAX,
        folder: str = "",
        storage: Mapping[str, str] | None = None,
    ) -> None:
        self.bytes_max = bytes_max
        self._folder, self._storage = folder, dict(storage or {})
        self._threads = ThreadPoolExecutor(threads, "load")

    def read_all(self, urls: Sequence[str], folders: Sequence[str | None] | None = None) -> list[bytes | Unusable]:
        """Return what each file holds, in order; Unusable, with the name as it was written, where one cannot be read.

        folders: what each is relative to, where it is not the loader's own.
        """
        return list(self._threads.map(self._read, urls, folders if folders is not None else [None] * len(urls)))

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, written: str, folder: str | None) -> bytes | Unusable:
        if not written:
            return Unusable("an empty file name")
        url = joined(self._folder if folder is None else folder, written)
        try:
            data = self._local(url) if "://" not in url else self._remote(url)
        except Exception as error:  # a file system elsewhere raises whatever its client raises
            return Unusable(_reason(written, error))
        if len(data) > self.bytes_max:
            return Unusable(f"{shown_url(written)} has more than {self.bytes_max} bytes, the most that are read")
        return data

    def _local(self, path: str) -> bytes:
        with os.fdopen(_regular(path), "rb") as stream:
            return stream.read(self.bytes_max + 1)

    def _remote(self, url: str) -> bytes:
        same = url.split("://", 1)[0] == self._folder.split("://", 1)[0]
        fs, path = fsspec.core.url_to_fs(url, **(self._storage if same else {}))
        with fs.open(path, "rb") as stream:
            data: Any = stream.read(self.bytes_max + 1)
        return bytes(data)


def _regular(path: str) -> int:
    """Return a file, opened; OSError for a pipe or a device, which may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is no regular file")


def joined(folder: str, written: str) -> str:
    """Return where a file is that is called `written` in a row of a file in `folder`."""
    if "://" in written or written.startswith("/") or not folder:
        return written
    if written.startswith("~/"):
        return str(Path(written).expanduser())
    return posixpath.join(folder, written)


def _reason(written: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return shown_url(f"there is no file {written}")
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip().split("\n")[0]
    return shown_url(f"cannot read {written}: {said[:200] or type(error).__name__}")
