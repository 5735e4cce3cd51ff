"""Sessions by name in one process: load, reload and unload pipelines while others serve.

    with weftline.Repository() as pipelines:
        pipelines.load("ocr", "ocr.yaml")
        print(pipelines.get("ocr").run(photo=...)["text"])
        pipelines.reload("ocr")                 # read the file again; the old version serves until the new one is open
        print(pipelines.index())

Thread-safe. Operations on one name are serialised; those on different names run in parallel. If a new version cannot be
planned or opened, the old one keeps serving.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from weftline.engine.engine import Engine
from weftline.engine.gpus import GpuReservations
from weftline.engine.machine import this_machine
from weftline.engine.planned_pipeline import graph_of, plan_group
from weftline.engine.runtime.opening import FailedBeside, Progress
from weftline.engine.session import DRAIN_S, Session, Source, load
from weftline.engine.versions import ENDED, Version, begin_over
from weftline.errors import InputError, LimitReached, SessionClosed, WeftlineError
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.sharing import groups_of
from weftline.pipelines.spec.graph import Pipeline

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
"""Life cycle of a name: (state, event) -> state."""

PIPELINES_MAX = 64
"""Default limit on names."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Entry:
    """State of one name.

    state:   'loading', 'ready', 'reloading', 'draining' or 'failed'.
    ready:   True if every step is ready for requests.
    why:     reason why it is not ready or the last load failed; '' without one.
    version: number of the version that serves; 0 if none does.
    """

    name: str
    state: str
    ready: bool
    why: str
    version: int


@dataclass(slots=True)
class _Held:
    """One name. `turn` is the lock of the operation that changes it; the repository's lock guards the other fields.

    users: threads that hold or wait for `turn`; an absent name without users is removed.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    state: str = ABSENT
    session: Session | None = None
    source: Source | None = None
    why: str = ""

    def move(self, event: str) -> None:
        """Change the state; RuntimeError for a transition that the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"a pipeline that is {self.state} cannot be {event}; allowed: {allowed}")
        self.state = to


class Repository:
    """Open sessions by name. Close it, or use it in a with statement: that closes every session.

    Pipelines that are loaded together have one engine, and so does one that is loaded later where the engine has all it
    needs. Any other has an engine of its own, which is planned for the GPU memory that is left, and refused if it does
    not fit; its CPU cores are planned as if it were alone.

    pipelines_max: limit on names.
    machine:       the machine to place them on; this machine by default.
    gpus:          the GPU reservations to share; None: those of this process.
    """

    def __init__(
        self, *, pipelines_max: int = PIPELINES_MAX, machine: Machine | None = None, gpus: GpuReservations | None = None
    ) -> None:
        self._pipelines_max = pipelines_max
        self._machine = machine
        self._gpus = gpus or GpuReservations.of_process()
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
        """Open a pipeline under a name and return its version; reload it if the name serves already.

        PipelineError, ModelError: it cannot be planned or opened; an old version keeps serving.
        progress: called with (step, phrase, fraction) while models load, from another thread.
        """
        with self._turn(name) as held:
            return self._load(name, held, source, timeout_s, drain_s, progress)

    def load_together(
        self, sources: Mapping[str, Source], *, progress: Callable[[str], Progress | None] = lambda name: None
    ) -> Iterator[tuple[str, int | WeftlineError]]:
        """Open pipelines at once, under these names; yield each name with its version when it serves, or its error.

        They are planned together and share what they load (`weftline.pipelines.placement.sharing`): steps with equal
        load keys, and cores. Llm steps that use all remaining memory of a GPU divide it evenly. Names that serve are
        reloaded. A pipeline that cannot be planned (PipelineError) or opened (ModelError) leaves the others serving.

        progress: returns the progress callback of a name.
        """
        serving = {entry.name for entry in self.index() if entry.state in (READY, RELOADING)}
        again: dict[str, Source] = {}
        graphs: dict[str, Pipeline] = {}
        refused: dict[str, WeftlineError] = {}
        for name in sources.keys() - serving:
            try:
                graphs[name] = graph_of(sources[name])
            except WeftlineError as error:
                refused[name] = error
        begun = self._begin_together({name: graphs[name] for name in sources if name in graphs}, refused, progress)
        try:
            for name, source in sources.items():
                begin = begun.pop(name, None)
                done: int | WeftlineError
                try:
                    with self._turn(name) as held:
                        why = refused.get(name)
                        done = self._load(name, held, source, None, DRAIN_S, progress(name), begin, why)
                except WeftlineError as failure:
                    done = failure
                    if begin is not None:
                        begin.drain(0.0, ENDED)
                        if isinstance(failure, FailedBeside) and len(sources) > 1:
                            again[name] = source
                            continue
                yield name, done
        finally:
            for version in begun.values():
                version.drain(0.0, ENDED)
        groups = [again] if len(again) < len(sources) else [{name: source} for name, source in again.items()]
        for group in groups if again else ():  # without the one that failed; each by itself where that is not known
            yield from self.load_together(group, progress=progress)

    def _begin_together(
        self,
        graphs: Mapping[str, Pipeline],
        refused: dict[str, WeftlineError],
        progress: Callable[[str], Progress | None],
    ) -> dict[str, Version]:
        """Start pipelines in one engine for each GPU policy; add the errors of those that cannot start to `refused`."""
        begun: dict[str, Version] = {}
        machine = self._machine or this_machine()
        for names in groups_of(graphs):
            hold = self._gpus.reservation(", ".join(names), self._gpus.new_session())
            try:
                shared, unplanned = plan_group({name: graphs[name] for name in names}, machine, hold)
                engine = Engine(shared, hold)
                programs = engine.start({name: progress(name) for name in shared.programs})
            except WeftlineError as error:
                hold.release()
                refused |= dict.fromkeys(names, error)
                continue
            except BaseException:
                hold.release()
                raise
            refused |= unplanned
            begun |= {name: Version(1, engine, id, shared.programs[name].plan) for name, id in programs.items()}
        return begun

    def reload(
        self, name: str, source: Source | None = None, *, timeout_s: float | None = None, drain_s: float = DRAIN_S
    ) -> int:
        """Replace a pipeline by a new version, from its own source unless another is passed.

        Returns when the old version has ended: its requests have `drain_s` to finish. InputError: no such name.
        """
        with self._turn(name) as held:
            if held.source is None:
                raise self._unknown(name)
            return self._load(name, held, source if source is not None else held.source, timeout_s, drain_s)

    def unload(self, name: str, drain_s: float = DRAIN_S) -> None:
        """Refuse new requests for a pipeline, wait up to `drain_s` for the open ones, and close it."""
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
        """Return the session of a name; InputError for an unknown name, SessionClosed if none serves."""
        held = self._names.get(name)
        session = held.session if held is not None else None
        if held is not None and session is not None and held.state in (READY, RELOADING):  # each request: without lock
            return session
        with self._lock:
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
        """Close every session, also those that are loading. Idempotent and thread-safe."""
        with self._lock:
            self._closed = True
            everything = list(self._names.values())
            sessions = [held.session for held in everything if held.session is not None]
        _at_once([session.close for session in sessions])
        for held in everything:
            with held.turn:  # wait for operations that were running
                pass

    def __enter__(self) -> Repository:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # inside

    @contextmanager
    def _turn(self, name: str) -> Iterator[_Held]:
        """Hold the lock of a name, for an operation that changes it."""
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
        begun: Version | None = None,
        refused: WeftlineError | None = None,
    ) -> int:
        """Load or reload a name. begun: its first version, which opens already; refused: why there is none."""
        with self._lock:
            held.move("load")
            serving = held.session if held.state == RELOADING else None
        try:
            if refused is not None:
                raise refused
            if serving is not None:
                serving.reload(source, timeout_s=timeout_s, drain_s=drain_s, progress=progress, others=self._engines)
            else:
                session = self._first(name, source, progress, begun)
                with self._lock:
                    self._check_open()
                    held.session = session  # from here on `close` closes it and aborts the opening
                session.open(timeout_s)
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

    def _first(self, name: str, source: Source, progress: Progress | None, begun: Version | None) -> Session:
        """Return the session of a name that does not serve yet: over what another has loaded where that suffices."""
        if begun is None:
            begun = begin_over(self._engines(), graph_of(source), self._machine, 1)
        if begun is None:
            return load(source, self._machine).session(progress, name=name, gpus=self._gpus)
        return Session(begun.plan, progress, self._machine, name=name, gpus=self._gpus, first=begun)

    def _engines(self) -> list[Engine]:
        """Return the engines of what serves now."""
        with self._lock:
            sessions = [one.session for one in self._names.values() if one.session is not None]
        return [engine for one in sessions if (engine := one.engine) is not None]

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
    return Entry(name, state, health.ready, health.summary or why, session.version)


def _at_once(calls: list[Callable[[], None]]) -> None:
    """Call all functions in threads and wait: each may take its workers' whole grace time."""
    threads = [threading.Thread(target=call, name="weftline-close") for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
