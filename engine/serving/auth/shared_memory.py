"""Client-registered system shared memory, accessed by copies and never mapped.

A client that shrinks a file kills every process that has it mapped (SIGBUS); `pread` of the same file returns fewer
bytes. So regions are descriptors, and each tensor in them is copied once, into the arena, where it cannot change any
more. Only these can be registered: an object of POSIX shared memory by its one-component name, a regular file
of the server's own user, big enough now. The memory of our own processes has no names (memfds), so no name leads there.

A caller with the right to register (tokens: `memory: true`) can reach any such object of the server's user: run the
server as a user of its own, or as the clients' user.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weftline.engine.serving.auth.plain import one_line
from weftline.engine.serving.config import ServeLimits
from weftline.errors import InputError, LimitReached

FOLDER = "/dev/shm"
"""Where Linux keeps POSIX shared memory; see shm_overview(7)."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KEY = re.compile(r"/?([A-Za-z0-9._-]{1,255})")
_REFUSED_KEYS = ("sem.",)  # POSIX semaphores live there too: data written over one stops its users

OFF = "shared memory is off on this server; its operator can allow it (weftline serve --shared-memory)"


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """A registered region, in the words of the client that registered it."""

    name: str
    key: str
    offset: int
    size_bytes: int


@dataclass(slots=True)
class _Held:
    """A region and its descriptor, closed when it is neither registered nor in use."""

    status: RegionStatus
    fd: int
    users: int = 0
    gone: bool = False


class SharedMemory:
    """The regions of a server: a `regions.Regions` for requests, and what clients register. Safe from any thread.

    Everything that is wrong with what a client sent is InputError, and a full table LimitReached. No message quotes a
    key.
    """

    def __init__(self, limits: ServeLimits, enabled: bool, folder: str = FOLDER) -> None:
        self._limits = limits
        self._enabled = enabled
        self._folder = folder
        self._lock = threading.Lock()
        self._regions: dict[str, _Held] = {}

    @property
    def enabled(self) -> bool:
        return self._enabled

    # what clients register

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Make `size_bytes` of the object `key`, from `offset`, known as `name`."""
        if not self._enabled:
            raise InputError(OFF)
        status = self._checked(name, key, offset, size_bytes)
        fd = _open(self._folder, _KEY.fullmatch(key), offset + size_bytes)
        with self._lock:
            if name in self._regions:
                refusal: Exception | None = InputError(f"region {name} is registered already; unregister it first")
            elif len(self._regions) >= self._limits.regions_max:
                refusal = LimitReached(f"{len(self._regions)} regions are registered, the most of this server")
            else:
                refusal = None
                self._regions[name] = _Held(status, fd)
        if refusal is not None:
            os.close(fd)
            raise refusal

    def unregister(self, name: str) -> None:
        """Forget a region; an unknown name is no error. Requests that are reading it finish.

        A parsed request that has not read its tensor yet fails, or reads a region registered again under that name.
        """
        if not self._enabled:
            raise InputError(OFF)
        with self._lock:
            held = self._regions.pop(name, None)
            if held is not None:
                _leave(held)

    def unregister_all(self) -> None:
        """Remove every region."""
        with self._lock:
            everything = list(self._regions.values())
            self._regions.clear()
            for held in everything:
                _leave(held)

    def status(self, name: str = "") -> tuple[RegionStatus, ...]:
        """Return every region, sorted, or the one of that name; InputError where there is none."""
        with self._lock:
            if not name:
                return tuple(held.status for _, held in sorted(self._regions.items()))
            return (self._known(name).status,)

    # what requests use

    def check(self, name: str, offset: int, size_bytes: int) -> None:
        """Raise InputError unless the range lies inside the region."""
        with self._lock:
            _check_range(self._known(name).status, offset, size_bytes)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the region: one copy, without the GIL. InputError also where the object has shrunk."""
        view = memoryview(buffer).cast("B")
        with self._using(name, offset, view.nbytes) as (fd, start):
            done = 0
            while done < view.nbytes:
                count = _tried(os.preadv, fd, [view[done:]], start + done)
                if count == 0:
                    raise InputError(f"region {name} ends before the tensor does; it was made smaller")
                done += count

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Write `data` into the region; InputError where the object has shrunk, which is not made larger again."""
        view = memoryview(data).cast("B")
        with self._using(name, offset, view.nbytes) as (fd, start):
            if start + view.nbytes > os.fstat(fd).st_size:
                raise InputError(f"region {name} ends before the tensor does; it was made smaller")
            done = 0
            while done < view.nbytes:
                done += _tried(os.pwrite, fd, view[done:], start + done)

    # inside

    def _checked(self, name: str, key: str, offset: int, size_bytes: int) -> RegionStatus:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError("a region's name has 1 to 128 letters, digits, dots, dashes and underscores")
        found = _KEY.fullmatch(key) if isinstance(key, str) else None
        if found is None or found[1] in (".", "..") or found[1].startswith(_REFUSED_KEYS):
            expected = "expected a shm_open name: at most one slash, then letters, digits, dots, dashes and underscores"
            raise InputError(f"region {name}: its key is no name of shared memory; {expected}, at most 255")
        most = self._limits.region_bytes_max
        if type(size_bytes) is not int or not 1 <= size_bytes <= most:
            raise InputError(f"region {name}: found a size of {size_bytes!s:.40} bytes, expected 1 to {most}")
        if type(offset) is not int or not 0 <= offset < 1 << 62:
            raise InputError(f"region {name}: found an offset of {offset!s:.40}, expected 0 or more, inside the object")
        return RegionStatus(name, key, offset, size_bytes)

    def _known(self, name: str) -> _Held:
        held = self._regions.get(name)
        if held is None:
            if not self._enabled:
                raise InputError(OFF)
            raise InputError(f"no region is registered as {one_line(name, 128)}")
        return held

    @contextmanager
    def _using(self, name: str, offset: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Lend the region's descriptor and where the range begins in it; it stays open until it is given back."""
        with self._lock:
            held = self._known(name)
            _check_range(held.status, offset, size_bytes)
            held.users += 1
        try:
            yield held.fd, held.status.offset + offset
        finally:
            with self._lock:
                held.users -= 1
                _close_unused(held)


def _open(folder: str, key: re.Match[str] | None, end: int) -> int:
    """Open the object and return its descriptor, once it is what it should be and reaches to `end`."""
    refusal = InputError("there is no such shared memory that this server may use: its own user's, and large enough")
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        raise refusal from None
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(key[1] if key is not None else "", flags, dir_fd=directory)
    except (OSError, ValueError):
        raise refusal from None
    finally:
        os.close(directory)
    held = os.fstat(fd)
    # One link: another user could have linked a file of ours, or of root's, to a name of theirs.
    if not stat.S_ISREG(held.st_mode) or held.st_uid != os.geteuid() or held.st_nlink != 1 or held.st_size < end:
        os.close(fd)
        raise refusal
    return fd


def _check_range(status: RegionStatus, offset: int, size_bytes: int) -> None:
    if offset < 0 or size_bytes < 0 or offset + size_bytes > status.size_bytes:
        found = f"found {size_bytes} bytes from {offset}, expected a range of its {status.size_bytes} bytes"
        raise InputError(f"region {status.name}: {found:.300}")


def _tried(call: object, fd: int, data: object, start: int) -> int:
    try:
        return int(call(fd, data, start))  # type: ignore[operator]
    except OSError:
        raise InputError("the shared memory could not be read or written; it may be full, or gone") from None


def _leave(held: _Held) -> None:
    held.gone = True
    _close_unused(held)


def _close_unused(held: _Held) -> None:
    if held.gone and held.users == 0 and held.fd >= 0:
        os.close(held.fd)
        held.fd = -1
