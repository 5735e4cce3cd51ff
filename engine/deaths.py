"""A worker has died: what it had in hand is judged, what waited there goes elsewhere, what it remembered is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.book import Book
from weftline.engine.branches import Branches
from weftline.engine.crew import Crew
from weftline.engine.kv_shares import KvShares
from weftline.engine.lanes import Lane
from weftline.engine.request import Task
from weftline.engine.supervisor import GIVEN_UP, LEAVING, READY
from weftline.engine.tasks import Tasks
from weftline.engine.timing import note
from weftline.pipelines.plan import Plan
from weftline.shm.lease import Ledger


class Deaths:
    """Pure; owned by the scheduler."""

    def __init__(
        self,
        plan: Plan,
        tasks: Tasks,
        book: Book,
        branches: Branches,
        crew: Crew,
        shares: KvShares,
        ledger: Ledger,
        emit: Callable[[ev.Command], None],
    ) -> None:
        self._steps = plan.steps
        self._tasks = tasks
        self._book = book
        self._branches = branches
        self._crew = crew
        self._shares = shares
        self._ledger = ledger
        self._emit = emit
        self._lanes_of = tasks.by_worker(len(plan.workers))

    def died(self, event: ev.WorkerDied) -> None:
        member = self._crew.members[event.worker]
        if event.arena != member.arena or not member.alive:
            return
        self._book.counters.deaths += member.state != LEAVING  # such a one has only gone to sleep
        self._shares.died(event.worker)
        why = member.why or event.how
        dispatches, streams = self._crew.died(event.worker, self._book.now_ms)
        in_hand = [*(dispatches[0].tasks if dispatches else ()), *streams]
        for dispatch in dispatches:
            self._book.release_blocks(dispatch.room.values())
        self._book.release_blocks(member.granted)
        member.granted.clear()
        for task in [task for dispatch in dispatches[1:] for task in dispatch.tasks]:
            task.worker = -1  # it was waiting: nothing is held against it
            if task.id in self._tasks.live:
                self._tasks.enqueue(task)
            else:
                self._tasks.end(task)
        self._again_after_death(in_hand, why)
        for lane in self._lanes_of[event.worker]:
            if lane.sequences is not None:
                self._lose_sequences(lane, event.worker, why)
            self._tasks.due.add(lane.index)
        self._ledger.retire_arena(event.arena)
        if member.near_arena:
            self._ledger.retire_arena(member.near_arena)
            self._ledger.retire_arena(-member.near_arena)
        if member.state == GIVEN_UP:
            self._tasks.give_up_lanes(why)

    def _again_after_death(self, in_hand: Sequence[Task], why: str) -> None:
        live = []
        for task in in_hand:
            if task.id in self._tasks.live:
                live.append(task)
                note(self._steps, self._crew, task, self._book.now_ms, "lost")
            else:
                self._tasks.end(task)
            task.worker = -1
        kinds: dict[tuple[int, int], list[Task]] = {}
        for task in live:
            kinds.setdefault((task.unit.step, task.unit.chain), []).append(task)
        for (index, _), tasks in kinds.items():
            tasks = [task for task in tasks if task.id in self._tasks.live]  # one that failed may have ended others
            verdict = self._tasks.recovery.after_death(tasks, why, self._book.now_ms)
            lane = self._tasks.lanes[index]
            for group in verdict.groups:
                self._book.counters.retried += len(group)
                lane.suspects.append(group)
            for step, _ in verdict.kept_out:
                self._book.counters.quarantined += 1
                self.tell_quarantine(step)
            for task, message in verdict.failed:
                if self._tasks.forget(task):
                    self._tasks.end(task)
                    self._branches.failed(task.request, task.place, "WorkerDied", message, lane.name)

    def tell_quarantine(self, step: int) -> None:
        digests = self._tasks.recovery.quarantine.digests(step)
        for worker in self._tasks.lanes[step].workers:
            if self._crew.members[worker].state == READY:
                self._emit(ev.Send(worker, msg.Quarantine(step, digests)))

    def _lose_sequences(self, lane: Lane, worker: int, why: str) -> None:
        """What a step remembered died with its worker: whoever waits in one of its sequences fails, or will."""
        lost = set(lane.sequences.lost(worker)) if lane.sequences is not None else set()
        for request in self._book.requests.values() if lost else ():
            if request.sequence is not None and request.sequence.id in lost and lane.index not in request.reached:
                request.reached.add(lane.index)
                request.lost.add(lane.index)
        for task in [t for t in self._tasks.live.values() if t.unit.step == lane.index]:
            if task.request.sequence is not None and task.request.sequence.id in lost and task.id in self._tasks.live:
                lane.discard(task)
                if self._tasks.forget(task):
                    self._tasks.end(task)
                    told = f"its sequence was lost when its worker died ({why}); start it again"
                    self._branches.failed(task.request, task.place, "WorkerDied", told, lane.name)
