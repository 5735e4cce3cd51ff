"""The tasks that are alive: begun, queued, tried again, dropped and ended; and the lanes they wait in.

A task is alive from the moment a unit of a request begins until its result is taken, or nobody waits for it any more.
A worker may still be busy with one that is dead: its leases last until the worker has answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from weftline.engine import messages as msg
from weftline.engine.batching.lanes import Lane
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.recovery import Recovery
from weftline.engine.crew.supervisor import READY
from weftline.engine.messages import PIECES, Value
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.branches import Branches
from weftline.engine.scheduling.cohorts import Cohorts
from weftline.engine.scheduling.estimates import Estimates
from weftline.engine.scheduling.request import OPEN, Request, Task
from weftline.engine.scheduling.routes import Route
from weftline.engine.scheduling.timers import Timers
from weftline.pipelines.plan import Plan
from weftline.shm.block import Key


class Tasks:
    """Pure; owned by the scheduler.

    live:     every task that somebody waits for, by id.
    lanes:    one for each step, in plan order.
    due:      lanes where something has changed, to be looked at before the event is over.
    hopeless: lanes that nobody will serve any more.
    """

    def __init__(self, plan: Plan, crew: Crew, emit: Callable[[ev.Command], None]) -> None:
        self.live: dict[int, Task] = {}
        self.lanes = [Lane(index, step, plan.limits.job_batch_ms) for index, step in enumerate(plan.steps)]
        self.due: set[int] = set()
        self.hopeless: set[int] = set()
        self.timers = Timers()
        self.recovery = Recovery(plan)
        self.cohorts = Cohorts(plan, self._form)
        self._estimates = Estimates(self.lanes, crew.members)
        self._crew = crew
        self._steps = plan.steps
        self._sequenced = any(lane.sequences is not None for lane in self.lanes)
        self._ids = 0
        self._emit = emit
        self._used: Callable[[int], None] | None = None

    def tell_use(self, used: Callable[[int], None]) -> None:
        """Say who wants to know of every task of a step that begins or ends."""
        self._used = used

    def attach(self, book: Book, branches: Branches) -> None:
        """Say where the requests are, and who moves them through their graph; the three know each other."""
        self._book = book
        self._branches = branches

    def by_worker(self, workers: int) -> list[list[Lane]]:
        """Return the lanes that each worker serves."""
        return [[lane for lane in self.lanes if worker in lane.workers] for worker in range(workers)]

    def whole_ms(self, route: Route) -> float:
        """Return the expected time of a request that comes now, by recent times and the queues as they are."""
        return self._estimates.whole_ms(route, self._book.now_ms)

    def begin(self, request: Request, place: int, inputs: tuple[Value, ...], keys: Sequence[Key], element: int) -> None:
        """Queue a task for a unit, or for one element of it."""
        if request.state != OPEN:
            self._book.release(keys)
            return
        unit = request.route.units[place]
        self._ids += 1
        due_ms = math.inf
        if request.deadline_ms is not None:
            due_ms = request.deadline_ms - self._estimates.after_ms(request.route, place, self._book.now_ms)
        task = Task(self._ids, request, place, unit, inputs, keys, self._book.now_ms, due_ms, element)
        self.live[task.id] = request.tasks[task.id] = task
        if self._used is not None:
            self._used(unit.step)
        if request.feeds and place in request.feeds:
            feed = request.feeds[place]
            if inputs[unit.feed] is PIECES:
                task.feed, feed.task = feed, task
            else:
                feed.end()
        held = request.cohort is not None and self.cohorts.begin(request.cohort, task)
        if unit.step in self.hopeless:
            self.fail_hopeless(task, "it is given up")
            return
        if unit.step in request.lost:
            self.forget(task)
            self.end(task)
            told = "its sequence was lost when its worker died; start it again"
            self._branches.failed(request, place, "WorkerDied", told, self.lanes[unit.step].name)
            return
        if request.sequence is not None:
            request.reached.add(unit.step)
        if held:
            return
        self._limit(task)
        self.enqueue(task)

    def _limit(self, task: Task) -> None:
        """From now on a task has its step's timeout_ms."""
        timeout_ms = self._steps[task.unit.step].timeout_ms
        if timeout_ms is not None and task.feed is None:
            self.timers.add(self._book.now_ms + timeout_ms, ("timeout", task.id))

    def _form(self, step: int, tasks: list[Task]) -> None:
        """Queue the tasks of a cohort, which are all there."""
        for task in tasks:
            self._limit(task)
        lane = self.lanes[step]
        lane.job.form(tasks, lane.job_items())
        self.due.add(step)

    def enqueue(self, task: Task) -> None:
        """Let a task wait for its step; one that a worker died of stays alone, whatever it is tried again for."""
        lane = self.lanes[task.unit.step]
        task.kept = False
        if task.deaths:
            lane.suspects.append([task])
        elif task.request.job and lane.sequences is None:
            lane.job.add(task)
        else:
            lane.add(task)
        self.due.add(lane.index)

    def forget(self, task: Task) -> bool:
        """A task is over; False when it was already."""
        if self.live.pop(task.id, None) is None:
            return False
        del task.request.tasks[task.id]
        if self._used is not None:
            self._used(task.unit.step)
        if task.request.cohort is not None:
            self.cohorts.over(task.request.cohort, task)
        if task.feed is not None:
            task.feed.end()
        if self.timers.any:
            self.timers.discard(("timeout", task.id))
            self.timers.discard(("again", task.id))
        return True

    def drop(self, task: Task) -> None:
        """Nobody waits for a task: take it out of its queue, or tell the worker that has it.

        A worker's leases are kept until it has answered: it may be reading.
        """
        if not self.forget(task):
            return
        if task.worker >= 0:
            self._emit(ev.Send(task.worker, msg.Cancel(task.unit.step, (task.id,))))
        else:
            self.lanes[task.unit.step].discard(task)
            self.end(task)

    def end(self, task: Task) -> None:
        """Release what a task held, and let the next of its sequence go."""
        if task.keys:
            self._book.release(task.keys)
            task.keys = ()
        lane = self.lanes[task.unit.step]
        if task.deaths:  # others may have waited behind it
            self.due.add(lane.index)
        if lane.sequences is not None and task.request.sequence is not None:
            part, worker = task.request.sequence, lane.sequences.worker(task.request.sequence.id)
            if lane.sequences.done(part.id, task.id, self._book.now_ms) and worker is not None:
                self.end_sequences(lane, [(part.id, worker)])
            self.due.add(lane.index)

    def drop_all(self, request: Request) -> None:
        for task in list(request.tasks.values()):
            self.drop(task)
        if request.gathers:
            self._branches.abandon_gathers(request)
        if request.stalled:
            self.timers.discard(("stall", request.id))
        if request.sequence is not None:
            for lane in self.remembering(request.route):
                if lane.index not in request.reached:
                    self.forgo(lane, request.sequence.id)

    def fail(
        self, task: Task, error: str, message: str, step: str, timed_out: bool = False, at_work: bool = False
    ) -> None:
        """A task failed: it is tried again, or its unit has failed. The task is out of its queue and worker.

        at_work: it timed out while a worker had it, which may still be running it.
        """
        wait_ms = self.recovery.try_again_in_ms(task, error, timed_out, at_work)
        if wait_ms is None:
            if self.forget(task):
                self.end(task)
                self._branches.failed(task.request, task.place, error, message, step)
            return
        self._book.counters.retried += 1
        task.worker, task.kept = -1, False
        self.due.add(task.unit.step)  # which it may have left to others meanwhile
        timeout_ms = self._steps[task.unit.step].timeout_ms
        if timeout_ms is not None:
            self.timers.add(self._book.now_ms + wait_ms + timeout_ms, ("timeout", task.id))
        if wait_ms:
            self.timers.add(self._book.now_ms + wait_ms, ("again", task.id))
        else:
            self.enqueue(task)

    def replace(self, task: Task) -> Task:
        """Leave a task with its worker, for whose answer nobody waits, and return another one like it."""
        self.forget(task)
        self._ids += 1
        self._book.hold(task.keys)
        again = Task(
            self._ids, task.request, task.place, task.unit, task.inputs, task.keys, task.arrived_ms, task.due_ms,
            task.element, -1, task.started_ms, task.attempts, task.deaths, task.digest, task.said, spared=task.spared,
        )  # fmt: skip
        self.live[again.id] = again.request.tasks[again.id] = again
        if task.request.cohort is not None:
            self.cohorts.copied(task.request.cohort)
        return again

    def fail_hopeless(self, task: Task, why: str) -> None:
        if self.forget(task):
            self.end(task)
            told = f"its worker keeps failing to start ({why})"
            self._branches.failed(task.request, task.place, "WorkerDied", told, self.lanes[task.unit.step].name)

    def give_up_lanes(self, why: str) -> None:
        """Fail every task of a step that nobody will run any more; those that come later fail at once."""
        self.hopeless |= {lane.index for lane in self.lanes if self._crew.unavailable((lane.index,))}
        for task in list(self.live.values()):
            if task.id in self.live and task.worker < 0 and task.unit.step in self.hopeless:
                self.lanes[task.unit.step].discard(task)
                self.fail_hopeless(task, why)

    def remembering(self, route: Route) -> list[Lane]:
        """Return the lanes of a route whose steps have memory."""
        if not self._sequenced:
            return []
        return [self.lanes[step] for step in route.steps if self.lanes[step].sequences is not None]

    def forgo(self, lane: Lane, sequence: str) -> None:
        """A request of a sequence ends without ever having reached a step with memory."""
        if lane.sequences is not None:
            worker = lane.sequences.worker(sequence)
            if lane.sequences.forgo(sequence, self._book.now_ms):
                self.end_sequences(lane, [(sequence, worker)])

    def end_sequences(self, lane: Lane, ended: Iterable[tuple[str, int | None]]) -> None:
        for id, worker in ended:
            if worker is not None and self._crew.members[worker].state == READY:
                self._emit(ev.Send(worker, msg.EndSequences(lane.index, (id,))))

    def end_idle_sequences(self) -> None:
        """End the sequences that brought nothing for too long."""
        for lane in self.lanes if self._sequenced else ():
            if lane.sequences is not None:
                self.end_sequences(lane, lane.sequences.idle(self._book.now_ms))
