"""Bugs that somebody could write, planted on purpose: the simulation must find each within a thousand worlds.

Every mutant patches one place. A draw keeps most of them rare, as real ones are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weftline.engine.batching.lanes import Lane
from weftline.engine.batching.sequences import Sequences
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.device_news import DeviceNews
from weftline.engine.crew.fault_domain import Fallen
from weftline.engine.crew.fetching import Fetching
from weftline.engine.crew.idleness import Idleness
from weftline.engine.crew.member import WorkerState
from weftline.engine.crew.recovery import LONE_DEATHS_MAX, Recovery, Verdict
from weftline.engine.crew.rest import Rest
from weftline.engine.crew.settling import Settling
from weftline.engine.messages import Done
from weftline.engine.scheduling.answers import Answers
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.branches import Branches
from weftline.engine.scheduling.dispatcher import Dispatcher
from weftline.engine.scheduling.events import FromWorker, WorkerDied
from weftline.engine.scheduling.feeds import Feeds
from weftline.engine.scheduling.flow import Admission
from weftline.engine.scheduling.request import Request
from weftline.engine.scheduling.scheduler import Scheduler
from weftline.engine.scheduling.tasks import Tasks
from weftline.engine.scheduling.timers import Timers
from weftline.shm.lease import Ledger

Plant = Callable[[pytest.MonkeyPatch, random.Random], None]

MUTANTS: dict[str, Plant] = {}


def mutant(plant: Plant) -> Plant:
    MUTANTS[plant.__name__.replace("_", " ")] = plant
    return plant


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with one bug in place."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch, random.Random(7))
        yield


@mutant
def a_double_free(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    release = Ledger.release
    patch.setattr(
        Ledger, "release", lambda s, key, n=1: release(s, key, n) and (draws.random() > 0.05 or release(s, key, 1))
    )


@mutant
def a_wrong_lease_count(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    hold = Ledger.hold
    patch.setattr(Ledger, "hold", lambda s, key, n=1: hold(s, key, n + (draws.random() < 0.05)))


@mutant
def a_skipped_cancel_in_a_queue(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    discard = Lane.discard
    patch.setattr(Lane, "discard", lambda s, task: discard(s, task) if draws.random() > 0.2 else None)


@mutant
def a_suspect_that_is_tried_again_among_others(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def careless(self: Tasks, task: Any) -> None:
        self.lanes[task.unit.step].add(task)
        self.due.add(task.unit.step)

    patch.setattr(Tasks, "enqueue", careless)


@mutant
def a_lost_death(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    on_all = Scheduler.on_all

    def deaf(self: Scheduler, events: Any, now_ms: float) -> Any:
        heard = [event for event in events if not isinstance(event, WorkerDied) or draws.random() > 0.2]
        return on_all(self, heard, now_ms)

    patch.setattr(Scheduler, "on_all", deaf)


@mutant
def a_lost_withdrawal(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Book, "withdraw", lambda s, request: s.requests.pop(request, None))


@mutant
def an_answer_that_came_too_late_and_is_taken(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    hear = Answers.hear

    def credulous(self: Answers, event: FromWorker) -> None:
        hear(self, FromWorker(event.worker, self._crew.members[event.worker].arena, event.message))

    patch.setattr(Answers, "hear", credulous)


@mutant
def room_that_is_kept(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    hear = Answers.hear

    def forgetful(self: Answers, event: FromWorker) -> None:
        if isinstance(event.message, Done):
            self._crew.members[event.worker].granted.clear()
        hear(self, event)

    patch.setattr(Answers, "hear", forgetful)


@mutant
def an_absent_value_that_is_not_told(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Book, "skip", lambda s, request, place: s.settle(request, place))


@mutant
def a_stand_in_that_is_never_called(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    failed = Branches.failed

    def forgetful(self: Branches, request: Request, place: int, error: str, message: str, step: str) -> None:
        if place in request.route.stand_ins:
            self._abandon(request, place)
        else:
            failed(self, request, place, error, message, step)

    patch.setattr(Branches, "failed", forgetful)


@mutant
def a_stand_in_that_is_not_dismissed(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def too_early(self: Branches, request: Request, place: int) -> None:
        stand_in = request.route.stand_ins.get(place)
        for member in stand_in.group if stand_in else ():
            request.missing[member] -= 1

    patch.setattr(Branches, "_dismiss", too_early)


@mutant
def a_gathered_list_that_holds_nothing(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    gather = Branches._gather

    def careless(self: Branches, request: Request, place: int, outputs: Any, element: int) -> Any:
        rows = gather(self, request, place, outputs, element)
        for value in outputs:
            self._book.release(value.keys)
        return rows

    patch.setattr(Branches, "_gather", careless)


@mutant
def lists_that_are_kept_after_the_end(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Branches, "abandon_gathers", lambda s, request: None)


@mutant
def suspects_that_stay_together(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    after_death = Recovery.after_death

    def together(self: Recovery, tasks: Any, why: str, now_ms: float) -> Verdict:
        verdict = after_death(self, tasks, why, now_ms)
        verdict.groups = [[task for group in verdict.groups for task in group]]
        return verdict

    patch.setattr(Recovery, "after_death", together)


@mutant
def a_killer_that_is_never_given_up(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr("weftline.engine.crew.recovery.LONE_DEATHS_MAX", LONE_DEATHS_MAX + 100)
    patch.setattr("weftline.engine.crew.budget.RetryBudget.try_take", lambda s: True)


@mutant
def suspects_that_are_forgotten(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    after_death = Recovery.after_death

    def lossy(self: Recovery, tasks: Any, why: str, now_ms: float) -> Verdict:
        verdict = after_death(self, tasks, why, now_ms)
        verdict.groups = verdict.groups[:1]
        return verdict

    patch.setattr(Recovery, "after_death", lossy)


@mutant
def a_deadline_that_nobody_watches(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Book, "expire", lambda s: None)


@mutant
def a_time_out_that_outlives_its_task(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Timers, "discard", lambda s, name: None)


@mutant
def a_chain_nobody_was_told_of(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    died = Crew.died

    def remembers(self: Crew, worker: int, now_ms: float, refused: bool = False) -> Any:
        chains = set(self.members[worker].chains)
        lost = died(self, worker, now_ms, refused)
        self.members[worker].chains = chains
        return lost

    patch.setattr(Crew, "died", remembers)


@mutant
def a_sequence_that_wanders(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Sequences, "worker", lambda s, id: None)


@mutant
def a_sequence_that_never_goes_on(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Sequences, "done", lambda s, id, item, now_ms: False)


@mutant
def work_for_a_worker_that_is_not_ready(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Dispatcher, "has_room", lambda s, member, lane: not member.running)


@mutant
def admission_that_forgets_who_left(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    leave = Admission.leave
    patch.setattr(Admission, "leave", lambda s, *left: leave(s, *left) if draws.random() > 0.01 else None)


@mutant
def a_dispatch_behind_that_is_lost(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    died = Crew.died

    def lossy(self: Crew, worker: int, now_ms: float, refused: bool = False) -> Any:
        dispatches, streams = died(self, worker, now_ms, refused)
        return dispatches[:1], streams

    patch.setattr(Crew, "died", lossy)


@mutant
def a_waiting_batch_that_is_forgotten(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Lane, "any_waiting", lambda s: False)


@mutant
def a_sequence_whose_item_left_before_it_was_queued_and_is_still_owed(
    patch: pytest.MonkeyPatch, draws: random.Random
) -> None:
    discard = Lane.discard

    def careless(self: Lane, task: Any) -> None:
        if task in self._new:
            self._new.remove(task)
        else:
            discard(self, task)

    patch.setattr(Lane, "discard", careless)


@mutant
def a_source_that_goes_on_for_nobody(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Feeds, "over", lambda s, request, place: None)


@mutant
def a_fed_step_that_is_tried_again(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    dispatched = Feeds.dispatched

    def careless(self: Feeds, task: Any) -> None:
        dispatched(self, task)
        task.said = False

    patch.setattr(Feeds, "dispatched", careless)


@mutant
def pieces_that_are_lost_while_their_reader_waits_for_a_worker(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    send = Feeds._send

    def careless(self: Feeds, feed: Any, task: Any, last: bool = False) -> None:
        send(self, feed, task, last)
        feed.waiting.clear()

    patch.setattr(Feeds, "_send", careless)


@mutant
def a_paused_source_that_is_never_resumed(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    hold = Feeds._hold
    patch.setattr(Feeds, "_hold", lambda s, feed: None if feed.source.held else hold(s, feed))


@mutant
def a_whole_value_that_nobody_holds_for_the_step_that_was_fed(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    complete = Feeds.complete

    def careless(self: Feeds, request: Request, place: int, slot: int, value: Any) -> bool:
        taken = complete(self, request, place, slot, value)
        task = request.feeds[place].task if taken else None
        if task is not None:
            self._book.release(task.keys)
            task.keys = ()
        return taken

    patch.setattr(Feeds, "complete", careless)


@mutant
def a_task_that_came_while_its_step_fell_asleep_and_is_forgotten(
    patch: pytest.MonkeyPatch, draws: random.Random
) -> None:
    slept = Idleness.slept

    def forgetful(self: Idleness, worker: int, message: Any) -> None:
        slept(self, worker, message)
        if any(self._waits(step) for step in self._tasks.lanes[message.step].together):
            self.naps.resting.discard(message.step)

    patch.setattr(Idleness, "slept", forgetful)


@mutant
def work_for_a_step_that_sleeps(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Dispatcher, "_rests", lambda s, member, lane: False)


@mutant
def a_worker_that_left_and_is_never_called(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Crew, "call", lambda s, worker, now_ms: None)


@mutant
def a_worker_that_loads_silently_and_is_taken_for_lost(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Rest, "begin", lambda s, step: None)


@mutant
def a_lost_worker_that_is_waited_for_because_it_was_told_to_wake(
    patch: pytest.MonkeyPatch, draws: random.Random
) -> None:
    move = Rest.move

    def hopeful(self: Rest, step: int, event: str) -> None:
        move(self, step, event)
        self.begin(step)

    patch.setattr(Rest, "move", hopeful)


@mutant
def device_memory_that_is_free_before_its_owner_has_settled(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def careless(self: Settling, keys: Any, now_ms: float) -> None:
        for key in keys:
            self._ledger.release(key)

    patch.setattr(Settling, "end_reads", careless)


@mutant
def a_quarantine_that_ends_before_it_is_settled(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    end_reads = Settling.end_reads

    def hasty(self: Settling, keys: Any, now_ms: float) -> None:
        end_reads(self, keys, now_ms)
        for token in list(self._ledger._tokens):
            self._ledger.settle(token)

    patch.setattr(Settling, "end_reads", hasty)


@mutant
def reads_that_end_although_the_device_goes_on(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    keep = DeviceNews.keep

    def careless(self: DeviceNews, worker: int, dispatch: Any) -> None:
        keep(self, worker, dispatch)
        one = self._crew.members[worker].unfinished[dispatch.id]
        self._book.release(one.reads)
        one.reads = ()

    patch.setattr(DeviceNews, "keep", careless)


@mutant
def outputs_that_are_free_although_the_device_still_writes_them(
    patch: pytest.MonkeyPatch, draws: random.Random
) -> None:
    keep = DeviceNews.keep

    def careless(self: DeviceNews, worker: int, dispatch: Any) -> None:
        keep(self, worker, dispatch)
        one = self._crew.members[worker].unfinished[dispatch.id]
        self._book.release_blocks(one.blocks)
        one.blocks = ()

    patch.setattr(DeviceNews, "keep", careless)


@mutant
def a_reader_that_waits_for_a_dead_worker(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr("weftline.engine.scheduling.deaths.victims", lambda what, members, near: ())


@mutant
def a_value_that_will_never_be_whole_and_is_sent_all_the_same(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Fallen, "has", lambda s, value: False)


@mutant
def memory_that_ended_with_its_worker_and_is_read_all_the_same(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr("weftline.engine.crew.fault_domain.HANDLE", "no rung")


@mutant
def a_device_that_is_given_ever_more_to_do(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(WorkerState, "full", False)


@mutant
def a_request_that_fails_because_one_worker_cannot_see(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Fetching, "was_unseen", lambda s, worker, task: False)


@mutant
def an_arena_that_is_given_in_although_somebody_cannot_see_it(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(WorkerState, "gives_near", property(lambda s: bool(s.near_arena)))
