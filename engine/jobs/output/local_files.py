"""Crash-safe writes to a local folder: temporary file, fsync, rename.

A file is written under a temporary name, synced and renamed, and its folder is synced. All system calls are methods of
`Disk`, so that tests can make any of them fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import posixpath
import stat
from pathlib import Path
from typing import BinaryIO, Protocol

from weftline.engine.jobs.output.files import Lock, LockHeld, Write
from weftline.engine.jobs.output.layout import being_written

BUFFER_BYTES = 1 << 20
"""Write buffer."""


class Disk(Protocol):
    """System calls on absolute paths; each raises OSError."""

    def make_folder(self, path: str) -> None: ...
    def create(self, path: str) -> BinaryIO:
        """Open a new file for writing; FileExistsError if it exists."""

    def sync(self, file: BinaryIO) -> None:
        """Make the written data durable."""

    def sync_folder(self, path: str) -> None: ...
    def replace(self, path: str, to: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""

    def open(self, path: str) -> BinaryIO: ...
    def size(self, path: str) -> int | None:
        """Return a file's size; None for a missing file or a folder."""

    def names(self, path: str) -> list[str] | None:
        """Return the names in a folder, folders with a trailing `/`; None if there is no such folder."""

    def lock(self, path: str) -> Lock:
        """Create and lock a file; LockHeld if another process holds the lock."""


class SystemDisk:
    """Disk of the operating system."""

    def make_folder(self, path: str) -> None:
        Path(path).mkdir()

    def create(self, path: str) -> BinaryIO:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        return os.fdopen(handle, "wb", buffering=BUFFER_BYTES)

    def sync(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that cannot sync folders returns EINVAL
                raise
        finally:
            os.close(handle)

    def replace(self, path: str, to: str) -> None:
        Path(path).replace(to)

    def remove(self, path: str) -> None:
        Path(path).unlink()

    def remove_folder(self, path: str) -> None:
        Path(path).rmdir()

    def open(self, path: str) -> BinaryIO:
        return Path(path).open("rb")

    def size(self, path: str) -> int | None:
        try:
            found = Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def names(self, path: str) -> list[str] | None:
        try:
            with os.scandir(path) as found:
                return [f"{one.name}/" if one.is_dir(follow_symlinks=False) else one.name for one in found]
        except FileNotFoundError:
            return None

    def lock(self, path: str) -> Lock:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
            os.close(handle)
            raise LockHeld(f"process {holder}" if holder else "another process") from None
        except BaseException:
            os.close(handle)
            raise
        return _FileLock(handle)


class _FileLock:
    """Lock of an open descriptor: the kernel releases it when the process ends."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def check(self) -> None:
        pass

    def release(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class LocalFiles:
    """Folder on a local disk."""

    reads_cheap = True

    def __init__(self, root: Path | str, disk: Disk | None = None) -> None:
        self._root = str(root)
        self._disk: Disk = SystemDisk() if disk is None else disk
        self._made: set[str] = set()

    def write(self, name: str, write: Write, *, sync_name: bool = True) -> None:
        path, temporary = self._path(name), self._path(being_written(name))
        folder = posixpath.dirname(path)
        self._create_folders(folder)
        try:
            file = self._create(temporary)
            try:
                write(file)
                self._disk.sync(file)
            finally:
                file.close()
            self._disk.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        if sync_name:
            self._disk.sync_folder(folder)

    def sync_names(self, folder: str) -> None:
        self._disk.sync_folder(self._path(folder))

    def move(self, name: str, to: str) -> None:
        self._disk.replace(self._path(name), self._path(to))
        self._disk.sync_folder(posixpath.dirname(self._path(to)))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(self._path(name))

    def remove_folder(self, name: str) -> None:
        for entry in self.entries(name):
            inside = name.rstrip("/") + "/" + entry
            if entry.endswith("/"):
                self.remove_folder(inside)
            else:
                self.remove(inside)
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove_folder(self._path(name))
        self._made.discard(self._path(name))

    def open(self, name: str) -> BinaryIO:
        return self._disk.open(self._path(name))

    def size(self, name: str) -> int | None:
        return self._disk.size(self._path(name))

    def entries(self, folder: str) -> list[str]:
        return sorted(self._disk.names(self._path(folder)) or ())

    def lock(self, folder: str) -> Lock:
        self._create_folders(self._path(folder))
        return self._disk.lock(self._path(folder.rstrip("/") + "/lock"))

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name).rstrip("/") or "/"

    def _create(self, path: str) -> BinaryIO:
        try:
            return self._disk.create(path)
        except FileExistsError:  # from a run that crashed
            self._disk.remove(path)
            return self._disk.create(path)

    def _create_folders(self, folder: str) -> None:
        """Create a folder and its parents; each is durable before it is used."""
        if folder in self._made:
            return
        missing, above = [], folder
        while self._disk.names(above or ".") is None:
            missing.append(above)
            above = posixpath.dirname(above)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._disk.make_folder(path)
            self._disk.sync_folder(posixpath.dirname(path) or ".")
        self._made.add(folder)
