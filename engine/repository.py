"""Many pipelines by name in one process: loaded, replaced and unloaded while others serve.

    with weftline.Repository() as pipelines:
        pipelines.load("ocr", "ocr.yaml")
        print(pipelines.get("ocr").run(photo=...)["text"])
        pipelines.reload("ocr")                 # read again; the version that serves stays until the new one stands
        print(pipelines.index())

Thread-safe. What is done to one name happens one thing after the other; different names do not wait for each other. A
version that cannot be planned or opened leaves the one that serves.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from weftline.engine.runtime import Progress
from weftline.engine.session import DRAIN_S, Session, Source, load
from weftline.engine.shared_gpus import GPUS, SharedGpus
from weftline.errors import InputError, LimitReached, SessionClosed
from weftline.pipelines.place import Machine

ABSENT, LOADING, READY, RELOADING, DRAINING, FAILED = "absent", "loading", "ready", "reloading", "draining", "failed"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (ABSENT, "load"): LOADING,
    (LOADING, "opened"): READY,
    (LOADING, "failed"): FAILED,
    (FAILED, "load"): LOADING,
    (FAILED, "unload"): ABSENT,
    (READY, "load"): RELOADING,
    (RELOADING, "opened"): READY,
    (RELOADING, "failed"): READY,
    (READY, "unload"): DRAINING,
    (DRAINING, "closed"): ABSENT,
}
"""A name's life: (state, event) -> state."""

PIPELINES_MAX = 64
"""Most names at a time, when nobody says."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a repository says about one name.

    state:   'loading', 'ready', 'reloading', 'draining' or 'failed'.
    ready:   whether requests can be answered now.
    why:     what is wrong, or why the last load failed; '' when nothing is and it did not.
    version: the number of the version that serves; 0 when none does.
    """

    name: str
    state: str
    ready: bool
    why: str
    version: int


@dataclass(slots=True)
class _Held:
    """One name. `turn` is held by whoever changes it; the rest is changed under the repository's lock.

    users: how many threads have or wait for the turn; a name that is absent and has none is forgotten.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    state: str = ABSENT
    session: Session | None = None
    source: Source | None = None
    why: str = ""

    def move(self, event: str) -> None:
        """Go to the next state; RuntimeError for a move the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"a pipeline that is {self.state} cannot be {event}; allowed: {allowed}")
        self.state = to


class Repository:
    """Open pipelines by name. Close it, or use it in a with statement; then nothing of them is left.

    They share the GPUs of this process with each other and with everything else that is open in it: each is placed on
    what the others have left, and one for which too little is left is refused. Cores are planned as if each were alone.

    pipelines_max: most names at a time.
    machine:       what to place them on; this machine when left out.
    gpus:          whose GPUs they share; for tests.
    """

    def __init__(
        self, *, pipelines_max: int = PIPELINES_MAX, machine: Machine | None = None, gpus: SharedGpus = GPUS
    ) -> None:
        self._pipelines_max = pipelines_max
        self._machine = machine
        self._gpus = gpus
        self._lock = threading.Lock()
        self._names: dict[str, _Held] = {}
        self._closed = False

    # operations

    def load(
        self,
        name: str,
        source: Source,
        *,
        timeout_s: float | None = None,
        drain_s: float = DRAIN_S,
        progress: Progress | None = None,
    ) -> int:
        """Open a pipeline under a name and return its version; under a name that serves, as `reload`.

        PipelineError, ModelError: it cannot be planned, or opened; a version that serves goes on.
        progress: called with (step, phrase, fraction) while models load, from another thread.
        """
        with self._turn(name) as held:
            return self._load(name, held, source, timeout_s, drain_s, progress)

    def load_together(
        self, sources: Mapping[str, Source], *, progress: Callable[[str], Progress | None] = lambda name: None
    ) -> Iterator[tuple[str, int]]:
        """Open pipelines one after the other under these names, and yield each name and its version when it serves.

        What they take of GPUs is claimed for all before the first opens. So each leaves the others their part: llm
        steps that take what is left of a GPU divide it evenly.

        Names that serve are reloaded when it is their turn. PipelineError, ModelError: as for `load`; those that come
        after it are not opened, and those before it serve.
        progress: returns, for a name, what is called while its models load.
        """
        serving = {entry.name for entry in self.index() if entry.state in (READY, RELOADING)}
        planned = {name: load(source, self._machine) for name, source in sources.items() if name not in serving}
        sessions = {name: one.session(progress(name), name=name, gpus=self._gpus) for name, one in planned.items()}
        wanted = [
            (sessions[name].hold, one.again)
            for name, one in planned.items()
            if one.plan.budgets and one.again is not None
        ]
        try:
            if len(wanted) > 1:
                self._gpus.take_together(wanted, self._machine)
            for name, source in sources.items():
                with self._turn(name) as held:
                    version = self._load(name, held, source, None, DRAIN_S, progress(name), sessions.get(name))
                sessions.pop(name, None)
                yield name, version
        finally:
            for session in sessions.values():
                session.close()

    def reload(
        self, name: str, source: Source | None = None, *, timeout_s: float | None = None, drain_s: float = DRAIN_S
    ) -> int:
        """Replace a pipeline by a new version, from its own source again unless another is given.

        Returns when the old version has ended: its requests finish, for at most `drain_s`. InputError: no such name.
        """
        with self._turn(name) as held:
            if held.source is None:
                raise self._unknown(name)
            return self._load(name, held, source if source is not None else held.source, timeout_s, drain_s)

    def unload(self, name: str, drain_s: float = DRAIN_S) -> None:
        """Take no more requests for a pipeline, let the open ones finish for at most `drain_s`, and end it."""
        with self._turn(name) as held:
            if held.state == ABSENT:
                raise self._unknown(name)
            session = held.session
            with self._lock:
                held.move("unload")
            if session is not None:
                session.close(drain_s)
                with self._lock:
                    held.move("closed")
            with self._lock:
                held.session, held.source, held.why = None, None, ""

    def get(self, name: str) -> Session:
        """Return the session that serves a name: InputError for an unknown name, SessionClosed when none serves now."""
        with self._lock:
            held = self._names.get(name)
            if held is not None and held.session is not None and held.state in (READY, RELOADING):
                return held.session
            if self._closed:
                raise SessionClosed("the repository is closed")
            if held is None or held.state == ABSENT:
                raise self._unknown(name)
            raise SessionClosed(f"pipeline {name} is {held.state}{held.why and ': ' + held.why}")

    def index(self) -> tuple[Entry, ...]:
        """Return every name with its state, sorted."""
        with self._lock:
            held = [(name, one.state, one.session, one.why) for name, one in sorted(self._names.items())]
        return tuple(_entry(*one) for one in held if one[1] != ABSENT)

    def close(self) -> None:
        """End every pipeline, also those that are being loaded. Safe to call twice, and from several threads."""
        with self._lock:
            self._closed = True
            everything = list(self._names.values())
            sessions = [held.session for held in everything if held.session is not None]
        _at_once([session.close for session in sessions])
        for held in everything:
            with held.turn:  # whoever was in the middle of something has noticed and left
                pass

    def __enter__(self) -> Repository:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # inside

    @contextmanager
    def _turn(self, name: str) -> Iterator[_Held]:
        """Wait until nobody else changes this name."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError("a pipeline's name has 1 to 128 letters, digits, dots, dashes and underscores")
        with self._lock:
            self._check_open()
            if name not in self._names and len(self._names) >= self._pipelines_max:
                raise LimitReached(f"{len(self._names)} pipelines are loaded; pipelines_max is {self._pipelines_max}")
            held = self._names.setdefault(name, _Held())
            held.users += 1
        try:
            with held.turn:
                with self._lock:
                    self._check_open()
                yield held
        finally:
            with self._lock:
                held.users -= 1
                if not held.users and held.state == ABSENT:
                    del self._names[name]

    def _load(
        self,
        name: str,
        held: _Held,
        source: Source,
        timeout_s: float | None,
        drain_s: float,
        progress: Progress | None = None,
        session: Session | None = None,
    ) -> int:
        """Load or reload a name. session: made for it, to be opened where none serves yet; None: it is made here."""
        with self._lock:
            held.move("load")
            serving = held.session if held.state == RELOADING else None
        try:
            if serving is not None:
                serving.reload(source, timeout_s=timeout_s, drain_s=drain_s, progress=progress)
            else:
                if session is None:
                    session = load(source, self._machine).session(progress, name=name, gpus=self._gpus)
                self._open(held, session, timeout_s)
        except BaseException as error:
            with self._lock:
                held.move("failed")
                held.why = str(error)
                if serving is None:
                    held.session = None
                    held.source = source
            raise
        with self._lock:
            held.move("opened")
            held.source, held.why = source, ""
            return held.session.version if held.session is not None else 0

    def _open(self, held: _Held, session: Session, timeout_s: float | None) -> None:
        with self._lock:
            self._check_open()
            held.session = session  # from here on `close` ends it, and with it the opening
        session.open(timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("the repository is closed")

    def _unknown(self, name: str) -> InputError:
        known = ", ".join(sorted(one for one, held in self._names.items() if held.state != ABSENT))
        return InputError(f"no pipeline is called {name:.128}; there are: {known or 'none'}")


def _entry(name: str, state: str, session: Session | None, why: str) -> Entry:
    if session is None or state not in (READY, RELOADING):
        return Entry(name, state, False, why or f"it is {state}", 0)
    health = session.health()
    return Entry(name, state, health.ready, health.told or why, session.version)


def _at_once(calls: list[Callable[[], None]]) -> None:
    """Call all of them side by side and wait: each may take its workers' whole grace."""
    threads = [threading.Thread(target=call, name="weftline-close") for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
