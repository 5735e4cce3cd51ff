"""Steps that have nothing to do give their memory back, and have it again when somebody asks.

A step with `idle` goes to sleep when it has had no work for `after_s`: none waits, none runs, and no open request is
sure to bring some. It sleeps and wakes as a whole, all of its instances; steps that hand over to each other inside a
worker count as used together. With `keep: nothing` a worker whose steps are all idle for long enough is told to leave,
and its process ends.

A task for a sleeping step wakes it and waits; so does a request that is sure to need it, as soon as it is admitted, so
that steps wake beside each other. One that comes while a step falls asleep wakes it as soon as it has. That is looked
at after every event, for as long as anything rests: nothing depends on having noticed the moment. Nothing is refused
because a step sleeps: its requests would be what wakes it.

A step that cannot be woken costs its worker its life, and the worker is started again as after any death; one that dies
while all of its steps sleep is started when one of them is asked for. Pure; owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.book import Book
from weftline.engine.crew import OPEN_MAX_MS, Crew, WorkerState
from weftline.engine.kv_shares import KvShares
from weftline.engine.rest import ASLEEP, AWAKE, FALLING, WAKING
from weftline.engine.routes import Route
from weftline.engine.supervisor import ASLEEP as GONE
from weftline.engine.supervisor import LEAVING, READY, STARTING
from weftline.engine.tasks import Tasks
from weftline.engine.timers import Timers
from weftline.pipelines.plan import Plan
from weftline.shm.lease import Ledger

SLEEP_MAX_MS = 300_000.0
"""Longest a step may take to fall asleep: weights of 100 GB go to host memory at 0.4 GB/s, with page faults."""


@dataclass(slots=True)
class Naps:
    """What became of one step that may sleep.

    slept, woken: how often it has, as a whole.
    freed_bytes:  what came free on its device the last time, all instances together.
    wake_ms:      how long the last waking took, from the first request for it until an instance could answer.
    called_ms:    since when it is wanted and cannot answer yet; None: it is not.
    """

    slept: int = 0
    woken: int = 0
    freed_bytes: int = 0
    wake_ms: float = 0.0
    called_ms: float | None = None


class Idleness:
    """Which steps of a plan rest, and since when the others have had nothing to do.

    any: some step may sleep; without one, nothing here is ever asked.
    """

    def __init__(
        self,
        plan: Plan,
        tasks: Tasks,
        book: Book,
        crew: Crew,
        shares: KvShares,
        ledger: Ledger,
        emit: Callable[[ev.Command], None],
    ) -> None:
        self._tasks = tasks
        self._book = book
        self._crew = crew
        self._shares = shares
        self._ledger = ledger
        self._emit = emit
        self._policies = {index: step.idle for index, step in enumerate(plan.steps) if step.idle and step.workers}
        self._last_ms: dict[int, float] = {}  # when a step last had work
        self._set: set[int] = set()  # steps with a moment at which they are looked at
        self._resting: set[int] = set()  # steps of which some instance cannot answer because it sleeps
        self._wanted: set[int] = set()  # those of them that a request will need
        self._naps = {index: Naps() for index in self._policies}
        self._begun = False
        self.any = bool(self._policies)
        self.timers = Timers()
        for chain in plan.chains:
            for index in chain:
                tasks.lanes[index].together = chain

    # what happens

    def ready(self, worker: int, message: msg.Ready) -> None:
        """A worker is ready. When all have been, steps begin to be idle: until then the pipeline is not open."""
        if self.any and not self._begun and self._crew.all_ready():
            self._begun = True
            for step in self._policies:
                self.used(step)

    def used(self, step: int) -> None:
        """A task of a step has begun or ended."""
        for one in self._tasks.lanes[step].together:
            if one in self._policies:
                self._last_ms[one] = self._book.now_ms
                if self._begun and one not in self._set:
                    self._look_again(one, self._book.now_ms)

    def expected(self, route: Route) -> None:
        """A request was admitted: those of its steps that it is sure to need may as well wake now."""
        for step in route.vital:
            if step in self._policies:
                self.used(step)
                if step in self._resting:
                    self._wanted.add(step)

    def slept(self, worker: int, message: msg.Slept) -> None:
        member = self._crew.members[worker]
        if member.rest.state(message.step) != FALLING or message.freed_bytes < 0:
            self._kill(worker, "it said that a step sleeps which was not told to")
            return
        member.rest.move(message.step, "slept")
        self.timers.discard(("answer", self._part(worker, message.step)))
        self._shares.slept(worker, message.step)
        self._naps[message.step].freed_bytes += message.freed_bytes
        self._free(worker)
        if self._may_leave(worker):
            self._leave(worker)
        elif self._policies[message.step].keep == "nothing":
            self._look_again(message.step, self._book.now_ms)

    def awake(self, worker: int, message: msg.Awake) -> None:
        member = self._crew.members[worker]
        if member.rest.state(message.step) != WAKING:
            self._kill(worker, "it said that a step is awake which was not told to wake")
            return
        self.timers.discard(("answer", self._part(worker, message.step)))
        if message.failure is not None:
            name = self._tasks.lanes[message.step].name
            self._kill(worker, f"step {name} could not be woken: {message.failure.message}")
            return
        member.rest.move(message.step, "awake")
        self._shares.woken(worker, message.step)
        self._free(worker)

    def time(self, now_ms: float) -> None:
        """Put to sleep what is due, and end workers that do not come back from telling a step to."""
        for kind, id in self.timers.due(now_ms):
            if kind == "idle":
                self._set.discard(id)
                self._look(id, now_ms)
                continue
            worker, step = divmod(id, len(self._tasks.lanes))
            member = self._crew.members[worker]
            state = member.rest.state(step)
            if state in (FALLING, WAKING) and member.state == READY and not member.why:
                self._kill(worker, f"step {self._tasks.lanes[step].name} was {state} for too long")

    # what follows

    @property
    def resting(self) -> bool:
        return bool(self._resting)

    def wake_wanted(self) -> None:
        """Wake the resting steps that somebody waits for; to be called after every event."""
        for step in sorted(self._resting):
            lane, nap = self._tasks.lanes[step], self._naps[step]
            members = [self._crew.members[worker] for worker in lane.workers]
            if nap.called_ms is not None and any(_is_up(member, step) for member in members):
                nap.wake_ms, nap.called_ms = self._book.now_ms - nap.called_ms, None
                nap.woken += 1
            if not any(_is_resting(member, step) for member in members):
                self._resting.discard(step)
                self._wanted.discard(step)
                nap.called_ms = None
                self.used(step)
            elif step in self._wanted or any(self._waits(one) for one in lane.together):
                self._wake(step, now_ms=self._book.now_ms)
            elif step not in self._set and any(_is_up(member, step) for member in members):
                self.used(step)  # an instance came back by itself: it died on its way to sleep, and is idle from now

    def _wake(self, step: int, now_ms: float) -> None:
        lane, nap = self._tasks.lanes[step], self._naps[step]
        if nap.called_ms is None and not any(_is_up(self._crew.members[worker], step) for worker in lane.workers):
            nap.called_ms = now_ms
        for worker in lane.workers:
            member = self._crew.members[worker]
            if member.state == GONE:
                self._crew.call(worker, now_ms)  # and it is started when time next passes: see Crew.call
            elif member.state == READY and not member.why and member.rest.state(step) == ASLEEP:
                member.rest.move(step, "wake", now_ms)
                self.timers.add(now_ms + OPEN_MAX_MS, ("answer", self._part(worker, step)))
                self._emit(ev.Send(worker, msg.Wake(step)))

    def _look(self, step: int, now_ms: float) -> None:
        """Put a step to sleep if it has been idle for long enough, else look again when it may have been."""
        after_ms = self._policies[step].after_s * 1000
        idle_ms = self._last_ms[step] + after_ms
        if idle_ms <= now_ms and self._busy(step):
            idle_ms = now_ms + after_ms
        if idle_ms <= now_ms and not self._put_to_sleep(step, now_ms):
            idle_ms = now_ms + after_ms
        if idle_ms > now_ms:
            self._look_again(step, idle_ms)

    def _put_to_sleep(self, step: int, now_ms: float) -> bool:
        """Tell every instance of a step to sleep; False when some could not be told now."""
        whole, told = True, False
        for worker in self._tasks.lanes[step].workers:
            member = self._crew.members[worker]
            if member.state != READY or member.why:
                whole = whole and member.state not in (STARTING, READY) and member.start_ms is None
            elif self._may_leave(worker):
                self._leave(worker)
                told = True
            elif member.rest.state(step) == AWAKE:
                member.rest.move(step, "sleep")
                self._shares.falls_asleep(worker, step)
                self.timers.add(now_ms + SLEEP_MAX_MS, ("answer", self._part(worker, step)))
                keep = "host" if self._policies[step].keep == "host" else "nothing"
                self._emit(ev.Send(worker, msg.Sleep(step, keep)))
                told = True
            elif self._is_read(member):
                whole = False
        if told and step not in self._resting:
            self._rests(step)
        return whole

    def _may_leave(self, worker: int) -> bool:
        """Whether a worker's process may end: all it holds has nothing to do, and nobody reads what it gave."""
        member, steps = self._crew.members[worker], self._crew.steps_of(worker)
        if member.state != READY or member.why or member.rest.moving or member.busy or member.settles:
            return False
        return not self._is_read(member) and all(self._may_go(step) for step in steps)

    def _is_read(self, member: WorkerState) -> bool:
        """Whether something in a worker's device arena is leased, which might not outlive its process."""
        return bool(member.near_arena and self._ledger.taken_bytes(member.near_arena))

    def _may_go(self, step: int) -> bool:
        policy = self._policies.get(step)
        if policy is None or policy.keep != "nothing":
            return False
        return self._last_ms[step] + policy.after_s * 1000 <= self._book.now_ms and not self._busy(step)

    def _leave(self, worker: int) -> None:
        self._crew.leave(worker, self._book.now_ms)
        self._shares.died(worker)
        self._emit(ev.Send(worker, msg.Close()))
        for step in self._crew.steps_of(worker):
            if step not in self._resting:
                self._rests(step)

    def _rests(self, step: int) -> None:
        self._resting.add(step)
        self._naps[step].slept += 1
        self._naps[step].freed_bytes = 0

    def _busy(self, step: int) -> bool:
        """Whether a step, or one that it is used together with, has work, or an open request is sure to bring some."""
        together = frozenset(self._tasks.lanes[step].together)
        if any(not together.isdisjoint(task.unit.steps) for task in self._tasks.live.values()):
            return True
        for worker in self._tasks.lanes[step].workers:  # it may be at work for nobody
            member = self._crew.members[worker]
            held = (*(dispatch.unit for dispatch in member.running), *(task.unit for task in member.streams.values()))
            if member.unfinished or any(not together.isdisjoint(unit.steps) for unit in held):
                return True
        return any(
            request.missing[place] > 0
            for request in self._book.requests.values()
            if not together.isdisjoint(request.route.vital)
            for place, unit in enumerate(request.route.units)
            if not together.isdisjoint(unit.steps)
        )

    def _waits(self, step: int) -> bool:
        lane = self._tasks.lanes[step]
        return bool(lane.waiting or lane.job)

    def _look_again(self, step: int, from_ms: float) -> None:
        at_ms = from_ms if from_ms > self._book.now_ms else from_ms + self._policies[step].after_s * 1000
        self._set.add(step)
        self.timers.add(at_ms, ("idle", step))

    def _free(self, worker: int) -> None:
        """A worker may be given work again; what it streams of other steps stood still meanwhile."""
        self._crew.members[worker].spoke_ms = self._book.now_ms
        self._tasks.due.update(self._crew.steps_of(worker))

    def _part(self, worker: int, step: int) -> int:
        return worker * len(self._tasks.lanes) + step

    def _kill(self, worker: int, why: str) -> None:
        self._crew.members[worker].why = why
        self._emit(ev.KillWorker(worker, why))

    # figures

    def state(self, step: int) -> str:
        """Return in a word how a step is: awake, falling asleep, asleep or waking."""
        if step not in self._resting:
            return AWAKE
        members = [self._crew.members[worker] for worker in self._tasks.lanes[step].workers]
        states = {member.rest.state(step) if member.state == READY else _whole(member) for member in members}
        return next(state for state in (AWAKE, WAKING, FALLING, ASLEEP) if state in states)

    def asleep(self) -> tuple[str, ...]:
        """Return the names of the steps of which no instance is awake."""
        return tuple(self._tasks.lanes[step].name for step in sorted(self._resting) if self.state(step) != AWAKE)

    def stats(self) -> Mapping[str, Any]:
        """Return for each step that may sleep: its state, how often it slept and woke, and the last time's figures."""
        return {
            self._tasks.lanes[step].name: {
                "state": self.state(step),
                "slept": nap.slept,
                "woken": nap.woken,
                "freed_bytes": nap.freed_bytes,
                "wake_ms": nap.wake_ms,
            }
            for step, nap in self._naps.items()
        }


def _is_up(member: WorkerState, step: int) -> bool:
    return member.state == READY and not member.why and member.rest.state(step) == AWAKE


def _is_resting(member: WorkerState, step: int) -> bool:
    return member.state in (LEAVING, GONE) or member.called or member.rest.state(step) != AWAKE


def _whole(member: WorkerState) -> str:
    """Return how every step of a worker is that is not ready."""
    return {LEAVING: FALLING, GONE: ASLEEP}.get(member.state, WAKING)
