"""An engine: what is loaded, and the programs that use it.

    engine = Engine(shared, hold)
    programs = engine.start({"assistant": None})      # workers load; `wait_open` of each program follows
    planned = engine.over(changed, machine)           # a changed pipeline over what stands, or None
    program = engine.open_program(planned)            # touches no model
    engine.end_program(program, requests, end)        # the last one ends the engine

A *deployment* is a node that workers have opened, a *program* one version of one pipeline over deployments. Which steps
share is decided by `weftline.pipelines.placement.sharing`. A repository has one engine for the pipelines that it loads
together; any other session has a private one.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from weftline.engine.gpus import Reservation
from weftline.engine.machine import this_machine
from weftline.engine.runtime.event_loop import Runtime
from weftline.engine.runtime.opening import Progress
from weftline.engine.scheduler import events as ev
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.sharing import PlannedProgram, SharedPlan, over
from weftline.pipelines.spec.graph import Pipeline


class Engine:
    """A plan that is loaded, and the programs over it. Thread-safe.

    hold:    its GPU memory reservation; released when the engine ends.
    runtime: its event loop.
    """

    def __init__(self, shared: SharedPlan, hold: Reservation) -> None:
        self.shared = shared
        self.hold = hold
        self.runtime = Runtime(shared.plan, cache_dir(), hold=hold)
        self._lock = threading.Lock()
        self._programs: dict[int, PlannedProgram] = {}  # that take requests, or are about to

    def start(self, wanted: Mapping[str, Progress | None]) -> dict[str, int]:
        """Start the workers, open programs of the plan by name, and return their ids; see Runtime.start."""
        programs = [self.shared.programs[name] for name in wanted]
        with self._lock:
            ids = self.runtime.start(
                [(one.plan, one.deployments, progress) for one, progress in zip(programs, wanted.values(), strict=True)]
            )
            self._programs = dict(zip(ids, programs, strict=True))
        return dict(zip(wanted, ids, strict=True))

    def over(self, pipeline: Pipeline, machine: Machine | None) -> PlannedProgram | None:
        """Plan a pipeline over what is loaded; None when it needs something else. PipelineError: it has problems."""
        if self.shared.plan.debug:
            return None
        planned = over(self.shared, pipeline, machine or this_machine())
        with self._lock:
            return planned if planned is not None and self._stands(planned) else None

    def open_program(self, planned: PlannedProgram) -> int | None:
        """Open a program over what is loaded and return its id; None when that has ended meanwhile."""
        with self._lock:
            if not self._stands(planned):
                return None
            program = self.runtime.open_program(planned.plan, planned.deployments)
            self._programs[program] = planned
            return program

    def end_program(self, program: int, requests: Iterable[int], end: ev.Fail) -> None:
        """End a program, and fail these requests of it with `end`; end the engine with its last program."""
        with self._lock:
            self._programs.pop(program, None)
            last = not self._programs
            if not last:
                self.runtime.end_program(program, requests, end)
        if last:
            self.runtime.close(end)

    def _stands(self, planned: PlannedProgram) -> bool:
        """Return whether open programs keep all deployments of a program alive."""
        kept = {one for program in self._programs.values() for one in program.deployments}
        wanted = [one for one in planned.deployments if one >= 0]  # the scheduler evaluates the others
        return bool(self._programs) and kept.issuperset(wanted) and self.runtime.serves(wanted)


def cache_dir() -> Path:
    """Return the folder for compiled engines and the like: the user's cache (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "weftline"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "weftline"
