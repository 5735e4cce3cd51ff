"""Reload pipelines when their files change: `weftline serve --watch`.

The files of a pipeline are its YAML file, those of its sub-pipelines, the Python files of its steps, and the files that
its steps load, by their state alone. They are polled. A change is acted upon once nothing has changed for a moment:
editors write in several steps. A file that is missing or empty has a longer moment to come back.

`Changes` decides; `Watch` polls and reloads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from weftline.errors import WeftlineError
from weftline.fields import plain
from weftline.nodes.contract import ConfigError
from weftline.nodes.declared_files import identities, is_folder, texts_of
from weftline.nodes.user_code import locate
from weftline.pipelines.check.checker import examine
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.subpipelines import named_pipelines

_log = logging.getLogger("weftline.ingress")

POLL_S = 0.5
"""Interval between two looks at the files."""

SETTLED_S, RETURNED_S = 0.25, 2.0
"""Time without changes before a change counts, and before a missing or empty file does."""

State = Mapping[str, tuple[int, ...]]
"""Inode, change time and size of each file by path; () for a file that does not exist."""


class Changes:
    """Decides when the files of one pipeline have changed for good. first: their state when it was loaded."""

    def __init__(self, first: State) -> None:
        self._seen = self._done = first
        self._since_s = 0.0

    def due(self, now: State, time_s: float) -> bool:
        """Return True once for each change, when nothing has changed for a moment. time_s: a steady clock."""
        if now != self._seen:
            self._seen, self._since_s = now, time_s
        unfinished = any(not state or not state[-1] for path, state in now.items() if state != self._done.get(path))
        if now == self._done or time_s - self._since_s < (RETURNED_S if unfinished else SETTLED_S):
            return False
        self._done = now
        return True

    def include(self, now: State) -> None:
        """Take the state of files that were not watched so far as unchanged."""
        added = {path: state for path, state in now.items() if path not in self._done}
        dropped = [path for path in self._done if path not in now]
        self._done = {path: state for path, state in {**self._done, **added}.items() if path not in dropped}
        self._seen = {path: self._seen.get(path, state) for path, state in now.items()}


def files_of(file: Path) -> set[Path]:
    """Return the files that a pipeline file names, itself included; of one with problems, those that are known."""
    found, named = {file}, [file]
    while named:
        more = {Path(one) for one in named_pipelines(named.pop())} - found
        found |= more
        named += more
    try:
        checked = examine(load_file(file))
    except WeftlineError:
        return found
    for one in checked.steps.values():
        found.update(one.files)
        base_dir = one.step.base_dir or checked.pipeline.base_dir
        for text in (one.reference, *texts_of(plain(one.config))) if one.user_code else ():
            try:
                found.add(locate(text, base_dir, "").path)
            except (ConfigError, OSError):
                continue
    return found


def state_of(files: Iterable[Path]) -> State:
    """Return the state of files, and of the files below folders."""
    wanted = list(files)
    found = {one.path: (one.inode, one.ctime_ns, one.size_bytes) for one in identities(wanted)}
    return {**{str(path): () for path in wanted if not is_folder(path)}, **found}


class Watch:
    """Reloads pipelines when their files change. files: pipeline files by name.

    Errors of looking at the files are logged, and the files are looked at again.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._pipelines = {name: _Watched(file) for name, file in files.items()}

    async def look(self) -> None:
        """Record the state of the files, which are not loaded yet; later saves count."""
        for one in self._pipelines.values():
            try:
                await one.is_due()
            except Exception as error:
                one.log(error)

    async def run(self, watched: Callable[[str], bool], reload: Callable[[str], Awaitable[object]]) -> None:
        """Reload pipelines whose files change, until cancelled.

        watched: returns whether the pipeline of a name is to be reloaded now.
        reload:  reloads a pipeline; its WeftlineErrors have been reported.
        """
        while True:
            for name, one in self._pipelines.items():
                try:
                    if await one.is_due() and watched(name):
                        await one.act(partial(reload, name))
                except WeftlineError:
                    continue
                except Exception as error:
                    one.log(error)
            await asyncio.sleep(POLL_S)


class _Watched:
    """The files of one pipeline."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._paths: set[Path] = set()
        self._changes: Changes | None = None
        self._logged = ""

    async def is_due(self) -> bool:
        """Look at the files; return True once for each change. The first look finds none."""
        if self._changes is None:
            self._paths = await asyncio.to_thread(files_of, self._file)
            self._changes = Changes(await asyncio.to_thread(state_of, self._paths))
        now = await asyncio.to_thread(state_of, self._paths)
        return self._changes.due(now, time.monotonic())

    async def act(self, reload: Callable[[], Awaitable[object]]) -> None:
        """Reload the pipeline, and watch the files that it has then; of a failed reload, those of both versions."""
        await self._include(self._paths)  # before it loads: what changes meanwhile counts
        await reload()
        await self._include(set())
        self._logged = ""

    async def _include(self, paths: set[Path]) -> None:
        self._paths = paths | await asyncio.to_thread(files_of, self._file)
        if self._changes is not None:
            self._changes.include(await asyncio.to_thread(state_of, self._paths))

    def log(self, error: Exception) -> None:
        """Log an error, once while it stays."""
        what = f"{type(error).__name__}: {error}"
        if what != self._logged:
            _log.error("%s cannot be watched: %s", self._file, what, exc_info=error)
        self._logged = what
