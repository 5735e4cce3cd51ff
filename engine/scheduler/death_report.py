"""The report of a worker's death, one line of the log: step, cause, tasks, and what happens next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.workers import GIVEN_UP, LEAVING, STARTING, STOPPED, WorkerState

DEVICE_LOST_HOW = "exit code 70"
"""Exit of a worker whose device is lost: `DEVICE_LOST` of engine/worker/main.py."""

CLEAN_EXIT = "exit code 0"

REQUESTS_SHOWN_MAX = 8
"""Most request numbers in the line."""


def cause_of(worker: WorkerState, event: ev.WorkerDied) -> str:
    """Return the cause of a death, before the worker's state changes."""
    if worker.failed:
        return ev.OPEN_FAILED
    if worker.why:
        return ev.DEPENDENT if worker.spared else worker.cause
    if event.how == DEVICE_LOST_HOW:
        return ev.DEVICE_LOST
    return event.cause


@dataclass(slots=True)
class DeathReport:
    """Facts about one death. Filled by failures.py while it handles the death.

    step:     names of the steps that it ran, or of all its steps when it ran none.
    requests: those of the tasks that it was running.
    waiting:  tasks that waited for it: nothing is held against them.
    """

    name: str
    step: str
    how: str
    cause: str
    state_before: str
    requests: Sequence[int] = ()
    waiting: int = 0
    retried: int = 0
    bisected: int = 0
    failed: int = 0
    quarantined: int = 0
    sequences: int = 0
    last: str = ""

    @property
    def expected(self) -> bool:
        """True for the end of a worker that was closed because its steps sleep."""
        return self.state_before == LEAVING and self.how == CLEAN_EXIT

    def line(self, worker: WorkerState, now_ms: float) -> tuple[str, str]:
        """Return the report, and what happens next, as two phrases. worker: its state after the death."""
        when = {STARTING: " while it started", LEAVING: " while its steps went to sleep"}.get(self.state_before, "")
        how = " ".join(self.how.split())  # one line
        parts = [f"worker {self.name} died{when}: {how} ({self.cause})", f"step {self.step}", self._held()]
        if self.last:
            parts.append(f"last line {self.last!r:.300}")
        return "; ".join(parts), "; ".join([*self._fate(), _start(worker, now_ms)])

    def _held(self) -> str:
        if not self.requests:
            return "it ran no task"
        shown = ", ".join(map(str, self.requests[:REQUESTS_SHOWN_MAX]))
        more = ", ..." if len(self.requests) > REQUESTS_SHOWN_MAX else ""
        return f"it ran {_count(len(self.requests), 'task')} (requests {shown}{more})"

    def _fate(self) -> list[str]:
        counted = (
            (self.retried, "task", "retried"),
            (self.bisected, "task", "bisected"),
            (self.failed, "task", "failed"),
            (self.quarantined, "input", "quarantined"),
            (self.waiting, "waiting task", "queued again"),
            (self.sequences, "sequence", "lost"),
        )
        return [f"{_count(count, what)} {then}" for count, what, then in counted if count]


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _start(worker: WorkerState, now_ms: float) -> str:
    if worker.state == GIVEN_UP:
        return "given up, because it keeps failing to start"
    if worker.state == STOPPED or worker.start_ms is None:
        return "it starts when a step of it is needed"
    return f"restart in {worker.start_ms - now_ms:.0f} ms"
