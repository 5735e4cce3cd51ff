"""Retry, bisection and rejection of tasks that failed or whose worker died.

When a worker dies, every task it was running is a suspect. A group of suspects is bisected: its halves run apart, so
that a task that kills its worker is alone after log2 of the batch size, and the other tasks succeed. A task that was
alone when its worker died is retried once, within the retry budget. If it kills a second worker, it fails and its
digest is quarantined. Work that must not run twice fails at once.

A worker is also killed when it waits on the device for one that died. The tasks of such a worker are not suspects. They
run again in isolation. Pure: the callers restart workers and queue tasks.

Quarantine: each deployment keeps the SHA-256 digests of items that killed their worker, at most DIGESTS_MAX, each for
one hour. Workers compare the digests; see engine/worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weftline.engine.scheduler.request import Task

if TYPE_CHECKING:
    from weftline.engine.scheduler.programs import Program

DIGESTS_MAX = 256
"""Most digests of a step; the oldest is dropped first."""

KEPT_MS = 3_600_000.0
"""Lifetime of a digest in milliseconds: one hour. Its item then runs again."""


class Quarantine:
    """Quarantined digests by deployment (`step`, as in messages), oldest first."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[bytes, float]] = {}  # step -> digest -> expiry, in rising order

    def add(self, step: int, digest: bytes, now_ms: float) -> bool:
        """Quarantine a digest for an hour; False if it was in quarantine, and its hour restarts."""
        self.forget(now_ms)
        digests = self._steps.setdefault(step, {})
        new = digests.pop(digest, None) is None
        digests[digest] = now_ms + KEPT_MS
        if len(digests) > DIGESTS_MAX:
            del digests[next(iter(digests))]
        return new

    def digests(self, step: int) -> tuple[bytes, ...]:
        """Return the quarantined digests of a step, oldest first."""
        return tuple(self._steps.get(step, ()))

    def forget(self, now_ms: float) -> list[int]:
        """Drop expired digests; return the steps whose digests changed, to update their workers."""
        changed = []
        for step, digests in list(self._steps.items()):
            old = [digest for digest, until_ms in digests.items() if until_ms <= now_ms]
            for digest in old:
                del digests[digest]
            if old:
                changed.append(step)
            if not digests:
                del self._steps[step]
        return changed


LONE_DEATHS_MAX = 2
"""Worker deaths after which a task fails, if it was alone in its batch."""

SPARED_MAX = 8
"""Deaths because of another task after which a task fails: bisecting a batch of 64 takes log2(64) + 2."""

TRIED_AGAIN = frozenset({"StepError", "WorkerDied", "Unavailable", "DeadlineExceeded", "LimitReached", "ModelError"})
"""Errors that are retried. An invalid input stays invalid."""


@dataclass(slots=True)
class Verdict:
    """Result of a worker death.

    groups:   tasks to run again, each group in isolation.
    failed:   tasks that failed, with the message.
    kept_out: (deployment, digest, program that had the item) to quarantine.
    """

    groups: list[list[Task]] = field(default_factory=list)
    failed: list[tuple[Task, str]] = field(default_factory=list)
    kept_out: list[tuple[int, bytes, Program]] = field(default_factory=list)


class Recovery:
    """Retry decisions, each within the retry budget of the task's program. Pure; owned by the scheduler."""

    def __init__(self) -> None:
        self.quarantine = Quarantine()

    def after_death(self, tasks: Sequence[Task], why: str, now_ms: float) -> Verdict:
        """Bisect, retry or fail the tasks that a worker was running when it died.

        tasks: those of requests that have not ended.
        """
        verdict = Verdict()
        again: list[Task] = []
        for task in tasks:
            task.deaths += 1
            if self._once(task):
                verdict.failed.append((task, f"the worker died while running this item ({why})"))
            elif len(tasks) > 1:
                again.append(task)
            elif task.deaths >= LONE_DEATHS_MAX:
                verdict.failed.append(
                    (task, f"{task.deaths} workers died while running this item ({why}); it is not retried")
                )
                if task.digest and self.quarantine.add(task.unit.deployment, task.digest, now_ms):
                    verdict.kept_out.append((task.unit.deployment, task.digest, task.request.program))
            elif task.request.program.retries.try_take():
                again.append(task)
            else:
                verdict.failed.append(
                    (task, f"the worker died ({why}), and the retry budget is used up (limits.retry_share)")
                )
        if len(again) > 1:
            half = (len(again) + 1) // 2
            verdict.groups = [again[:half], again[half:]]
        elif again:
            verdict.groups = [again]
        for task in again:
            task.attempts += 1
        return verdict

    def after_loss(self, tasks: Sequence[Task], why: str) -> Verdict:
        """Retry or fail the tasks of a worker that was killed because of another worker's death."""
        verdict = Verdict()
        for task in tasks:
            task.spared += 1
            if self._once(task):
                verdict.failed.append((task, f"the worker died while running this item ({why})"))
            elif task.spared > SPARED_MAX:
                reason = f"{task.spared} workers were killed while running this item ({why}); it is not retried"
                verdict.failed.append((task, reason))
            else:
                task.attempts += 1
                verdict.groups.append([task])
        return verdict

    def _once(self, task: Task) -> bool:
        """Return True if a task must not run twice."""
        sequence = task.unit.head.planned.sequence
        return task.streamed or sequence is not None or not all(one.planned.idempotent for one in task.unit.stages)

    def may_retry(self, task: Task, timed_out: bool) -> bool:
        """Return True if the step's `retry:` allows another attempt of a task that failed or timed out."""
        step = task.unit.head.planned
        retry = step.retry
        if retry is None or task.attempts > retry.attempts + task.deaths + task.spared:
            return False
        if timed_out and step.sequence is not None:
            return False
        return ("timeout" if timed_out else "error") in retry.on and not task.streamed

    def try_again_in_ms(self, task: Task, error: str, timed_out: bool, at_work: bool = False) -> float | None:
        """Return the delay in ms before a failed task is retried by its step's `retry:`; None: it is not.

        at_work: a worker may still be running it. A step that is not idempotent is then not retried. An item of a
                 sequence that timed out is not retried either, because the items behind it have already started.
        """
        step = task.unit.head.planned
        retry = step.retry
        if retry is None or error not in TRIED_AGAIN or not self.may_retry(task, timed_out):
            return None
        if (at_work and not step.idempotent) or not task.request.program.retries.try_take():
            return None
        wait_ms = retry.wait_ms * 2 ** max(0, task.attempts - 1 - task.deaths - task.spared)
        task.attempts += 1
        return float(wait_ms)
