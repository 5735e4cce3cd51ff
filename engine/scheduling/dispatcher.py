"""Work for workers: which batch goes to whom, and when.

After every event the lanes where something has changed are looked at, the most urgent first. A free worker is given the
next batch of a lane when the batcher says that it leaves; suspects go first, and alone. A worker that runs short
batches is given a second one ahead, so that it need not wait for the runtime between two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weftline.engine import messages as msg
from weftline.engine.batching.lanes import Lane
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.fetching import Fetching
from weftline.engine.crew.member import Dispatch, WorkerState
from weftline.engine.crew.rest import AWAKE
from weftline.engine.crew.supervisor import LEAVING, READY, STARTING
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.feeds import Feeds
from weftline.engine.scheduling.request import Request, Task
from weftline.engine.scheduling.rooms import Rooms
from weftline.engine.scheduling.routes import Unit
from weftline.engine.scheduling.tasks import Tasks
from weftline.shm.block import Block

NAP_MS = 0.05
"""Shortest wait of a queue that has decided to wait, in milliseconds: what is due sooner is due at the next event."""

JOB_STREAMS, JOB_STREAMS_ALONE = 4, 64
"""Most rows of jobs that an instance of a streaming step holds where usual requests come too, lately and else: what it
has begun goes on beside them."""

LATELY_MS = 2000.0
"""A usual request has come to a streaming step lately when that is no longer ago."""

DISPATCHES_MAX = 2
"""Most dispatches with one worker: the one it runs, and one so that it need not wait for the next."""


class Dispatcher:
    """Pure; owned by the scheduler.

    waits: lanes with a free worker that wait for company all the same, and until when.
    """

    def __init__(
        self,
        tasks: Tasks,
        book: Book,
        crew: Crew,
        rooms: Rooms,
        feeds: Feeds,
        fetching: Fetching,
        emit: Callable[[ev.Command], None],
    ) -> None:
        self.waits: dict[int, float] = {}
        self._tasks = tasks
        self._book = book
        self._crew = crew
        self._rooms = rooms
        self._feeds = feeds
        self._fetching = fetching
        self._emit = emit

    def pump(self) -> None:
        """Give free workers the due batches of the lanes where something has changed, the most urgent first."""
        while self._tasks.due:
            lanes = list(map(self._tasks.lanes.__getitem__, self._tasks.due))
            self._tasks.due.clear()
            if len(lanes) > 1:
                lanes.sort(key=_urgency)
            for lane in lanes:
                self._serve(lane)

    def _serve(self, lane: Lane) -> None:
        if self.waits:
            self.waits.pop(lane.index, None)
        if lane.has_new:
            for worker in lane.workers:
                if self.has_room(self._crew.members[worker], lane):
                    new = lane.take_new()
                    if new is None:
                        break
                    self._hand_out(worker, lane, new)
                    if lane.job.any:
                        self._serve_jobs(lane)
                    return
            lane.settle(self._book.now_ms)
        if lane.sequences is not None:
            members = {worker: self._crew.members[worker] for worker in lane.workers}
            load = {worker: len(one.running) for worker, one in members.items() if one.state == READY and not one.why}
            lane.release_sequences(self._tasks.live, load, self._book.now_ms)
        for worker in lane.workers:
            member = self._crew.members[worker]
            while lane.suspects and member.state == READY and not member.busy and not member.why:
                if member.rest.any and self._rests(member, lane):
                    break
                self._dispatch(worker, lane, lane.suspects.popleft(), suspect=True)
            queue = lane.queue(worker)
            while queue.waiting and self.has_room(member, lane):
                for late in queue.late(self._book.now_ms):
                    if late in self._tasks.live:
                        self._too_late(self._tasks.live[late], lane)
                taken = queue.take(self._book.now_ms, lane.batches_a_message())
                if not taken:
                    wake = queue.wake_at_ms()
                    if wake is not None:
                        wake = max(wake, self._book.now_ms + NAP_MS)
                        self.waits[lane.index] = min(self.waits.get(lane.index, wake), wake)
                    break
                self._hand_out(worker, lane, [self._tasks.live[id] for id in taken])
        if lane.suspects and lane.streams:
            self._feeds.let_go(lane)
        if lane.job.any:
            self._serve_jobs(lane)

    def _serve_jobs(self, lane: Lane) -> None:
        """Give rows of jobs to workers that usual requests leave free."""
        for worker in lane.job_workers:
            while lane.job.any and lane.calm and self._has_room_for_job(self._crew.members[worker], lane):
                room = lane.job_items()
                if lane.streams and lane.shared:
                    room = min(room, self._job_streams_left(self._crew.members[worker], lane))
                    if room <= 0:
                        break
                tasks = lane.job.take(room)
                if tasks:
                    self._hand_out(worker, lane, tasks, lane.job_workers)

    def _job_streams_left(self, member: WorkerState, lane: Lane) -> int:
        """Return how many more rows of jobs an instance of a streaming step may hold now.

        When there will be more merely because time passes, the lane is looked at again then.
        """
        of_step = [task for task in member.streams.values() if task.unit.step == lane.index]
        held = sum(task.request.job for task in of_step)
        calm_ms = lane.usual_ms + LATELY_MS
        if held < len(of_step):
            lane.usual_ms = self._book.now_ms
        elif calm_ms <= self._book.now_ms:
            return JOB_STREAMS_ALONE - held
        else:
            self.waits[lane.index] = min(self.waits.get(lane.index, calm_ms), calm_ms)
        return JOB_STREAMS - held

    def _has_room_for_job(self, member: WorkerState, lane: Lane) -> bool:
        """Whether a worker may be given (more) of a step's work for jobs: one batch, and a second ahead of it only
        where no usual request can come to wait for both."""
        if not self._is_open(member, lane):
            return False
        if lane.streams or not member.running:
            return True
        return (
            len(member.running) < DISPATCHES_MAX
            and not lane.shared
            and lane.quick
            and not lane.suspects
            and not member.waits_for_room
            and not any(self._is_free(one) for one in lane.job_workers)
        )

    def has_room(self, member: WorkerState, lane: Lane) -> bool:
        """Whether a worker may be given (more) of a step's work now."""
        if not self._is_open(member, lane):
            return False
        if lane.streams or not member.running:
            return not lane.suspects or not lane.streams
        return (
            len(member.running) < DISPATCHES_MAX
            and len(lane.queue(lane.workers[0]).waiting) >= lane.items_max
            and lane.sequences is None
            and lane.quick
            and not lane.suspects  # they wait for a worker that has nothing else to do
            and not member.waits_for_room
            and not any(self._is_free(worker) for worker in lane.workers)
        )

    def _is_open(self, member: WorkerState, lane: Lane) -> bool:
        """Whether a worker is there for a step's work at all, whatever it has in hand."""
        if member.state != READY or member.why or (member.busy and (member.suspect or member.full)):
            return False
        return not (member.rest.any and self._rests(member, lane))

    def _rests(self, member: WorkerState, lane: Lane) -> bool:
        """Whether a worker cannot run a step, or what it hands over to, because it sleeps or is on its way."""
        return member.rest.moving or any(member.rest.state(step) != AWAKE for step in lane.together)

    def _is_free(self, worker: int) -> bool:
        member = self._crew.members[worker]
        return member.state == READY and not member.running

    def _too_late(self, task: Task, lane: Lane) -> None:
        """Work that cannot make its deadline any more never reaches a model."""
        self._book.counters.late += 1
        request = task.request
        by_ms = self._book.now_ms + lane.latency.run_ms(1) - task.due_ms
        told = f"by recent times it would be about {max(by_ms, 0):.0f} ms too late; it was not begun"
        lane.discard(task)
        self._book.end(request, "expire", "DeadlineExceeded", told, lane.name)

    def _hand_out(self, worker: int, lane: Lane, tasks: list[Task], among: Sequence[int] | None = None) -> None:
        """Give tasks to a worker; each of a streaming step goes to the instance that has the fewest.

        among: the workers that may have them; None: all of the step's.
        """
        among = lane.workers if among is None else among
        if not lane.streams or len(among) == 1:
            self._dispatch(worker, lane, tasks)
            return
        members = self._crew.members
        load = {one: len(members[one].streams) for one in among if self.has_room(members[one], lane)}
        shares: dict[int, list[Task]] = {}
        for task in tasks:
            least = min(load, key=load.__getitem__)
            load[least] += 1
            shares.setdefault(least, []).append(task)
        for one, share in shares.items():
            self._dispatch(one, lane, share)

    def _dispatch(self, worker: int, lane: Lane, tasks: list[Task], suspect: bool = False) -> None:
        member, now_ms = self._crew.members[worker], self._book.now_ms
        if member.blind:
            tasks = self._fetching.readable(worker, tasks)
            if not tasks:
                return
        self._book.counters.dispatches += 1
        self._book.counters.items += len(tasks)
        items = []
        firsts = 0
        for task in tasks:
            task.worker, task.started_ms, request = worker, now_ms, task.request
            firsts += task.attempts == 1
            usual = request.deadline_ms is None and request.sequence is None and not request.priority
            usual = usual and request.seed is None
            items.append(msg.Item(task.id, task.inputs, None if usual else self._brought(request, lane, task.element)))
        self._tasks.recovery.budget.first(firsts)
        if lane.streams:
            if not member.streams:
                member.spoke_ms = now_ms
            for task in tasks:
                member.streams[task.id] = task
            self._emit(ev.Send(worker, msg.Submit(lane.index, tuple(items), suspect)))
            stalled = tuple(task.id for task in tasks if task.request.stalled)
            if stalled:
                self._emit(ev.Send(worker, msg.Pause(lane.index, stalled)))
            for task in tasks:
                self._feeds.dispatched(task)
            return
        unit = tasks[0].unit
        room: dict[int, Block] = {}
        near_room: dict[int, Block] = {}
        blocks: tuple[Block, ...] = ()
        if lane.sizes.any and not unit.chain:
            room, near_room = self._rooms.beforehand(member, lane.sizes, items)
            if room or near_room:
                lane.in_place, blocks = True, (*room.values(), *near_room.values())
        ready = None
        if member.near_events and not (suspect or member.on_host) and self._gives_near(unit):
            ready = self._rooms.event(member)
            blocks = blocks if ready is None else (*blocks, ready)
        if unit.message is not None and unit.chain not in member.chains:
            member.chains.add(unit.chain)
            self._emit(ev.Send(worker, unit.message))
        id = self._crew.next_dispatch()
        member.running.append(Dispatch(id, unit, tasks, blocks, now_ms, lane.step.run_max_ms, suspect, ready))
        run = msg.Run(id, lane.index, tuple(items), room, unit.chain, suspect, near_room, ready)
        self._emit(ev.Send(worker, run))

    def _gives_near(self, unit: Unit) -> bool:
        return any(self._tasks.lanes[step].sizes.near for step in unit.steps)

    def _brought(self, request: Request, lane: Lane, element: int) -> msg.Brought:
        part = request.sequence
        left_ms = None if request.deadline_ms is None else request.deadline_ms - self._book.now_ms
        if part is None:
            if request.seed is None:
                return msg.Brought(request.priority, left_ms)
            return msg.Brought(request.priority, left_ms, seed=request.seed, element=element)
        first = lane.sequences is not None and lane.sequences.begin(part.id)
        return msg.Brought(request.priority, left_ms, part.id, part.start or first, part.end, request.seed, element)

    def stuck(self) -> bool:
        """Whether no memory will come free by itself, now or when a batch's wait is over or a worker has restarted."""
        if self._book.owed or self._tasks.timers.any:
            return False
        for member in self._crew.members:
            if (member.busy and not member.waits_for_room) or member.state == STARTING or member.start_ms is not None:
                return False
            if member.state == LEAVING or member.rest.moving or member.unfinished or member.settles:
                return False
        members = self._crew.members
        waiting = [lane for lane in self._tasks.lanes if lane.waiting]
        if any(self.has_room(members[worker], lane) for lane in waiting for worker in lane.workers):
            return False
        rows = [lane for lane in self._tasks.lanes if lane.job.any and lane.calm]
        return not any(self._has_room_for_job(members[one], lane) for lane in rows for one in lane.job_workers)


def _urgency(lane: Lane) -> float:
    if lane.suspects:
        return -math.inf
    if lane.job.any and lane.calm:
        return math.inf
    return min((key for queue in lane.queues() if (key := queue.urgency()) is not None), default=math.inf)
