"""What happens next, decided in one place.

`scheduler.on(event, now_ms) -> commands`. Nothing here reads a clock, opens a socket or touches a tensor: the shell
(`runtime.py`) turns the outside world into events, carries out the commands, and decides nothing.

This file is the door: callers' requests, and time. Behind it each room knows one thing: the Book (requests and their
leases), Branches (the graph inside a request), Tasks (what is alive, and the lanes it waits in), Feeds (pieces from
step to step), the Dispatcher (which batch goes to whom), Answers (what workers say), Deaths (what follows when one
dies), Idleness (who sleeps meanwhile), the Crew, the Rooms, and KvShares (memory that steps divide).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftline.engine import messages as msg
from weftline.engine.batching.lanes import Lane
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.device_memory import DeviceMemory
from weftline.engine.crew.device_news import DeviceNews
from weftline.engine.crew.fault_domain import Past
from weftline.engine.crew.fetching import Fetching
from weftline.engine.crew.idleness import Idleness
from weftline.engine.crew.kv_shares import KvShares
from weftline.engine.crew.settling import Settling
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.answers import Answers
from weftline.engine.scheduling.book import Book, Counters, size_of
from weftline.engine.scheduling.branches import Branches
from weftline.engine.scheduling.cohorts import Cohort
from weftline.engine.scheduling.deaths import Deaths
from weftline.engine.scheduling.dispatcher import Dispatcher
from weftline.engine.scheduling.events import Command, Event
from weftline.engine.scheduling.feeds import Feeds
from weftline.engine.scheduling.request import Request
from weftline.engine.scheduling.rooms import Rooms, lease_all
from weftline.engine.scheduling.routes import Route
from weftline.engine.scheduling.tasks import Tasks
from weftline.engine.scheduling.timing import note
from weftline.errors import InputError, LimitReached
from weftline.pipelines.holdings import Settle
from weftline.pipelines.plan import Plan
from weftline.shm.block import PAGE_BYTES, Block, align_up
from weftline.shm.lease import Ledger

INGRESS_ARENA = 0
"""The arena of the process that admits requests; workers' arenas are numbered from 1, never twice."""


class Scheduler:
    """Runs one plan. Not thread-safe: the shell calls it under one lock.

    settle: what says how much of a GPU is left beside other pipelines; None: there are none.
    """

    def __init__(self, plan: Plan, seed: int = 0, settle: Settle | None = None) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self.ledger.add_arena(INGRESS_ARENA, align_up(plan.limits.arena_bytes, PAGE_BYTES))
        self.crew = Crew(plan, seed)
        self._out: list[Command] = []
        self._emit = self._out.append
        self._tasks = Tasks(plan, self.crew, self._emit)
        self._branches = Branches(plan, self._tasks.begin, self._tasks.drop)
        self._book = Book(plan, self.ledger, self._emit, self._branches.ready, self._tasks.drop_all)
        self._tasks.attach(self._book, self._branches)
        self._feeds = Feeds(plan, self._tasks, self._book, self.crew, self._emit)
        self._book.attach(self._feeds.complete)
        self._branches.attach(self._book, self._feeds.over)
        self._rooms = Rooms(self.ledger, self.crew, self._emit)
        self.kv = KvShares(plan, self._emit)
        fetching = Fetching(self._tasks, self._book, self.crew, self._emit)
        self._dispatcher = Dispatcher(
            self._tasks, self._book, self.crew, self._rooms, self._feeds, fetching, self._emit
        )  # fmt: skip
        known = self._tasks, self._book, self._branches, self.crew
        settling, past = Settling(self.crew, self.ledger, self._emit), Past(self.ledger)
        devices = DeviceNews(plan, self._book, self.crew, self.ledger, settling, self._emit)
        self._answers = Answers(
            plan, *known, self._rooms, self._feeds, self.kv, devices, fetching, past, self.ledger, self._emit
        )
        self._deaths = Deaths(plan, *known, self.kv, settling, fetching, past, self.ledger, self._emit)
        self.idleness = Idleness(plan, self._tasks, self._book, self.crew, self.kv, self.ledger, self._emit)
        self.memory = DeviceMemory(plan, self.kv.left, settle)
        self._answers.attach(self.idleness, self.memory)
        if self.idleness.any:
            self._tasks.tell_use(self.idleness.used)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Submitted: self._submitted,
            ev.Together: self._together,
            ev.Delivered: self._delivered,
            ev.Withdrawn: self._withdrawn,
            ev.Stalled: self._stalled,
            ev.Resumed: self._resumed,
            ev.WorkerDied: self._deaths.died,
            ev.FromWorker: self._answers.hear,
            ev.Tick: self._tick,
            ev.DeviceLeft: lambda event: self.memory.divided(event.device, event.bytes),
        }

    # the door

    def start(self, now_ms: float) -> list[Command]:
        """Return the commands that start every worker."""
        return [ev.StartWorker(worker, arena) for worker, arena in self.crew.start_all(now_ms)]

    def on(self, event: Event, now_ms: float) -> list[Command]:
        """Take in what happened and return what to do, in order."""
        return self.on_all((event,), now_ms)

    def on_all(self, events: Sequence[Event], now_ms: float) -> list[Command]:
        """Take in several events at once; what becomes due by them leaves in as few messages as can be."""
        self._book.now_ms = now_ms
        self._book.expire()
        for event in events:
            self._handlers[type(event)](event)
        while self._tasks.due or self._tasks.cohorts.moved:
            if self._tasks.cohorts.moved:
                self._tasks.cohorts.release()
            self._dispatcher.pump()
        if self.idleness.naps.resting:
            self.idleness.wake_wanted()  # after all that may have put a task into a queue
        if self._rooms.asked:
            self._rooms.grant(self._stuck)
        for arena in self.ledger.forget_empty():
            self._emit(ev.ForgetArena(arena))
        out = self._out.copy()
        self._out.clear()
        return out

    def wake_at_ms(self) -> float | None:
        """When to send a Tick if nothing else happens; None: never."""
        soonest = self.crew.wake_at_ms()
        for at in (
            self._book.wake_at_ms(),
            self._tasks.timers.wake_at_ms(),
            self.idleness.timers.wake_at_ms(),
            *self._dispatcher.waits.values(),
        ):
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest

    def try_reserve(self, sizes: Sequence[int], job: bool = False) -> list[Block]:
        """Lease blocks in the ingress arena for a request's inputs, before it is submitted; LimitReached when full.

        job: for a row of a job, which leaves usual requests their share; one that is larger than its own may have all.
        """
        share = self._book.admission.job_bytes_max
        room = not job or sum(sizes) > share or self.ledger.taken_bytes(INGRESS_ARENA) + sum(sizes) <= share
        blocks = lease_all(self.ledger, INGRESS_ARENA, sizes) if room else None
        if blocks is None:
            self.counters.refused += 1
            most = self.plan.limits.arena_bytes
            told = f"no room for inputs of {sum(sizes)} bytes; limits.arena_bytes is {most}"
            raise LimitReached(told, 0.0 if sum(sizes) > most else self._book.admission.retry_after_s())
        return blocks

    def give_up(self, blocks: Sequence[Block]) -> None:
        """Release blocks whose request was never submitted."""
        self._book.release_blocks(blocks)

    @property
    def counters(self) -> Counters:
        return self._book.counters

    @property
    def open_requests(self) -> int:
        return len(self._book.requests)

    @property
    def queued(self) -> dict[str, int]:
        """How many items wait for each step."""
        return {lane.name: lane.waiting for lane in self._tasks.lanes}

    @property
    def batches(self) -> dict[str, dict[str, int]]:
        """How many items a call of each step may have now, and how often there was no memory for one."""
        return {
            lane.name: {"items_max": lane.items_max, "out_of_memory": lane.short_of_memory}
            for lane in self._tasks.lanes
            if lane.workers and not lane.streams
        }

    def health(self, now_ms: float) -> dict[str, bool]:
        """Return for each step whether an instance of it is ready and gave a sign of life lately."""
        return {lane.name: self.crew.heard_of(lane.index, now_ms) for lane in self._tasks.lanes}

    def idle(self) -> bool:
        """Whether nothing is open, running, or still to be copied out."""
        return not self._book.requests and not self._book.owed and not self.crew.busy() and not self._tasks.live

    def _stuck(self) -> bool:
        """Whether no memory will come free by itself, not even when rows of jobs wait for each other no longer."""
        while self._dispatcher.stuck():
            if not self._tasks.cohorts.make_room():
                return True
            self._dispatcher.pump()
            if self.idleness.naps.resting:
                self.idleness.wake_wanted()
        return False

    def _together(self, event: ev.Together) -> None:
        cohort = Cohort()
        for row, one in enumerate(event.rows):
            self._submitted(one, cohort, row)

    def _submitted(self, event: ev.Submitted, cohort: Cohort | None = None, row: int = 0) -> None:
        try:
            route = self._book.routes.route(event.wanted)
            lost = self._tasks.hopeless.intersection(route.vital) if self._tasks.hopeless else ()
            for step in lost:
                name = self._tasks.lanes[step].name
                raise LimitReached(f"step {name} is unavailable: its worker keeps failing to start")
            size = size_of(event)
            self._book.admission.check(size, event.job)
            refused = self._in_time(event, route) or self._in_sequence(event, route)
            if refused is not None:
                self.counters.refused += 1
                self._emit(refused)
            else:
                self._book.admit(event, route, size, cohort, row)
                if self.idleness.any:
                    self.idleness.expected(route)
        except LimitReached as refusal:
            self.counters.refused += 1
            self._emit(ev.Refuse(event.request, str(refusal), refusal.retry_after_s))
        except InputError as refusal:
            self.counters.refused += 1
            self._emit(ev.Refuse(event.request, str(refusal), 0.0, "InputError"))
        self._book.release_inputs(event.inputs)

    def _in_time(self, event: ev.Submitted, route: Route) -> ev.Refuse | None:
        """Return a refusal when measured times say that the request cannot make its deadline."""
        if event.deadline_ms is None or not self.plan.slo.refuse_early:
            return None
        left = event.deadline_ms - self._book.now_ms
        needs = self._tasks.whole_ms(route)
        if needs <= left:
            return None
        told = f"by recent times it needs about {needs:.0f} ms and has {max(left, 0):.0f} ms; it was not begun"
        return ev.Refuse(event.request, told, self._book.admission.retry_after_s(), "DeadlineExceeded")

    def _in_sequence(self, event: ev.Submitted, route: Route) -> ev.Refuse | None:
        """Tell every step with memory of a request's sequence; return a refusal when one cannot take it."""
        part, lanes = event.sequence, self._tasks.remembering(route)
        if part is None:
            if not lanes:
                return None
            told = f"step {lanes[0].name} remembers between the requests of a sequence; say which one this belongs to"
            return ev.Refuse(event.request, told, 0.0, "InputError")
        admitted: list[Lane] = []
        for lane in lanes:
            refused = lane.admit(part, self._book.now_ms)
            if refused is not None:
                for earlier in admitted:
                    self._tasks.forgo(earlier, part.id)
                after_s = self._book.admission.retry_after_s() if isinstance(refused, LimitReached) else 0.0
                return ev.Refuse(event.request, f"step {lane.name}: {refused}", after_s, type(refused).__name__)
            admitted.append(lane)
        return None

    def _delivered(self, event: ev.Delivered) -> None:
        self._book.delivered(event.request)

    def _withdrawn(self, event: ev.Withdrawn) -> None:
        self._book.withdraw(event.request)

    def _stalled(self, event: ev.Stalled) -> None:
        request = self._book.requests.get(event.request)
        if request is None or request.stalled:
            return
        request.stalled = True
        self._tasks.timers.add(self._book.now_ms + self.plan.limits.stall_max_ms, ("stall", request.id))
        self._tell_streams(request, msg.Pause)

    def _resumed(self, event: ev.Resumed) -> None:
        request = self._book.requests.get(event.request)
        if request is None or not request.stalled:
            return
        request.stalled = False
        self._tasks.timers.discard(("stall", request.id))
        self._tell_streams(request, msg.Resume)

    def _tell_streams(self, request: Request, message: type[msg.Pause] | type[msg.Resume]) -> None:
        for task in request.tasks.values():
            if task.worker >= 0 and not task.held and self._tasks.lanes[task.unit.step].streams:
                member = self.crew.members[task.worker]
                member.spoke_ms = self._book.now_ms
                self._emit(ev.Send(task.worker, message(task.unit.step, (task.id,))))

    def _tick(self, event: ev.Tick) -> None:
        now_ms = self._book.now_ms
        for kind, id in self._tasks.timers.due(now_ms):
            self._timed(kind, id)
        if self.idleness.any:
            self.idleness.time(now_ms)
        for worker, arena in self.crew.due(now_ms):
            self._emit(ev.StartWorker(worker, arena))
        for worker, why in self.crew.overdue(now_ms):
            self._kill(worker, why)
        self._tasks.end_idle_sequences()
        for step in self._tasks.recovery.quarantine.forget(now_ms):
            self._deaths.tell_quarantine(step)
        self._tasks.due.update(self._dispatcher.waits)

    def _timed(self, kind: str, id: int) -> None:
        if kind == "stall":
            request = self._book.requests.get(id)
            if request is not None:
                seconds = self.plan.limits.stall_max_ms / 1000
                told = f"its reader took nothing for {seconds:g} s; limits.stall_max_ms"
                self._book.end(request, "fail", "LimitReached", told)
            return
        task = self._tasks.live.get(id)
        if task is None:
            return
        if kind == "again":
            self._tasks.enqueue(task)
            return
        lane = self._tasks.lanes[task.unit.step]
        note(self.plan.steps, self.crew, task, self._book.now_ms, "lost")
        at_work = task.worker >= 0
        if at_work:  # the worker keeps it until it answers; the attempt that follows is another task
            self._emit(ev.Send(task.worker, msg.Cancel(task.unit.step, (task.id,))))
            task = self._tasks.replace(task)
        else:
            lane.discard(task)
            self._tasks.timers.discard(("again", task.id))
        told = f"it took longer than its timeout_ms, {lane.step.timeout_ms:g} ms"
        self._tasks.fail(task, "DeadlineExceeded", told, lane.name, True, at_work)

    def _kill(self, worker: int, why: str) -> None:
        self.crew.members[worker].why = why
        self._emit(ev.KillWorker(worker, why))
