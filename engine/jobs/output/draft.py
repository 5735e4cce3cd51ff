"""Media files of an uncommitted part, written as they arrive."""

from __future__ import annotations

import hashlib
import threading

from weftline.engine.jobs.output.failing import told
from weftline.engine.jobs.output.files import Files, put_bytes
from weftline.engine.jobs.output.records import MediaRecord


class Draft:
    """Takes files of one revision of a part. Thread-safe; it is over when the part is committed.

    part, revision: what it is for.
    failed:         a file could not be written; the part cannot be committed then.
    folder:         of its files, relative to the results' folder: what comes before their names in the table.
    """

    def __init__(self, files: Files, out: str, part: int, revision: int, folder: str, base: str) -> None:
        self.part, self.revision, self.folder = part, revision, folder
        self._files, self._out, self._base = files, out, base
        self.failed = False
        self._lock = threading.Lock()
        self._written: dict[str, tuple[int, str]] = {}
        files.remove_folder(folder)

    def add(self, name: str, data: bytes) -> str:
        """Write a file and return its name relative to the results' folder; OutputFailed when it cannot be written.

        name: of the file in `folder`; one that was written already is replaced.
        """
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is no name of a picture or a recording")
        try:
            with told(self._out, f"part {self.part} could not be written"):
                written = put_bytes(self._files, self.folder + name, data, settled=False)
        except BaseException:
            self.failed = True
            raise
        with self._lock:
            self._written[name] = (written.size_bytes, written.sha256)
        return self.folder + name

    def settle(self) -> tuple[MediaRecord, ...]:
        """Return what was written, when all of it is on disk; nothing when there was none."""
        with self._lock:
            written = sorted(self._written.items())
        if not written:
            return ()
        self._files.settle(self.folder)
        sha256 = hashlib.sha256()
        for name, (_, content) in written:
            sha256.update(f"{name} {content}\n".encode())
        size_bytes = sum(size for _, (size, _) in written)
        one = MediaRecord(folder=self._base, files=len(written), size_bytes=size_bytes, sha256=sha256.hexdigest())
        return (one,)
