"""Unix socket path of a server: exclusive claim, atomic bind and removal.

A server claims a path before it loads models and keeps the claim until it ends: an flock(2) on `PATH.lock`, which the
kernel releases however the server ends. A socket that a killed server left behind refuses connections and is replaced.
The socket itself is bound inside a private folder, gets its mode and group there, and is then renamed to its path: at
no moment can others connect to one that is open wider, and a library that binds it (gRPC) unlinks nothing at the path.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from weftline.errors import WeftlineError

CONNECT_S = 2.0
"""Longest wait for a listener at the path; one whose queue is full still listens."""

Identity = tuple[int, int]
"""Device and inode of a socket's file."""


class SocketClaim:
    """The exclusive claim of a path. WeftlineError when another process listens there, or it is no place for a socket.

    with SocketClaim(path):
        ...
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock_path = path.with_name(f"{path.name}.lock")
        self._lock = self._take_lock()
        try:
            self._refuse_other_listeners()
        except BaseException:
            self._release_lock()
            raise

    def close(self) -> None:
        """Release the path, and remove a socket left there by a killed ingress process. Safe to call twice."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(self._path.lstat().st_mode) and not _answers(self._path):
                self._path.unlink()
        self._release_lock()

    def _take_lock(self) -> int:
        while True:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                lock = os.open(self._lock_path, flags, 0o600)
            except OSError as error:
                raise _unusable(self._path, f"{self._lock_path} cannot be opened: {error.strerror}") from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.lstat(self._lock_path)):
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise _taken(self._path) from None
            except FileNotFoundError:
                pass  # the server that had it has just removed it: the lock was on a file that has no path any more
            os.close(lock)

    def _refuse_other_listeners(self) -> None:
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise _unusable(self._path, "something that is no socket is there")
        if _answers(self._path):
            raise _taken(self._path)

    def _release_lock(self) -> None:
        lock, self._lock = self._lock, -1
        with contextlib.suppress(OSError):
            self._lock_path.unlink()  # while it is still locked, so that it is ours
        os.close(lock)

    def __enter__(self) -> SocketClaim:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


@contextlib.contextmanager
def placed(path: Path, group: str | None) -> Iterator[Path]:
    """Yield a private path to bind; what was bound there lies at `path` afterwards, for its user (and `group`) alone.

    Replaces what lies at `path`. WeftlineError when the group is unknown or its file cannot be changed.
    """
    try:
        private = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
    except OSError as error:
        raise _unusable(path, f"its folder cannot be written: {error.strerror}") from None
    try:
        bound = private / "s"
        yield bound
        if group is not None:
            try:
                os.chown(bound, -1, grp.getgrnam(group).gr_gid)
            except KeyError:
                raise _unusable(path, f"there is no group {group!r:.80}") from None
            except OSError as error:
                raise _unusable(path, f"it cannot be given to group {group!r:.80}: {error.strerror}") from None
        bound.chmod(0o600 if group is None else 0o660)
        bound.rename(path)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def identity(path: Path) -> Identity | None:
    """Return which file lies at a path; None for none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_own(path: Path, own: Identity | None) -> None:
    """Unlink a path if it is still the same file."""
    if own is not None and identity(path) == own:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _answers(path: Path) -> bool:
    """Whether a process listens at a socket. One that may not be asked counts as listening."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _taken(path: Path) -> WeftlineError:
    found = f"cannot listen at the socket {path}: another process listens there"
    return WeftlineError(f"{found}\n    fix: choose another path, or end the process that has it")


def _unusable(path: Path, why: str) -> WeftlineError:
    found = f"cannot listen at the socket {path}: {why}"
    return WeftlineError(f"{found}\n    fix: choose another path, in a folder that this user may write")
