"""A disk that fails or dies at its k-th call, and one in memory that forgets what was not synced when its power is cut.

Both stand where `SystemDisk` stands. A call is one system call as the store sees it: each write to a file counts.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, cast

from weftline.engine.jobs.output.files import Lock, LockHeld
from weftline.engine.jobs.output.local_files import Disk

When = Literal["before", "after", "torn"]
"""Whether the call that goes wrong does nothing, all or, of a write, half of its work."""


class Killed(BaseException):
    """Stands for kill -9: nothing that the process would still do reaches the disk."""


class FaultyDisk:
    """Passes calls on, but for one.

    at:    the call that goes wrong, from 0; None: all go well, and `calls` counts them.
    error: errno of the OSError that it raises; None: the process is killed.
    real:  killed by the kernel instead of by an exception.
    seen:  called after every call that did anything.
    """

    def __init__(
        self, disk: Disk, at: int | None = None, when: When = "before", error: int | None = None, real: bool = False
    ) -> None:
        self.disk, self.at, self.when, self.error, self.real = disk, at, when, error, real
        self.calls = 0
        self.dead = False
        self.seen: Callable[[], None] = lambda: None
        self.log: list[str] = []

    def call(self, name: str, do: Callable[[], Any], torn: Callable[[], Any] | None = None) -> Any:
        if self.dead:
            raise Killed
        number, self.calls = self.calls, self.calls + 1
        self.log.append(name)
        if number != self.at:
            result = do()
            self.seen()
            return result
        if self.when == "after":
            with contextlib.suppress(FileNotFoundError):  # removing what is not there
                do()
        elif self.when == "torn" and torn is not None:
            torn()
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        if self.real:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dead = True
        raise Killed

    def make_folder(self, path: str) -> None:
        self.call(f"make_folder {path}", lambda: self.disk.make_folder(path))

    def create(self, path: str) -> BinaryIO:
        return cast(BinaryIO, _FaultyFile(self, self.call(f"create {path}", lambda: self.disk.create(path))))

    def sync(self, file: BinaryIO) -> None:
        self.call("sync", lambda: self.disk.sync(cast(_FaultyFile, file).below))

    def sync_folder(self, path: str) -> None:
        self.call(f"sync_folder {path}", lambda: self.disk.sync_folder(path))

    def replace(self, path: str, to: str) -> None:
        self.call(f"replace {path} {to}", lambda: self.disk.replace(path, to))

    def remove(self, path: str) -> None:
        self.call(f"remove {path}", lambda: self.disk.remove(path))

    def remove_folder(self, path: str) -> None:
        self.call(f"remove_folder {path}", lambda: self.disk.remove_folder(path))

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self.call(f"open {path}", lambda: self.disk.open(path)))

    def size(self, path: str) -> int | None:
        return self.disk.size(path)

    def names(self, path: str) -> list[str] | None:
        return self.disk.names(path)

    def lock(self, path: str) -> Lock:
        return self.disk.lock(path)


class _FaultyFile(io.RawIOBase):
    def __init__(self, owner: FaultyDisk, below: BinaryIO) -> None:
        super().__init__()
        self.owner, self.below = owner, below

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data)

        def torn() -> None:
            self.below.write(view[: len(view) // 2])
            self.below.flush()

        self.owner.call("write", lambda: self.below.write(view), torn)
        return len(view)

    def close(self) -> None:
        if not self.closed and not self.owner.dead:
            self.below.close()
        super().close()


@dataclass
class _Node:
    """A file: its content, and what of it is on disk."""

    content: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None


Entries = dict[str, "_Node | None"]
"""Files by name; None stands for a folder."""


class MemoryDisk:
    """Folders and files in memory. A folder keeps the changes to its names that are not synced, one by one."""

    def __init__(self) -> None:
        self.folders: dict[str, Entries] = {"/": {}}
        self.synced: dict[str, Entries] = {"/": {}}
        self.pending: dict[str, list[Entries]] = {"/": []}
        self.locked: set[str] = set()

    # Disk

    def make_folder(self, path: str) -> None:
        self._change(path, None)
        self.folders[path], self.synced[path], self.pending[path] = {}, {}, []

    def create(self, path: str) -> BinaryIO:
        folder, base = posixpath.split(path)
        if base in self.folders[folder]:
            raise FileExistsError(path)
        node = _Node()
        self._change(path, node)
        return cast(BinaryIO, _MemoryFile(node))

    def sync(self, file: BinaryIO) -> None:
        node = cast(_MemoryFile, file).node
        node.synced = bytes(node.content)

    def sync_folder(self, path: str) -> None:
        self.synced[path], self.pending[path] = dict(self.folders[path]), []

    def replace(self, path: str, to: str) -> None:
        folder, base = posixpath.split(path)
        if posixpath.dirname(to) != folder:
            raise AssertionError("a rename between folders is not known to be atomic")
        node = self.folders[folder].pop(base)
        self.folders[folder][posixpath.basename(to)] = node
        self.pending[folder].append(dict(self.folders[folder]))

    def remove(self, path: str) -> None:
        folder, base = posixpath.split(path)
        if base not in self.folders.get(folder, {}):
            raise FileNotFoundError(path)
        del self.folders[folder][base]
        self.pending[folder].append(dict(self.folders[folder]))

    def remove_folder(self, path: str) -> None:
        if path not in self.folders:
            raise FileNotFoundError(path)
        if self.folders[path]:
            raise AssertionError(f"{path} is not empty")
        folder, base = posixpath.split(path)
        del self.folders[folder][base]
        self.pending[folder].append(dict(self.folders[folder]))
        del self.folders[path]

    def open(self, path: str) -> BinaryIO:
        return io.BytesIO(self.content(path))

    def size(self, path: str) -> int | None:
        folder, base = posixpath.split(path)
        node = self.folders.get(folder, {}).get(base)
        return None if node is None else len(node.content)

    def names(self, path: str) -> list[str] | None:
        entries = self.folders.get(path)
        return None if entries is None else [name + ("/" if node is None else "") for name, node in entries.items()]

    def lock(self, path: str) -> Lock:
        folder, base = posixpath.split(path)
        if base not in self.folders[folder]:
            self._change(path, _Node())
        if path in self.locked:
            raise LockHeld("process 1")
        self.locked.add(path)
        return _MemoryLock(self, path)

    # tests

    def content(self, path: str) -> bytes:
        folder, base = posixpath.split(path)
        node = self.folders.get(folder, {}).get(base)
        if node is None:
            raise FileNotFoundError(path)
        return bytes(node.content)

    def all_files(self) -> dict[str, bytes]:
        """Return the contents of all files but locks, by path."""
        found = {}
        for folder, entries in self.folders.items():
            for base, node in entries.items():
                if node is not None and base != "lock":
                    found[posixpath.join(folder, base)] = bytes(node.content)
        return found

    def die(self) -> None:
        """The process is gone; what it wrote is still known to the kernel."""
        self.locked.clear()

    def cut(self, chance: random.Random | None = None) -> None:
        """Cut the power. Of what was not synced each folder keeps a beginning of its changes, and each file a beginning
        of its content; without `chance` nothing."""
        self.die()
        folders: dict[str, Entries] = {}
        waiting = ["/"]
        while waiting:
            path = waiting.pop()
            states = [self.synced[path], *self.pending[path]]
            entries = states[chance.randrange(len(states)) if chance else 0]
            folders[path] = {}
            for base, node in entries.items():
                if node is not None:
                    folders[path][base] = self._after_cut(node, chance)
                elif (inside := posixpath.join(path, base)) in self.folders:
                    folders[path][base] = None
                    waiting.append(inside)
        self.folders = folders
        self.synced = {path: dict(entries) for path, entries in folders.items()}
        self.pending = {path: [] for path in folders}

    def _after_cut(self, node: _Node, chance: random.Random | None) -> _Node:
        if node.synced is not None and bytes(node.content) == node.synced:
            return _Node(bytearray(node.synced), node.synced)
        kept = bytes(node.content[: chance.randint(0, len(node.content))]) if chance else node.synced or b""
        return _Node(bytearray(kept), kept)

    def _change(self, path: str, node: _Node | None) -> None:
        folder, base = posixpath.split(path)
        self.folders[folder][base] = node
        self.pending[folder].append(dict(self.folders[folder]))


class _MemoryFile(io.RawIOBase):
    def __init__(self, node: _Node) -> None:
        super().__init__()
        self.node = node

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.node.content += bytes(data)
        return len(data)


class _MemoryLock:
    def __init__(self, disk: MemoryDisk, path: str) -> None:
        self._disk, self._path = disk, path

    def check(self) -> None:
        pass

    def release(self) -> None:
        self._disk.locked.discard(self._path)
