"""Versions of an open pipeline: the current one, the one that opens beside it, and the one that drains.

    enter      start a request in the current version; the request stays in it until `leave`
    reload     open the next version beside the current one, switch to it, drain the old one
    close      end all versions

`current` changes in one step. A request that meets a version which was retired in that moment retries with the new one,
so a reload loses no request.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from weftline.engine.gpus import Reservation
from weftline.engine.inputs import RequestInputs
from weftline.engine.planned_pipeline import PlannedPipeline, Source
from weftline.engine.runtime.event_loop import Runtime
from weftline.engine.runtime.opening import Progress
from weftline.engine.scheduler import events as ev
from weftline.errors import SessionClosed
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.reservations import Replan

DRAIN_POLL_S = 0.005
"""How often a drain checks for open requests."""

REPLACED = ev.Fail(-1, "RequestCancelled", "a new version took over, and the request was not finished within drain_s")
ENDED = ev.Fail(-1, "SessionClosed", "the session was closed before the request was finished")


class Version:
    """A running plan that requests enter and leave: its workers, its inputs, its GPU reservations. Thread-safe.

    Entering and leaving take no lock, because a stream may be dropped by the garbage collector inside one. Requests and
    the drain share single operations of a set only.
    """

    def __init__(self, number: int, plan: Plan, hold: Reservation, progress: Progress | None = None) -> None:
        self.number = number
        self.plan = plan
        self.hold = hold
        self.runtime = Runtime(plan, cache_dir(), progress=progress, hold=hold)
        self.inputs = RequestInputs(plan)
        self._open: set[int] = set()
        self._retired = False

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
        """Refuse new requests, wait up to `drain_s` for the open ones, then close; the rest fail with `end`."""
        self.retire()
        until = time.monotonic() + drain_s
        while self._open and not self.runtime.closed and time.monotonic() < until:
            time.sleep(DRAIN_POLL_S)
        self.runtime.close(end)
        self.inputs.close()


class Versions:
    """Opens, replaces and ends versions, and enters requests into the current one. Thread-safe.

    plan:    of the first version.
    machine: default machine to plan versions for; None: this machine.
    again:   plans the first version anew for the GPU memory that other sessions leave; None: it opens as
             planned, or not at all.
    hold:    returns the GPU reservations of the version of a number.
    current: the version that new requests enter.
    opening: the version that opens beside it, if any.
    """

    def __init__(
        self,
        plan: Plan,
        progress: Progress | None,
        machine: Machine | None,
        again: Replan | None,
        hold: Callable[[int], Reservation],
    ) -> None:
        self._progress = progress
        self._machine = machine
        self._again = again
        self._hold = hold
        self.current = Version(1, plan, hold(1), progress)
        self._ids = itertools.count(1)
        self._closed = False
        self._reloading = threading.Lock()
        self._changing = threading.Lock()  # guards `current` and the two below; never held for long
        self.opening: Version | None = None
        self._draining: Version | None = None

    @property
    def closed(self) -> bool:
        return self._closed or self.current.runtime.closed

    @property
    def draining(self) -> bool:
        """True while requests finish in the version before the current one."""
        return self._draining is not None

    def enter(self) -> tuple[Version, int]:
        """Enter the current version; return it and the new request's id."""
        request = next(self._ids)
        while not (version := self.current).enter(request):
            self._check_not_closed()  # else it was replaced in this moment
        return version, request

    def open(self, timeout_s: float | None) -> None:
        """Open the first version; see Session.open."""
        version = self.current
        plan = version.hold.reserve(version.plan, self._again, self._machine)
        if plan is not version.plan:  # planned anew for the GPU memory that is left
            self._exchange(version, plan)
        self.current.runtime.open(timeout_s)

    def reload(
        self,
        pipeline: Source | PlannedPipeline,
        timeout_s: float | None,
        drain_s: float,
        progress: Progress | None,
    ) -> int:
        """Open the next version, switch to it, end the old one, and return its number; see Session.reload."""
        with self._reloading:
            new = pipeline if isinstance(pipeline, PlannedPipeline) else PlannedPipeline.of(pipeline, self._machine)
            version = self._next_version(new, progress)
            try:
                with self._changing:
                    self._check_not_closed()
                    self.opening = version
                version.runtime.open(timeout_s)
                with self._changing:
                    self._check_not_closed()
                    old, self.current = self.current, version
                    self.opening, self._draining = None, old
            except BaseException:
                version.runtime.close()
                version.inputs.close()
                raise
            finally:
                self.opening = None
            try:
                old.drain(drain_s, REPLACED)
            finally:
                self._draining = None
            return version.number

    def close(self, drain_s: float) -> None:
        """Refuse new requests and end every version; see Session.close."""
        with self._changing:
            self._closed = True
            opening, draining, current = self.opening, self._draining, self.current
        if opening is not None:
            opening.drain(0.0, ENDED)
        current.retire()
        until = time.monotonic() + drain_s
        for version in (draining, current):
            if version is not None:
                version.drain(max(0.0, until - time.monotonic()), ENDED)

    def _exchange(self, version: Version, plan: Plan) -> None:
        """Replace the first version by one with another plan, unless another thread that opens it has."""
        with self._changing:
            self._check_not_closed()
            if self.current is not version:
                return
            try:
                self.current = Version(version.number, plan, version.hold, self._progress)
            except BaseException:
                version.hold.release()
                raise

    def _next_version(self, pipeline: PlannedPipeline, progress: Progress | None) -> Version:
        """Plan the next version for the GPU memory that is left, reserve it, and return the version."""
        number = self.current.number + 1
        hold = self._hold(number)
        try:
            plan = hold.reserve(pipeline.plan, pipeline.again, pipeline.machine or self._machine)
            return Version(number, plan, hold, progress)
        except BaseException:
            hold.release()
            raise

    def _check_not_closed(self) -> None:
        if self._closed:
            raise SessionClosed("the session is not open")


def cache_dir() -> Path:
    """Return the folder for compiled engines and the like: the user's cache (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "weftline"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "weftline"
