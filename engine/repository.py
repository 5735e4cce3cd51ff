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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from weftline.engine.engine import Engine
from weftline.engine.gpus import GpuReservations
from weftline.engine.machine import this_machine
from weftline.engine.planned_pipeline import graph_of, plan_group
from weftline.engine.runtime.opening import FailedBeside, Progress
from weftline.engine.session import DRAIN_S, Session, Source, load
from weftline.engine.versions import ENDED, Version, begin_over, drain, switch
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


@dataclass(slots=True)
class _Change:
    """Names that change together.

    progress: returns the progress callback of a name.
    begun:    first versions, which open already, until a name takes its own.
    refused:  names that cannot be loaded, and why.
    strict:   all of them change, or none.
    done:     the version or the error of each name so far.
    failure:  the first error of a strict change.
    opened:   the sessions to change, and the engines of their new versions, which the next ones join where they can.
    """

    progress: Callable[[str], Progress | None]
    begun: dict[str, Version] = field(default_factory=dict)
    refused: Mapping[str, WeftlineError] = field(default_factory=dict)
    strict: bool = False
    done: dict[str, int | WeftlineError] = field(default_factory=dict)
    opened: dict[str, Session] = field(default_factory=dict)
    engines: list[Engine] = field(default_factory=list)
    failure: WeftlineError | None = None

    def fail(self, name: str, error: WeftlineError) -> None:
        """Note that a name cannot change."""
        self.done[name] = error
        if self.strict and self.failure is None:
            self.failure = error

    def ended_by(self, error: BaseException | None) -> str:
        """Return why a name did not change that has no error of its own."""
        failed = next((name for name, one in self.done.items() if one is error), "")
        return f"{failed} could not be loaded: {error}" if failed else str(error)


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
        return self._change_one(name, source, timeout_s, drain_s, progress)

    def load_together(
        self,
        sources: Mapping[str, Source],
        *,
        progress: Callable[[str], Progress | None] = lambda name: None,
        strict: bool = False,
    ) -> Iterator[tuple[str, int | WeftlineError]]:
        """Open pipelines at once, under these names; yield each name with its version when it serves, or its error.

        They are planned together and share what they load (`weftline.pipelines.placement.sharing`): steps with equal
        load keys, and cores. Llm steps that use all remaining memory of a GPU divide it evenly. Names that serve are
        reloaded first, and change to their new versions in the same moment: no caller meets the new version of one and
        then the old one of another. A pipeline that cannot be planned (PipelineError) or opened (ModelError) leaves the
        others serving.

        progress: returns the progress callback of a name.
        strict:   change to all of them in the same moment, or, where one fails, to none: its error is raised.
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
        first = {name: one for name, one in sources.items() if name not in serving}
        groups = [sources] if strict else [sources.keys() & serving, *({name} for name in first)]
        try:
            for names in groups:
                group = {name: source for name, source in sources.items() if name in names}
                change = _Change(progress, begun, refused, strict)
                for name, done in self._change(group, change, None, DRAIN_S).items():
                    if isinstance(done, FailedBeside) and name in first and len(sources) > 1:
                        again[name] = sources[name]
                    else:
                        yield name, done
        finally:
            for version in begun.values():
                version.drain(0.0, ENDED)
        more = [again] if len(again) < len(sources) else [{name: source} for name, source in again.items()]
        for group in more if again else ():  # without the one that failed; each by itself where that is not known
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
        return self._change_one(name, source, timeout_s, drain_s, None)

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

    def _change_one(
        self, name: str, source: Source | None, timeout_s: float | None, drain_s: float, progress: Progress | None
    ) -> int:
        """Load or reload one name and return its version. source: None: its own."""
        done = self._change({name: source}, _Change(lambda name: progress), timeout_s, drain_s)[name]
        if isinstance(done, WeftlineError):
            raise done
        return done

    def _change(
        self, sources: Mapping[str, Source | None], change: _Change, timeout_s: float | None, drain_s: float
    ) -> dict[str, int | WeftlineError]:
        """Open versions one after the other, then change to all that opened in the same moment.

        Return the version or the error of each name, when the versions before have ended. sources: None: its own.
        """
        with ExitStack() as turns:
            wanted = self._wanted(sources, change, turns)
            try:
                with ExitStack() as versions:
                    for name in (name for name in sources if name in wanted):
                        self._open_version(name, *wanted[name], change, timeout_s, versions)
                    if change.failure is not None:
                        raise change.failure
                    before = switch([session.versions for session in change.opened.values()])
                    self._note_opened(wanted, change)
                    drain(before, drain_s)
            except BaseException as error:
                self._note_failures(wanted, change, error)
                raise
            self._note_failures(wanted, change)
        return {name: change.done[name] for name in sources}

    def _wanted(
        self, sources: Mapping[str, Source | None], change: _Change, turns: ExitStack
    ) -> dict[str, tuple[_Held, Source]]:
        """Take the turns of names, in the same order in every thread, and move them to loading."""
        found = dict[str, tuple[_Held, Source]]()
        for name, source in sorted(sources.items()):
            try:
                held = turns.enter_context(self._turn(name))
                source = source if source is not None else held.source
                if source is None:
                    raise self._unknown(name)
            except WeftlineError as error:
                change.fail(name, error)
                continue
            found[name] = held, source
        with self._lock:
            for held, _ in found.values():
                held.move("load")
        return found

    def _open_version(
        self, name: str, held: _Held, source: Source, change: _Change, timeout_s: float | None, versions: ExitStack
    ) -> None:
        """Open the next version of a name, or its first; note an error."""
        if change.failure is not None:
            return
        progress = change.progress(name)
        try:
            if name in change.refused:
                raise change.refused[name]
            session = held.session
            if session is None:
                session = held.session = self._first(name, source, progress, change)
                if self._closed:  # else `close` closes the session from here on, and aborts the opening
                    session.close()
                opening = session.versions.first(timeout_s)
            else:
                opening = session.versions.next(source, timeout_s, progress, lambda own: self._engines(change, own))
            change.engines.append(versions.enter_context(opening).engine)
            change.opened[name] = session
        except WeftlineError as error:
            change.fail(name, error)

    def _first(self, name: str, source: Source, progress: Progress | None, change: _Change) -> Session:
        """Return the session of a name that does not serve yet: over what another has loaded where that suffices."""
        begun = change.begun.pop(name, None)
        if begun is None:
            begun = begin_over(self._engines(change), graph_of(source), self._machine, 1)
        if begun is None:
            return load(source, self._machine).session(progress, name=name, gpus=self._gpus)
        return Session(begun.plan, progress, self._machine, name=name, gpus=self._gpus, first=begun)

    def _engines(self, change: _Change, *own: Engine) -> list[Engine]:
        """Return the engines of what opened in this change, then `own`, then those of all that serves."""
        with self._lock:
            sessions = [one.session for one in self._names.values() if one.session is not None]
        serving = [version.engine for one in sessions if (version := one.versions.current) is not None]
        return [*change.engines, *own, *serving]

    def _note_opened(self, wanted: Mapping[str, tuple[_Held, Source]], change: _Change) -> None:
        with self._lock:
            for name, session in change.opened.items():
                held, source = wanted[name]
                held.move("opened")
                held.source, held.why = source, ""
                change.done[name] = session.version

    def _note_failures(
        self, wanted: Mapping[str, tuple[_Held, Source]], change: _Change, error: BaseException | None = None
    ) -> None:
        """Note why names did not change. error: what ended the change of all of them."""
        with self._lock:
            for name, (held, source) in wanted.items():
                if held.state in (LOADING, RELOADING):
                    held.why = str(change.done.get(name, change.ended_by(error)))
                    if held.state == LOADING:
                        held.session, held.source = None, source
                    held.move("failed")

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
