"""The versions of one session: the one that serves, the one that opens beside it, and the one that is left.

    enter      a request meets the current version, and keeps it until it leaves
    reload     opens the next beside it, lets it take over, drains the old one
    close      ends all there are

One moment decides who meets which version: `current` is changed in one step, and whoever met the old one just then and
was not let in any more looks again. No request is lost between two versions.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from weftline.engine.planned import PlannedPipeline, Source
from weftline.engine.runtime import Progress
from weftline.engine.scheduling import events as ev
from weftline.engine.shared_gpus import Again, Hold
from weftline.engine.version import Version
from weftline.errors import SessionClosed
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan

REPLACED = ev.Fail(-1, "RequestCancelled", "a new version took over, and the request was not finished within drain_s")
ENDED = ev.Fail(-1, "SessionClosed", "the session was closed before the request was finished")


class Versions:
    """Opens, replaces and ends versions, and lets requests in. Thread-safe.

    plan:    of the first version.
    machine: what versions are planned for where nobody says otherwise; None: this machine.
    again:   makes the first one's plan for a machine of whose GPUs others have something; None: it is opened as it is,
             or not at all.
    hold:    returns what the version of a number will hold of GPUs.
    current: the one that new requests meet.
    opening: the one that opens beside it, while it does.
    """

    def __init__(
        self,
        plan: Plan,
        progress: Progress | None,
        machine: Machine | None,
        again: Again | None,
        hold: Callable[[int], Hold],
    ) -> None:
        self._progress = progress
        self._machine = machine
        self._again = again
        self._hold = hold
        self.current = Version(1, plan, hold(1), progress)
        self._ids = itertools.count(1)
        self._closed = False
        self._reloading = threading.Lock()
        self._changing = threading.Lock()  # guards `current` and the two below, for moments only
        self.opening: Version | None = None
        self._draining: Version | None = None

    @property
    def closed(self) -> bool:
        return self._closed or self.current.runtime.closed

    @property
    def draining(self) -> bool:
        """Whether requests are still finishing in the version before the current one."""
        return self._draining is not None

    def enter(self) -> tuple[Version, int]:
        """Return the current version and a new request's id; the version stays until the request leaves it."""
        request = next(self._ids)
        while not (version := self.current).enter(request):
            self._check_not_closed()  # else it was replaced this very moment
        return version, request

    def open(self, timeout_s: float | None) -> None:
        """Open the first version; see Session.open."""
        version = self.current
        plan = version.hold.take(version.plan, self._again, self._machine)
        if plan is not version.plan:  # made for what others have left
            self._exchange(version, plan)
        self.current.runtime.open(timeout_s)

    def reload(
        self,
        pipeline: Source | PlannedPipeline,
        timeout_s: float | None,
        drain_s: float,
        progress: Progress | None,
    ) -> int:
        """Open the next version, let it take over, end the old one, and return its number; see Session.reload."""
        with self._reloading:
            new = pipeline if isinstance(pipeline, PlannedPipeline) else PlannedPipeline.of(pipeline, self._machine)
            version = self._beside(new, progress)
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
                raise
            finally:
                self.opening = None
            try:
                old.drain(drain_s, REPLACED)
            finally:
                self._draining = None
            return version.number

    def close(self, drain_s: float) -> None:
        """Let nobody in any more and end every version; see Session.close."""
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
        """Put one with another plan in the place of the first version, unless another thread that opens it has."""
        with self._changing:
            self._check_not_closed()
            if self.current is not version:
                return
            try:
                self.current = Version(version.number, plan, version.hold, self._progress)
            except BaseException:
                version.hold.give_back()
                raise

    def _beside(self, pipeline: PlannedPipeline, progress: Progress | None) -> Version:
        """Return the next version, planned for what the present one and others leave of GPUs, and holding that."""
        number = self.current.number + 1
        hold = self._hold(number)
        try:
            plan = hold.take(pipeline.plan, pipeline.again, pipeline.machine or self._machine)
            return Version(number, plan, hold, progress)
        except BaseException:
            hold.give_back()
            raise

    def _check_not_closed(self) -> None:
        if self._closed:
            raise SessionClosed("the session is not open")
