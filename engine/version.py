"""One version of an open pipeline: its plan, its workers, what it holds of GPUs, and who is using it.

A session has one current version. A reload opens the next beside it, lets new requests in there, and drains the old:
whoever is in it stays until the answer has been copied out, for so long as the drain allows.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from weftline.engine.intake import Intake
from weftline.engine.runtime import Progress, Runtime
from weftline.engine.scheduling import events as ev
from weftline.engine.shared_gpus import Hold
from weftline.pipelines.plan import Plan

DRAIN_NAP_S = 0.005
"""How often a drain looks whether everybody has left."""


class Version:
    """A running plan that callers enter and leave. Thread-safe.

    Entering and leaving take no lock, because a stream that is dropped leaves from wherever the garbage collector
    runs; single operations of a set are all that callers and the drain share.
    """

    def __init__(self, number: int, plan: Plan, hold: Hold, progress: Progress | None = None) -> None:
        self.number = number
        self.plan = plan
        self.hold = hold
        self.runtime = Runtime(plan, cache_dir(), progress=progress, hold=hold)
        self.intake = Intake(plan)
        self._inside: set[int] = set()
        self._retired = False

    def enter(self, request: int) -> bool:
        """Keep this version alive until `leave`; False when it lets nobody in any more."""
        self._inside.add(request)
        if self._retired:  # looked at after the step inside: the drain does it the other way round
            self._inside.discard(request)
            return False
        return True

    def leave(self, request: int) -> None:
        self._inside.discard(request)

    def retire(self) -> None:
        """Let nobody in any more."""
        self._retired = True

    def drain(self, drain_s: float, end: ev.Fail) -> None:
        """Let nobody in any more, wait up to `drain_s` until all have left, then close and end the rest by `end`."""
        self.retire()
        until = time.monotonic() + drain_s
        while self._inside and not self.runtime.closed and time.monotonic() < until:
            time.sleep(DRAIN_NAP_S)
        self.runtime.close(end)


def cache_dir() -> Path:
    """Where compiled engines and the like are kept: the user's cache folder (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "weftline"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "weftline"
