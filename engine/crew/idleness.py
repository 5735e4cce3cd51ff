"""Steps that have nothing to do give their memory back, and have it again when somebody asks.

A step with `idle` goes to sleep when it has had no work for `after_s`: none waits, none runs, and no open request is
sure to bring some. It sleeps and wakes as a whole, all of its instances; steps that hand over to each other inside a
worker count as used together. With `keep: nothing` a worker whose steps are all idle for long enough is told to leave,
and its process ends. As long as an instance is ready a step is looked at again and again, `after_s` after it was last
used or looked at: whatever could not be told to sleep, or to leave, is told then.

A task for a sleeping step wakes it and waits; so does a request that is sure to need it, as soon as it is admitted, so
that steps wake beside each other. One that comes while a step falls asleep wakes it as soon as it has. That is looked
at after every event, for as long as anything rests: nothing depends on having noticed the moment. Nothing is refused
because a step sleeps: its requests would be what wakes it.

A step that cannot be woken costs its worker its life, and the worker is started again as after any death; one that dies
while all of its steps sleep is started when one of them is asked for. Pure; owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from weftline.engine import messages as msg
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.kv_shares import KvShares
from weftline.engine.crew.member import WorkerState
from weftline.engine.crew.naps import Naps
from weftline.engine.crew.patience import OPEN_MAX_MS
from weftline.engine.crew.rest import ASLEEP, AWAKE, FALLING, WAKING
from weftline.engine.crew.supervisor import ASLEEP as GONE
from weftline.engine.crew.supervisor import READY
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.routes import Route
from weftline.engine.scheduling.tasks import Tasks
from weftline.engine.scheduling.timers import Timers
from weftline.pipelines.plan import Plan
from weftline.shm.lease import Ledger

SLEEP_MAX_MS = 300_000.0
"""Longest a step may take to fall asleep: weights of 100 GB go to host memory at 0.4 GB/s, with page faults."""


class Idleness:
    """Which steps of a plan rest, and since when the others have had nothing to do.

    any:  some step may sleep; without one, nothing here is ever asked.
    naps: which of them do.
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
        self._wanted: set[int] = set()  # resting steps that a request will need
        self._begun = False
        self.naps = Naps(plan.steps, crew, self._policies)
        self.any = bool(self._policies)
        self.timers = Timers()
        for chain in plan.chains:
            for index in chain:
                tasks.lanes[index].together = chain

    # what happens

    def ready(self, worker: int, message: msg.Ready) -> None:
        """A worker is ready: its steps begin to be idle. All do when all workers are: before, nobody could ask."""
        if not self._begun and self._crew.all_ready():
            self._begun = True
            for step in self._policies:
                self.used(step)
        for step in self._crew.steps_of(worker):
            self.used(step)

    def used(self, step: int) -> None:
        """A step has had work, or has just woken."""
        for one in self._tasks.lanes[step].together:
            if one in self._policies:
                self._last_ms[one] = self._book.now_ms
                if self._begun and ("idle", one) not in self.timers:
                    self.timers.add(self._idle_ms(one), ("idle", one))

    def expected(self, route: Route) -> None:
        """A request was admitted: those of its steps that it is sure to need may as well wake now."""
        for step in route.vital:
            if step in self._policies:
                self.used(step)
                if step in self.naps.resting:
                    self._wanted.add(step)

    def slept(self, worker: int, message: msg.Slept) -> None:
        member = self._crew.members[worker]
        if member.rest.state(message.step) != FALLING or message.freed_bytes < 0:
            self._kill(worker, "it said that a step sleeps which was not told to")
            return
        member.rest.move(message.step, "slept")
        self.timers.discard(("answer", self._part(worker, message.step)))
        self._shares.slept(worker, message.step)
        self.naps.freed(message.step, message.freed_bytes)
        self._free(worker)
        if self._may_leave(worker):
            self._leave(worker)

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
        self.used(message.step)

    def time(self, now_ms: float) -> None:
        """Put to sleep what is due, and end workers that do not come back from telling a step to."""
        for kind, id in self.timers.due(now_ms):
            if kind == "idle":
                self._look(id, now_ms)
                continue
            worker, step = divmod(id, len(self._tasks.lanes))
            member = self._crew.members[worker]
            state = member.rest.state(step)
            if state in (FALLING, WAKING) and member.state == READY and not member.why:
                self._kill(worker, f"step {self._tasks.lanes[step].name} was {state} for too long")

    # what follows

    def wake_wanted(self) -> None:
        """Wake the resting steps that somebody waits for; to be called after every event."""
        for step in sorted(self.naps.resting):
            if not self.naps.goes_on(step, self._book.now_ms):
                self._wanted.discard(step)
            elif step in self._wanted or any(self._waits(one) for one in self._tasks.lanes[step].together):
                self._wake(step, self._book.now_ms)

    def _wake(self, step: int, now_ms: float) -> None:
        self.naps.call(step, now_ms)
        for worker in self._tasks.lanes[step].workers:
            member = self._crew.members[worker]
            if member.state == GONE:
                self._crew.call(worker, now_ms)  # and it is started when time next passes: see Crew.call
            elif member.state == READY and not member.why and member.rest.state(step) == ASLEEP:
                member.rest.move(step, "wake")
                self.timers.add(now_ms + OPEN_MAX_MS, ("answer", self._part(worker, step)))
                self._emit(ev.Send(worker, msg.Wake(step)))

    def _look(self, step: int, now_ms: float) -> None:
        """Put a step to sleep if it has been idle for long enough, and look again when it may have been."""
        next_ms = self._idle_ms(step)
        if next_ms <= now_ms:
            if not self._busy(step):
                self._put_to_sleep(step, now_ms)
            next_ms = now_ms + self._policies[step].after_s * 1000
        if self._crew.ready_count(step):  # else `ready` sets the next look
            self.timers.add(next_ms, ("idle", step))

    def _put_to_sleep(self, step: int, now_ms: float) -> None:
        """Tell every instance of a step to sleep that can be told now."""
        for worker in self._tasks.lanes[step].workers:
            member = self._crew.members[worker]
            if self._may_leave(worker):
                self._leave(worker)
            elif member.state == READY and not member.why and member.rest.state(step) == AWAKE:
                member.rest.move(step, "sleep")
                self._shares.falls_asleep(worker, step)
                self.timers.add(now_ms + SLEEP_MAX_MS, ("answer", self._part(worker, step)))
                keep = "host" if self._policies[step].keep == "host" else "nothing"
                self._emit(ev.Send(worker, msg.Sleep(step, keep)))
                self.naps.begin(step)

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
        return self._idle_ms(step) <= self._book.now_ms and not self._busy(step)

    def _leave(self, worker: int) -> None:
        self._crew.leave(worker, self._book.now_ms)
        self._shares.died(worker)
        self._emit(ev.Send(worker, msg.Close()))
        for step in self._crew.steps_of(worker):
            self.naps.begin(step)

    def _idle_ms(self, step: int) -> float:
        """When a step will have been idle for long enough if nothing comes."""
        return self._last_ms[step] + self._policies[step].after_s * 1000

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

    def _free(self, worker: int) -> None:
        """A worker may be given work again; what it streams of other steps, and settles, stood still meanwhile."""
        member = self._crew.members[worker]
        member.spoke_ms = self._book.now_ms
        member.settles = dict.fromkeys(member.settles, self._book.now_ms)
        self._tasks.due.update(self._crew.steps_of(worker))

    def _part(self, worker: int, step: int) -> int:
        return worker * len(self._tasks.lanes) + step

    def _kill(self, worker: int, why: str) -> None:
        self._crew.members[worker].why = why
        self._emit(ev.KillWorker(worker, why))
