"""Files in object stores through fsspec.

A file is spooled locally and then uploaded, so that a failed write leaves nothing behind. Object stores publish
complete objects only; on other file systems the file is uploaded under a temporary name and renamed. Nothing is synced.
Stores have no locks: the writing run names itself in an owner object, which refuses a second run that starts later, and
is checked before each commit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from weftline.engine.jobs.output.files import Lock, LockHeld, Write, put_bytes
from weftline.engine.jobs.output.layout import OWNER, being_written
from weftline.nodes.strict_json import parse

WHOLE_AT_ONCE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"})
"""Protocols whose objects become visible only when complete."""


class RemoteFiles:
    """Folder on an fsspec file system."""

    reads_cheap = False

    def __init__(self, system: Any, root: str) -> None:
        protocols = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
        self._system, self._root = system, root.rstrip("/")
        self._at_once = bool(protocols & WHOLE_AT_ONCE)

    def write(self, name: str, write: Write, *, sync_name: bool = True) -> None:
        with tempfile.NamedTemporaryFile(prefix="weftline-") as spool:
            write(cast(BinaryIO, spool))
            spool.flush()
            with _as_os_errors():
                self._send(spool.name, name)

    def _send(self, local: str, name: str) -> None:
        path = self._path(name)
        if self._at_once:
            self._system.put_file(local, path)
            return
        temporary = self._path(being_written(name))
        self._system.makedirs(posixpath.dirname(path), exist_ok=True)
        try:
            self._system.put_file(local, temporary)
            self._system.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._system.rm_file(temporary)
            raise

    def sync_names(self, folder: str) -> None:
        pass

    def move(self, name: str, to: str) -> None:
        with _as_os_errors():
            self._system.mv(self._path(name), self._path(to))

    def remove(self, name: str) -> None:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._system.rm(self._path(name), recursive=True)

    def open(self, name: str) -> BinaryIO:
        with _as_os_errors():
            return cast(BinaryIO, self._system.open(self._path(name), "rb"))

    def size(self, name: str) -> int | None:
        with _as_os_errors():
            try:
                found = self._system.info(self._path(name))
            except FileNotFoundError:
                return None
        return int(found["size"]) if found["type"] == "file" else None

    def entries(self, folder: str) -> list[str]:
        path = self._path(folder)
        with _as_os_errors():
            self._system.invalidate_cache()
            try:
                found = self._system.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = {
            posixpath.basename(one["name"].rstrip("/")) + ("/" if one["type"] == "directory" else "")
            for one in found
            if one["name"].strip("/") != path.strip("/")  # some stores list the folder itself
        }
        return sorted(names)

    def lock(self, folder: str) -> Lock:
        name = folder.rstrip("/") + "/" + OWNER
        ours = _identity()
        holder = self.owner(name)
        if holder is not None and not _ended(holder, ours):
            raise LockHeld(
                f"process {holder.get('pid')} on {holder.get('host')}; if that run has ended, remove {self._path(name)}"
            )
        put_bytes(self, name, json.dumps(ours).encode())
        return _OwnerLock(self, name, ours)

    def owner(self, name: str) -> dict[str, Any] | None:
        """Return the recorded owner; None without one."""
        with _as_os_errors():
            self._system.invalidate_cache()
            try:
                owner = parse(self._system.cat_file(self._path(name)))
            except FileNotFoundError:
                return None
            except ValueError:
                owner = None
        return owner if isinstance(owner, dict) else {"pid": "unknown", "host": "an unknown machine"}

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name).rstrip("/")


class _OwnerLock:
    def __init__(self, files: RemoteFiles, name: str, ours: dict[str, Any]) -> None:
        self._files, self._name, self._ours = files, name, ours
        self._held = True

    def check(self) -> None:
        holder = self._files.owner(self._name)
        if holder != self._ours:
            by = (
                f"process {holder.get('pid')} on {holder.get('host')}"
                if holder
                else "a run that removed the owner object"
            )
            raise OSError(errno.EBUSY, f"taken over by {by}")

    def release(self) -> None:
        if self._held:
            self._held = False
            with contextlib.suppress(OSError):
                if self._files.owner(self._name) == self._ours:
                    self._files.remove(self._name)


def _identity() -> dict[str, Any]:
    return {
        "host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "run": os.urandom(8).hex(),
    }  # fmt: skip


def _ended(holder: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Return True if the owner was a process of this machine that has ended."""
    if holder.get("host") != ours["host"] or not isinstance(holder.get("pid"), int):
        return False
    return _started(holder["pid"]) != holder.get("started")


def _started(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(after_name[19])  # field 22 of proc(5), counted from the state, which is field 3


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Convert exceptions of fsspec clients to OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
