"""Versions of an open pipeline: the current one, the one that opens beside it, and the one that drains.

    enter      start a request in the current version; the request stays in it until `leave`
    reload     open the next version beside the current one, switch to it, drain the old one
    close      end all versions

A version is a program of an engine. The next one is a program of the same engine where that has loaded all it needs:
then no model is touched. Otherwise it has an engine of its own.

`current` changes in one step, that of several sessions too (`switch`). A request that meets a version which was retired
in that moment retries with the new one, so a reload loses no request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from weftline.engine.engine import Engine
from weftline.engine.gpus import Reservation
from weftline.engine.inputs import RequestInputs
from weftline.engine.planned_pipeline import PlannedPipeline, Source, graph_of, reserved
from weftline.engine.runtime.opening import Progress
from weftline.engine.scheduler import events as ev
from weftline.errors import SessionClosed
from weftline.nodes.user_code import check_not_imported
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.graph import Pipeline

DRAIN_POLL_S = 0.005
"""How often a drain checks for open requests."""

REPLACED = ev.Fail(-1, "RequestCancelled", "a new version took over, and the request was not finished within drain_s")
ENDED = ev.Fail(-1, "SessionClosed", "the session was closed before the request was finished")


class Version:
    """A program that requests enter and leave, and their inputs. Thread-safe.

    Entering and leaving take no lock, because a stream may be dropped by the garbage collector inside one. Requests and
    the drain share single operations of a set only.

    program: its id in the engine.
    plan:    its own.
    """

    def __init__(self, number: int, engine: Engine, program: int, plan: Plan) -> None:
        self.number = number
        self.plan = plan
        self.engine = engine
        self.program = program
        self.runtime = engine.runtime
        self.inputs = RequestInputs(plan, program)
        self._open: set[int] = set()
        self._retired = False
        self._ended = False

    @property
    def closed(self) -> bool:
        """True once it has ended: memory of its requests may be unmapped."""
        return self._ended or self.runtime.closed

    def enter(self, request: int) -> bool:
        """Keep this version alive until the request leaves; False if it was retired."""
        self._open.add(request)
        if self._retired:  # read after the add: the drain does both in the other order
            self._open.discard(request)
            return False
        return True

    def leave(self, request: int) -> None:
        """Remove a request. Idempotent, and takes no lock."""
        self._open.discard(request)

    def retire(self) -> None:
        """Refuse new requests."""
        self._retired = True

    def drain(self, drain_s: float, end: ev.Fail) -> None:
        """Refuse new requests, wait up to `drain_s` for the open ones, then end; the rest fail with `end`."""
        self.retire()
        until = time.monotonic() + drain_s
        while self._open and not self.closed and time.monotonic() < until:
            time.sleep(DRAIN_POLL_S)
        self._ended = True
        self.engine.end_program(self.program, self._open.copy(), end)
        self.inputs.close()


Begin = Callable[[], Version]
"""Starts a version of a session; its workers may still be opening."""


class _Switch:
    """Moment at which sessions change to their next versions. made: True from then on."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = False


class Versions:
    """Opens, replaces and ends versions, and enters requests into the current one. Thread-safe.

    begin:   starts the first version, or returns it where it was started before.
    plan:    of the first version.
    machine: default machine to plan versions for; None: this machine.
    hold:    returns the GPU reservations of the version of a number, where it has an engine of its own.
    opening: the version that opens, or is open and not switched to yet, or was started before this, if any.
    """

    def __init__(
        self,
        begin: Begin | Version,
        plan: Plan,
        machine: Machine | None,
        hold: Callable[[int], Reservation],
    ) -> None:
        self._begin: Begin | None = begin if not isinstance(begin, Version) else lambda: begin
        self._plan = plan
        self.machine = machine
        self._hold = hold
        self._current: Version | None = None
        self._next: tuple[_Switch, Version] | None = None  # current once the switch is made
        self._closed = False
        self._reloading = threading.Lock()
        self._changing = threading.Lock()  # guards the two above and the two below; never held for long
        self.opening = begin if isinstance(begin, Version) else None
        self._draining: Version | None = None

    @property
    def current(self) -> Version | None:
        """The version that new requests enter; None before the first is open."""
        coming = self._next  # read first: `settle` sets the other attribute before it
        return self._current if coming is None or not coming[0].made else coming[1]

    @property
    def closed(self) -> bool:
        return self._closed or (self.current is not None and self.current.closed)

    @property
    def plan(self) -> Plan:
        """The plan of the current version, or of the first one before it is open."""
        return self.current.plan if self.current is not None else self._plan

    @property
    def draining(self) -> bool:
        """True while requests finish in the version before the current one."""
        return self._draining is not None

    def enter(self) -> tuple[Version, int]:
        """Enter the current version; return it and the new request's id."""
        while (version := self.current) is not None:
            request = next(version.runtime.requests)
            if version.enter(request):
                return version, request
            self._check_not_closed()  # else it was replaced in this moment
        raise not_open()

    def open(self, timeout_s: float | None) -> None:
        """Open the first version; see Session.open."""
        with self.first(timeout_s):
            switch([self])

    def reload(
        self, pipeline: Source | PlannedPipeline, timeout_s: float | None, drain_s: float, progress: Progress | None
    ) -> int:
        """Open the next version, switch to it, end the old one, and return its number; see Session.reload."""
        with self.next(pipeline, timeout_s, progress) as version:
            drain(switch([self]), drain_s)
        return version.number

    @contextmanager
    def first(self, timeout_s: float | None) -> Iterator[Version]:
        """Open the first version, for `switch`; one that was not switched to ends with the context, and the session."""
        check_not_imported()
        with self._reloading:
            self._check_not_closed()
            begin, self._begin = self._begin, None
            if begin is None:
                raise SessionClosed("a session is opened once; open a new one")
            try:
                with self._opened(begin, timeout_s) as version:
                    yield version
            finally:
                if self.current is None:
                    self._closed = True

    @contextmanager
    def next(
        self,
        pipeline: Source | PlannedPipeline,
        timeout_s: float | None,
        progress: Progress | None,
        engines: Callable[[Engine], Iterable[Engine]] = lambda own: (own,),
    ) -> Iterator[Version]:
        """Open the next version, for `switch`; one that was not switched to ends with the context.

        engines: returns those that may have loaded what it needs, given the current version's own.
        """
        with self._reloading:
            current = self.current
            self._check_not_closed()
            if current is None:
                raise not_open()
            with self._opened(
                lambda: self._next_version(current, pipeline, progress, engines(current.engine)), timeout_s
            ) as version:
                yield version

    def close(self, drain_s: float) -> None:
        """Refuse new requests and end every version; see Session.close."""
        with self._changing:
            self._closed = True
            opening, draining, current = self.opening, self._draining, self.current
        if opening is not None:
            opening.drain(0.0, ENDED)
        if current is not None:
            current.retire()
        until = time.monotonic() + drain_s
        for version in (draining, current):
            if version is not None:
                version.drain(max(0.0, until - time.monotonic()), ENDED)

    @contextmanager
    def _opened(self, begin: Begin, timeout_s: float | None) -> Iterator[Version]:
        """Start a version and wait until it is open; end it with the context unless it is the current one then."""
        version = begin()
        try:
            with self._changing:
                self._check_not_closed()
                self.opening = version
            version.runtime.wait_open(version.program, timeout_s)
            yield version
        finally:
            self.opening = self._draining = None
            if self.current is not version:
                version.drain(0.0, ENDED)

    def _next_version(
        self,
        current: Version,
        pipeline: Source | PlannedPipeline,
        progress: Progress | None,
        engines: Iterable[Engine],
    ) -> Version:
        """Start the next version: over what is loaded where that suffices, else in an engine of its own."""
        number = current.number + 1
        source = pipeline.graph if isinstance(pipeline, PlannedPipeline) else graph_of(pipeline)
        machine = (pipeline.machine if isinstance(pipeline, PlannedPipeline) else None) or self.machine
        over = begin_over(engines, source, machine, number) if source is not None else None
        if over is not None:
            return over
        new = pipeline if isinstance(pipeline, PlannedPipeline) else PlannedPipeline.of(graph_of(pipeline), machine)
        return begin_alone(new, machine, self._hold(number), number, progress)

    @contextmanager
    def prepare(self, now: _Switch) -> Iterator[None]:
        """Hold the session's lock, with the version that opened as the one to change to; for `switch`."""
        with self._changing:
            self._check_not_closed()
            if self.opening is None:
                raise not_open()
            self._next = now, self.opening
            try:
                yield
            finally:
                self._next = None

    def settle(self) -> list[Version]:
        """Complete a switch that was made; return the version before, which drains. For `switch`."""
        before = self._draining = self._current
        self._current, self.opening = self.opening, None
        return [before] if before is not None else []

    def _check_not_closed(self) -> None:
        if self._closed:
            raise not_open()


def switch(sessions: Sequence[Versions]) -> list[Version]:
    """Make the versions that opened the current ones of their sessions, all at once; return those before them.

    SessionClosed, without a change: one of the sessions was closed.
    """
    now, before = _Switch(), list[Version]()
    with ExitStack() as changing:
        for one in sessions:
            changing.enter_context(one.prepare(now))
        now.made = True
        for one in sessions:
            before += one.settle()
    return before


def drain(versions: Sequence[Version], drain_s: float) -> None:
    """Wait up to `drain_s` for the open requests of versions that were replaced, then end them."""
    for one in versions:
        one.retire()
    until = time.monotonic() + drain_s
    for one in versions:
        one.drain(max(0.0, until - time.monotonic()), REPLACED)


def begin_over(engines: Iterable[Engine], pipeline: Pipeline, machine: Machine | None, number: int) -> Version | None:
    """Start a version over what one of these engines has loaded; None when it needs something else."""
    for engine in dict.fromkeys(engines):
        planned = engine.over(pipeline, machine)
        program = engine.open_program(planned) if planned is not None else None
        if planned is not None and program is not None:
            return Version(number, engine, program, planned.plan)
    return None


def begin_alone(
    pipeline: PlannedPipeline, machine: Machine | None, hold: Reservation, number: int, progress: Progress | None
) -> Version:
    """Start a version in an engine of its own, planned for the GPU memory that is left."""
    try:
        shared = reserved(pipeline.shared, hold, pipeline.again, machine)
        engine = Engine(shared, hold)
        ((name, program),) = engine.start({pipeline.name: progress}).items()
        return Version(number, engine, program, shared.programs[name].plan)
    except BaseException:
        hold.release()
        raise


def not_open() -> SessionClosed:
    """Return the error of a session that is not open."""
    return SessionClosed("the session is not open")
