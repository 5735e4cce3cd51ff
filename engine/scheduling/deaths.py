"""A worker has died: what it had in hand is judged, what waited there goes elsewhere, what it remembered is lost.

What it was reading on devices is kept from use until that is sure to be over (settling.py), and what falls with it
falls (fault_domain.py): workers that wait on the device for what it had begun, and requests that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weftline.engine import messages as msg
from weftline.engine.batching.lanes import Lane
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.fault_domain import Fallen, Past, fallen, victims
from weftline.engine.crew.fetching import Fetching
from weftline.engine.crew.kv_shares import KvShares
from weftline.engine.crew.member import Dispatch
from weftline.engine.crew.recovery import Verdict
from weftline.engine.crew.settling import Settling
from weftline.engine.crew.supervisor import GIVEN_UP, LEAVING, READY
from weftline.engine.crew.unfinished import Unfinished, near_positions
from weftline.engine.messages import Value
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.branches import Branches
from weftline.engine.scheduling.request import Task
from weftline.engine.scheduling.tasks import Tasks
from weftline.engine.scheduling.timing import note
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
        settling: Settling,
        fetching: Fetching,
        past: Past,
        ledger: Ledger,
        emit: Callable[[ev.Command], None],
    ) -> None:
        self._steps = plan.steps
        self._near = near_positions(plan)
        self._tasks = tasks
        self._book = book
        self._branches = branches
        self._crew = crew
        self._shares = shares
        self._settling = settling
        self._fetching = fetching
        self._past = past
        self._ledger = ledger
        self._emit = emit
        self._lanes_of = tasks.by_worker(len(plan.workers))

    def died(self, event: ev.WorkerDied) -> None:
        member = self._crew.members[event.worker]
        if event.arena != member.arena or not member.alive:
            self._book.counters.stale += 1
            return
        self._book.counters.deaths += member.state != LEAVING  # such a one has only gone to sleep
        self._shares.died(event.worker)
        why = member.why or event.how
        unfinished, fetches = list(member.unfinished.values()), list(member.fetches)
        dispatches, streams = self._crew.died(event.worker, self._book.now_ms, event.refused)
        in_hand = [*(dispatches[0].tasks if dispatches else ()), *streams]
        self._retire(event.arena, member.near_arena)
        self._end_reads(dispatches, streams, unfinished)
        for dispatch in dispatches:
            self._book.release_blocks(dispatch.blocks)
        for one in unfinished:
            self._book.release_blocks(one.blocks)
        self._book.release_blocks(member.granted)
        member.granted.clear()
        self._take_along(fallen(unfinished, member.near_arena, member.rung), why)
        self._fetching.died(fetches, why)
        for task in [task for dispatch in dispatches[1:] for task in dispatch.tasks]:
            task.worker = -1  # it was waiting: nothing is held against it
            if task.id in self._tasks.live:
                self._tasks.enqueue(task)
            else:
                self._tasks.end(task)
        self._again_after_death(in_hand, why, member.spared)
        for lane in self._lanes_of[event.worker]:
            if lane.sequences is not None:
                self._lose_sequences(lane, event.worker, why)
            self._tasks.due.add(lane.index)
        if member.state == GIVEN_UP:
            self._tasks.give_up_lanes(why)

    def _retire(self, arena: int, near_arena: int) -> None:
        self._ledger.retire_arena(arena)
        if near_arena:
            self._ledger.retire_arena(near_arena)
            self._ledger.retire_arena(-near_arena)

    def _end_reads(
        self, dispatches: Iterable[Dispatch], streams: Iterable[Task], unfinished: Iterable[Unfinished]
    ) -> None:
        """What a dead worker may still be reading on a device is kept from use; its tasks keep tickets of their own."""
        held = [key for one in unfinished for key in one.reads]
        tasks = [*streams, *(task for dispatch in dispatches for task in dispatch.tasks)]
        for key in [key for task in tasks for key in task.keys if self._crew.owner_on_device(key[0]) is not None]:
            self._ledger.hold(key)
            held.append(key)
        self._settling.end_reads(held, self._book.now_ms)

    def _take_along(self, what: Fallen, why: str) -> None:
        """End what cannot go on without what fell: workers that wait for it, requests and tasks that need it."""
        if not what:
            return
        self._past.add(what)
        for worker in victims(what, self._crew.members, self._near):
            member = self._crew.members[worker]
            member.why, member.spared = "it waits on the device for work of a worker that died", True
            self._emit(ev.KillWorker(worker, member.why))
        for request in list(self._book.requests.values()):
            gathered = [value for gather in request.gathers.values() for row in gather.outputs for value in row]
            gone = next(filter(what.has, [*request.values.values(), *gathered]), None)
            if gone is not None:
                self._book.end(request, "fail", "WorkerDied", *self._told(what, gone, why))
                continue
            self._book.keep_what_is_left(request, what.left_of)
            for task in list(request.tasks.values()):
                gone = next(filter(what.has, task.inputs), None)
                if gone is None:
                    task.inputs = tuple(map(what.left_of, task.inputs))
                elif task.id in self._tasks.live:  # else one before it has ended it
                    self._tasks.drop(task)
                    self._branches.failed(request, task.place, "WorkerDied", *self._told(what, gone, why))

    def _told(self, what: Fallen, gone: Value, why: str) -> tuple[str, str]:
        """Return what is told of a value that is gone, and the step that gave it."""
        step = what.step(gone)
        if step < 0:
            return f"a tensor on the device ended with the worker that held it ({why})", ""
        return f"its worker died ({why}) before its work on the device was finished", self._steps[step].name

    def _again_after_death(self, in_hand: Sequence[Task], why: str, spared: bool) -> None:
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
            verdict = self._verdict(tasks, why, spared)
            lane = self._tasks.lanes[index]
            for group in verdict.groups:
                self._book.counters.retried += len(group)
                if spared:
                    self._tasks.enqueue(group[0])
                else:
                    lane.suspects.append(group)
            for step, _ in verdict.kept_out:
                self._book.counters.quarantined += 1
                self.tell_quarantine(step)
            for task, message in verdict.failed:
                if self._tasks.forget(task):
                    self._tasks.end(task)
                    self._branches.failed(task.request, task.place, "WorkerDied", message, lane.name)

    def _verdict(self, tasks: Sequence[Task], why: str, spared: bool) -> Verdict:
        recovery = self._tasks.recovery
        return recovery.after_loss(tasks, why) if spared else recovery.after_death(tasks, why, self._book.now_ms)

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
