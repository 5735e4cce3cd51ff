"""Which steps rest as a whole, how each is in a word, and figures of its sleep for whoever watches.

A step rests from the moment its instances are told to sleep until none of them sleeps any more, whatever brought them
back: being woken, started on demand, or started again after a death. Pure; owned by Idleness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftline.engine.crew.crew import Crew
from weftline.engine.crew.member import WorkerState
from weftline.engine.crew.rest import ASLEEP, AWAKE, FALLING, WAKING
from weftline.engine.crew.supervisor import ASLEEP as GONE
from weftline.engine.crew.supervisor import LEAVING, READY
from weftline.pipelines.plan import PlannedStep


@dataclass(slots=True)
class Nap:
    """What became of one step that may sleep.

    slept:       how often it has, as a whole.
    woken:       how often somebody asked for it then and it could answer again.
    freed_bytes: what came free on its device the last time, all instances together.
    wake_ms:     how long the last waking took, from the first request for it until an instance could answer.
    called_ms:   since when it is asked for and cannot answer yet; None: it is not.
    """

    slept: int = 0
    woken: int = 0
    freed_bytes: int = 0
    wake_ms: float = 0.0
    called_ms: float | None = None


class Naps:
    """The naps of the steps that may sleep, which are `steps`, as indexes in the plan.

    resting: those of which some instance cannot answer because it sleeps.
    """

    def __init__(self, plan: Sequence[PlannedStep], crew: Crew, steps: Iterable[int]) -> None:
        self.resting: set[int] = set()
        self._steps = plan
        self._crew = crew
        self._naps = {step: Nap() for step in steps}

    def begin(self, step: int) -> None:
        """Instances of a step were told to sleep; it may rest already."""
        if step not in self.resting:
            self.resting.add(step)
            self._naps[step].slept += 1
            self._naps[step].freed_bytes = 0

    def freed(self, step: int, bytes: int) -> None:
        self._naps[step].freed_bytes += bytes

    def call(self, step: int, now_ms: float) -> None:
        """Somebody asks for a resting step; from then on he waits, unless an instance can answer."""
        nap = self._naps[step]
        if nap.called_ms is None and not any(_is_up(member, step) for member in self._members(step)):
            nap.called_ms = now_ms

    def goes_on(self, step: int, now_ms: float) -> bool:
        """Note whether a resting step can answer again, and whether it rests on; return that."""
        members, nap = self._members(step), self._naps[step]
        if nap.called_ms is not None and any(_is_up(member, step) for member in members):
            nap.wake_ms, nap.called_ms = now_ms - nap.called_ms, None
            nap.woken += 1
        if any(_is_resting(member, step) for member in members):
            return True
        self.resting.discard(step)
        nap.called_ms = None
        return False

    # figures

    def state(self, step: int) -> str:
        """Return in a word how a step is: awake, falling asleep, asleep or waking."""
        if step not in self.resting:
            return AWAKE
        states = {
            member.rest.state(step) if member.state == READY else _whole(member) for member in self._members(step)
        }
        return next(state for state in (AWAKE, WAKING, FALLING, ASLEEP) if state in states)

    def asleep(self) -> tuple[str, ...]:
        """Return the names of the steps of which no instance is awake."""
        return tuple(self._steps[step].name for step in sorted(self.resting) if self.state(step) != AWAKE)

    def stats(self) -> Mapping[str, Any]:
        """Return for each step that may sleep: its state, how often it slept and woke, and the last time's figures."""
        return {
            self._steps[step].name: {
                "state": self.state(step),
                "slept": nap.slept,
                "woken": nap.woken,
                "freed_bytes": nap.freed_bytes,
                "wake_ms": nap.wake_ms,
            }
            for step, nap in self._naps.items()
        }

    def _members(self, step: int) -> list[WorkerState]:
        return [self._crew.members[worker] for worker in self._steps[step].workers]


def _is_up(member: WorkerState, step: int) -> bool:
    return member.state == READY and not member.why and member.rest.state(step) == AWAKE


def _is_resting(member: WorkerState, step: int) -> bool:
    return member.state in (LEAVING, GONE) or member.called or member.rest.state(step) != AWAKE


def _whole(member: WorkerState) -> str:
    """Return how every step of a worker is that is not ready."""
    return {LEAVING: FALLING, GONE: ASLEEP}.get(member.state, WAKING)
