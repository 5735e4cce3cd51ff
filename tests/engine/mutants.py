"""Plant realistic bugs: the simulation must find each within a thousand worlds.

Every mutant patches one place. A draw keeps most of them rare, as real ones are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import BatchDone
from weftline.engine.scheduler import (
    device_memory,
    device_messages,
    dispatch,
    estimates,
    events,
    graph,
    host_copies,
    idle,
    item_options,
    lost_devices,
    programs,
    request_table,
    results,
    routes,
    scheduler,
    streams,
    task_table,
    workers,
)
from weftline.engine.scheduler.admission import Admission
from weftline.engine.scheduler.batcher import Batcher
from weftline.engine.scheduler.events import FromWorker, WorkerDied
from weftline.engine.scheduler.item_options import OptionNumbers
from weftline.engine.scheduler.lost_devices import LostDevice
from weftline.engine.scheduler.recovery import LONE_DEATHS_MAX, Recovery, Verdict
from weftline.engine.scheduler.request import Request
from weftline.engine.scheduler.routes import KNOWN, Routes
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.engine.scheduler.sequences import Sequences
from weftline.engine.scheduler.sleep_state import SleepState
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.engine.scheduler.timers import Timers
from weftline.engine.scheduler.workers import WorkerState
from weftline.pipelines.spec.policy import CallPolicy
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
    discard = StepQueue.discard
    patch.setattr(StepQueue, "discard", lambda s, task: discard(s, task) if draws.random() > 0.2 else None)


@mutant
def a_suspect_retried_in_a_shared_batch(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def careless(state: SchedulerState, task: Any) -> None:
        state.queues[task.unit.deployment].add(task)
        state.due.add(task.unit.deployment)

    patch.setattr(task_table, "enqueue", careless)


@mutant
def a_lost_death(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    on_all = Scheduler.on_all

    def lossy_on_all(self: Scheduler, events: Any, now_ms: float) -> Any:
        kept = [event for event in events if not isinstance(event, WorkerDied) or draws.random() > 0.2]
        return on_all(self, kept, now_ms)

    patch.setattr(Scheduler, "on_all", lossy_on_all)


@mutant
def a_lost_withdrawal(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(request_table, "withdraw", lambda state, request: state.requests.pop(request, None))


@mutant
def a_late_answer_that_is_accepted(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    on_message = results.on_message

    def credulous(state: SchedulerState, event: FromWorker) -> None:
        on_message(state, FromWorker(event.worker, state.workers[event.worker].arena, event.message))

    patch.setattr(results, "on_message", credulous)


@mutant
def a_granted_buffer_that_is_never_released(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    on_message = results.on_message

    def forgetful(state: SchedulerState, event: FromWorker) -> None:
        if isinstance(event.message, BatchDone):
            state.workers[event.worker].granted.clear()
        on_message(state, event)

    patch.setattr(results, "on_message", forgetful)


@mutant
def an_absent_value_that_is_not_propagated(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(graph, "skip", graph.settle)


@mutant
def a_fallback_that_is_never_activated(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    failed = graph.failed

    def forgetful(
        state: SchedulerState, request: Request, place: int, error: str, message: str, step: str, *more: str
    ) -> None:
        if place in request.route.fallbacks:
            graph._abandon_unit(state, request, place)
        else:
            failed(state, request, place, error, message, step, *more)

    patch.setattr(graph, "failed", forgetful)


@mutant
def a_fallback_that_is_not_dropped(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def too_early(state: SchedulerState, request: Request, place: int) -> None:
        fallback = request.route.fallbacks.get(place)
        for worker_state in fallback.group if fallback else ():
            request.missing[worker_state] -= 1

    patch.setattr(graph, "_drop_fallback", too_early)


@mutant
def a_gathered_list_without_leases(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    gather = graph._gather

    def careless(state: SchedulerState, request: Request, place: int, outputs: Any, element: int) -> Any:
        rows = gather(state, request, place, outputs, element)
        for value in outputs:
            request_table.release(state, value.keys)
        return rows

    patch.setattr(graph, "_gather", careless)


@mutant
def lists_that_are_kept_after_the_end(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(graph, "release_gathers", lambda state, request: None)


@mutant
def suspects_that_stay_together(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    after_death = Recovery.after_death

    def together(self: Recovery, tasks: Any, why: str, now_ms: float) -> Verdict:
        verdict = after_death(self, tasks, why, now_ms)
        verdict.groups = [[task for group in verdict.groups for task in group]]
        return verdict

    patch.setattr(Recovery, "after_death", together)


@mutant
def a_killer_that_is_always_retried(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr("weftline.engine.scheduler.recovery.LONE_DEATHS_MAX", LONE_DEATHS_MAX + 100)
    patch.setattr("weftline.engine.token_bucket.RetryBudget.try_take", lambda s: True)


@mutant
def suspects_that_are_forgotten(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    after_death = Recovery.after_death

    def lossy(self: Recovery, tasks: Any, why: str, now_ms: float) -> Verdict:
        verdict = after_death(self, tasks, why, now_ms)
        verdict.groups = verdict.groups[:1]
        return verdict

    patch.setattr(Recovery, "after_death", lossy)


@mutant
def a_deadline_without_a_timer(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(request_table, "expire", lambda state: None)


@mutant
def a_time_out_that_outlives_its_task(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Timers, "discard", lambda s, name: None)


@mutant
def a_chain_that_was_not_sent(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    died = workers.on_death

    def remembers(state: SchedulerState, worker: int, refused: bool = False) -> Any:
        chains = set(state.workers[worker].chains)
        lost = died(state, worker, refused)
        state.workers[worker].chains = chains
        return lost

    patch.setattr(workers, "on_death", remembers)


@mutant
def a_restarted_worker_that_serves_one_of_its_steps(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    on_ready = results.HANDLERS[msg.Ready]

    def forgetful(state: SchedulerState, worker: int, message: msg.Ready) -> None:
        due = set(state.due)
        on_ready(state, worker, message)
        state.due -= {queue.index for queue in state.queues_of[worker][1:]} - due

    patch.setattr(results, "HANDLERS", {**results.HANDLERS, msg.Ready: forgetful})


@mutant
def a_sequence_without_worker_affinity(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Sequences, "worker", lambda s, id: None)


@mutant
def a_sequence_that_never_continues(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Sequences, "done", lambda s, id, item, now_ms: False)


@mutant
def work_for_a_worker_that_is_not_ready(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(dispatch, "can_take_batch", lambda state, worker_state, queue: not worker_state.running)


@mutant
def admission_that_misses_ended_requests(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    leave = Admission.leave
    patch.setattr(Admission, "leave", lambda s, *left: leave(s, *left) if draws.random() > 0.01 else None)


@mutant
def a_dispatch_behind_that_is_lost(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    died = workers.on_death

    def lossy(state: SchedulerState, worker: int, refused: bool = False) -> Any:
        dispatches, streaming = died(state, worker, refused)
        return dispatches[:1], streaming

    patch.setattr(workers, "on_death", lossy)


@mutant
def a_waiting_batch_that_is_forgotten(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(StepQueue, "any_waiting", lambda s: False)


@mutant
def a_sequence_whose_item_left_before_it_was_queued_and_is_still_owed(
    patch: pytest.MonkeyPatch, draws: random.Random
) -> None:
    discard = StepQueue.discard

    def careless(self: StepQueue, task: Any) -> None:
        if task in self._new:
            self._new.remove(task)
        else:
            discard(self, task)

    patch.setattr(StepQueue, "discard", careless)


@mutant
def a_source_that_runs_without_readers(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(streams, "on_unit_over", lambda state, request, place: None)


@mutant
def a_streaming_reader_that_is_retried(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    dispatched = streams.on_dispatched

    def careless(state: SchedulerState, task: Any) -> None:
        dispatched(state, task)
        task.streamed = False

    patch.setattr(streams, "on_dispatched", careless)


@mutant
def chunks_that_are_lost_while_their_reader_waits_for_a_worker(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    send = streams._send

    def careless(state: SchedulerState, feed: Any, task: Any, last: bool = False) -> None:
        send(state, feed, task, last)
        feed.waiting.clear()

    patch.setattr(streams, "_send", careless)


@mutant
def a_paused_source_that_is_never_resumed(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    hold = streams._update_pause
    patch.setattr(streams, "_update_pause", lambda state, feed: None if feed.source.held else hold(state, feed))


@mutant
def a_streamed_input_whose_whole_value_is_not_leased(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    complete = streams.complete_input

    def careless(state: SchedulerState, request: Request, place: int, slot: int, value: Any) -> bool:
        taken = complete(state, request, place, slot, value)
        task = request.stream_inputs[place].task if taken else None
        if task is not None:
            request_table.release(state, task.keys)
            task.keys = ()
        return taken

    patch.setattr(streams, "complete_input", careless)


@mutant
def a_task_that_came_while_its_step_fell_asleep_and_is_forgotten(
    patch: pytest.MonkeyPatch, draws: random.Random
) -> None:
    slept = idle.on_asleep

    def forgetful(state: SchedulerState, worker: int, message: Any) -> None:
        slept(state, worker, message)
        if any(idle._has_waiting(state, step) for step in state.queues[message.step].together):
            state.sleep.resting.discard(message.step)

    patch.setitem(results.HANDLERS, msg.Asleep, forgetful)


@mutant
def work_for_a_step_that_sleeps(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(dispatch, "_is_asleep", lambda state, worker_state, queue: False)


@mutant
def a_stopped_worker_that_is_never_restarted(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(workers, "start_stopped", lambda state, worker: None)


@mutant
def a_worker_that_is_killed_while_it_loads(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(SleepState, "begin", lambda s, step: None)


@mutant
def a_lost_worker_that_is_waited_for_after_a_wake_up(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    move = SleepState.move

    def hopeful(self: SleepState, step: int, event: str) -> None:
        move(self, step, event)
        self.begin(step)

    patch.setattr(SleepState, "move", hopeful)


@mutant
def device_memory_that_is_free_before_its_owner_has_settled(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def careless(state: SchedulerState, keys: Any) -> None:
        for key in keys:
            state.ledger.release(key)

    patch.setattr(lost_devices, "fence_reads", careless)


@mutant
def a_quarantine_that_ends_before_it_is_settled(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    end_reads = lost_devices.fence_reads

    def hasty(state: SchedulerState, keys: Any) -> None:
        end_reads(state, keys)
        for token in list(state.ledger._tokens):
            state.ledger.settle(token)

    patch.setattr(lost_devices, "fence_reads", hasty)


@mutant
def reads_that_end_although_the_device_goes_on(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    keep = device_messages.keep_unfinished

    def careless(state: SchedulerState, worker: int, dispatch: Any) -> None:
        keep(state, worker, dispatch)
        one = state.workers[worker].unfinished[dispatch.id]
        request_table.release(state, one.reads)
        one.reads = ()

    patch.setattr(device_messages, "keep_unfinished", careless)


@mutant
def outputs_that_are_free_although_the_device_still_writes_them(
    patch: pytest.MonkeyPatch, draws: random.Random
) -> None:
    keep = device_messages.keep_unfinished

    def careless(state: SchedulerState, worker: int, dispatch: Any) -> None:
        keep(state, worker, dispatch)
        one = state.workers[worker].unfinished[dispatch.id]
        request_table.release_blocks(state, one.blocks)
        one.blocks = ()

    patch.setattr(device_messages, "keep_unfinished", careless)


@mutant
def a_reader_that_waits_for_a_dead_worker(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr("weftline.engine.scheduler.failures.dependent_workers", lambda what, workers_, device_inputs: ())


@mutant
def an_incomplete_value_that_is_sent(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(LostDevice, "has", lambda s, value: False)


@mutant
def memory_that_ended_with_its_worker_and_is_read(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr("weftline.engine.scheduler.lost_devices.HANDLE", "no share mode")


@mutant
def a_device_without_a_work_limit(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(WorkerState, "full", lambda s, step: False)


@mutant
def a_request_that_fails_because_one_worker_cannot_attach_an_arena(
    patch: pytest.MonkeyPatch, draws: random.Random
) -> None:
    patch.setattr(host_copies, "retry_with_copy", lambda state, worker, task: False)


@mutant
def an_arena_that_is_used_although_a_worker_cannot_attach_it(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(WorkerState, "places_on_device", property(lambda s: bool(s.device_arena)))


# timeouts of steps, and estimates by what a request is known to run


@mutant
def a_task_that_is_started_although_it_cannot_finish(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(StepQueue, "latest_start_ms", lambda s, task, now_ms, beside=0: task.expires_ms)
    patch.setattr(Batcher, "needs_ms", lambda s, items, *own: 0.0)


@mutant
def a_timeout_that_begins_when_a_task_is_first_in_line(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    set_timeout = task_table.set_timeout
    patch.setattr(task_table, "set_timeout", lambda state, task, since_ms: set_timeout(state, task, since_ms + 500.0))


@mutant
def a_timeout_that_only_a_running_task_has(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    on_timeout = task_table.on_timeout

    def patient(state: SchedulerState, task: Any) -> None:
        if task.worker < 0:
            task.expires_ms = state.now_ms + 20.0
            state.timers.add(task.expires_ms, ("timeout", task.id))
        else:
            on_timeout(state, task)

    patch.setattr(task_table, "on_timeout", patient)


@mutant
def a_task_that_expires_before_its_queue_has_it(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    time_out = task_table.time_out

    def hasty(state: SchedulerState, task: Any, wait_ms: float = 0.0) -> None:
        queue = state.queues[task.unit.deployment]
        if task in queue._new:
            queue._new.remove(task)
        time_out(state, task, wait_ms)

    patch.setattr(task_table, "time_out", hasty)


@mutant
def a_branch_that_counts_for_every_request(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def eager(route: Any, *known: Any) -> bytes:
        return bytes([KNOWN] * len(route.units))

    patch.setattr("weftline.engine.scheduler.scheduler.known_path", eager)


@mutant
def a_condition_that_becomes_known_and_changes_nothing(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(task_table, "on_path_changed", lambda state, request: None)


@mutant
def a_step_that_counts_beyond_its_timeout(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(estimates._Costs, "_within_timeout", lambda s, place, wait_ms, run_ms: wait_ms + run_ms)


@mutant
def a_failure_that_is_absent_and_never_produced(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(graph, "_produce_absent", graph.settle)


# programs that share deployments


@mutant
def a_request_that_is_answered_by_another_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    submit = scheduler.submit

    def confused(state: SchedulerState, event: Any, *more: Any) -> None:
        others = [id for id, one in state.programs.items() if not one.retiring]
        if others and draws.random() < 0.05:
            event = msgspec.structs.replace(event, program=draws.choice(others), wanted=None)
        submit(state, event, *more)

    patch.setattr(scheduler, "submit", confused)


@mutant
def answers_of_a_mixed_batch_that_are_exchanged(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    on_batch_done = results.HANDLERS[BatchDone]

    def shifted(state: SchedulerState, worker_id: int, message: BatchDone) -> None:
        tasks = next((one.tasks for one in state.workers[worker_id].running if one.id == message.dispatch), [])
        if len({task.request.program for task in tasks}) > 1 and len(tasks) == len(message.results):
            message = msgspec.structs.replace(message, results=message.results[1:] + message.results[:1])
        on_batch_done(state, worker_id, message)

    patch.setitem(results.HANDLERS, BatchDone, shifted)  # type: ignore[arg-type]


@mutant
def an_estimate_of_another_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    join = StepQueue.join

    def common(self: StepQueue, step: Any, program: int) -> Any:
        step.latency = self.latency
        self.apart = [step]
        needed = join(self, step, program)
        step.latency = self.latency
        self._on_users()
        return needed

    patch.setattr(StepQueue, "join", common)


@mutant
def an_item_that_is_late_by_the_times_of_another_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(dispatch, "_in_time", lambda state, queue, tasks, starts_ms: tasks)


@mutant
def a_chain_id_that_two_programs_use(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    make = Routes.__init__
    patch.setattr(Routes, "__init__", lambda s, plan, steps=None, chains=None, new=None: make(s, plan, steps, chains))


@mutant
def an_arena_id_that_is_given_out_twice(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    open_program = programs.open_program

    def stingy(state: SchedulerState, event: Any, arena: int) -> Any:
        program = open_program(state, event, arena)
        state.arena_ids -= arena > 0
        return program

    patch.setattr(programs, "open_program", stingy)


@mutant
def a_program_that_ends_while_a_worker_runs_its_items(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(programs, "_at_work", lambda state: [])


@mutant
def a_program_that_ends_while_its_requests_are_open(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def hasty(state: SchedulerState) -> None:
        for program in list(state.retiring.values()):
            programs._forget(state, program)

    patch.setattr(programs, "end_retired", hasty)


@mutant
def a_program_that_never_ends(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def careless(state: SchedulerState, event: Any) -> None:
        program = state.programs.get(event.program)
        if program is not None:
            program.retiring = program.to_check = True

    patch.setitem(scheduler.HANDLERS, events.RetireProgram, careless)  # type: ignore[arg-type]


@mutant
def a_step_that_outlives_its_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(StepQueue, "leave", lambda s, step: None)


@mutant
def an_arena_that_outlives_its_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    retire = Ledger.retire_arena
    owned = lambda s, arena: any(one.arena == arena for one in opened)  # noqa: E731
    opened: list[Any] = []
    open_program = programs.open_program

    def noted(*args: Any) -> Any:
        opened.append(open_program(*args))
        return opened[-1]

    patch.setattr(programs, "open_program", noted)
    patch.setattr(Ledger, "retire_arena", lambda s, arena: None if owned(s, arena) else retire(s, arena))


@mutant
def a_chain_that_stays_in_workers_after_a_reload(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(Routes, "chain_ids", property(lambda s: ()))


@mutant
def a_retired_program_that_admits_requests(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    check_open = programs.check_open
    patch.setattr(programs, "check_open", lambda state, id: state.programs.get(id) or check_open(state, id))


@mutant
def limits_of_another_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    open_program = programs.open_program

    def greedy(state: SchedulerState, event: Any, arena: int) -> Any:
        program = open_program(state, event, arena)
        program.admission = next(iter(state.programs.values())).admission
        return program

    patch.setattr(programs, "open_program", greedy)


@mutant
def a_list_limit_of_another_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def loose(state: SchedulerState, event: Any, arena: int) -> Any:
        first = next(iter(state.programs.values()), None)
        program = open_program(state, event, arena)
        if first is not None:
            program.plan = replace(program.plan, limits=first.plan.limits)
        return program

    open_program = programs.open_program
    patch.setattr(programs, "open_program", loose)


@mutant
def a_retry_budget_that_programs_share(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    open_program = programs.open_program

    def shared(state: SchedulerState, event: Any, arena: int) -> Any:
        program = open_program(state, event, arena)
        program.retries = next(iter(state.programs.values())).retries
        return program

    patch.setattr(programs, "open_program", shared)


@mutant
def counters_of_another_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    open_program = programs.open_program

    def mixed(state: SchedulerState, event: Any, arena: int) -> Any:
        program = open_program(state, event, arena)
        program.counters = next(iter(state.programs.values())).counters
        return program

    patch.setattr(programs, "open_program", mixed)


@mutant
def an_error_that_names_the_step_of_another_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    fail = task_table.fail

    def vague(state: SchedulerState, task: Any, error: str, message: str, step: str, *more: Any, **named: Any) -> None:
        fail(state, task, error, message, state.queues[task.unit.deployment].users[0].name, *more, **named)

    patch.setattr(task_table, "fail", vague)


@mutant
def a_program_that_pays_for_the_deaths_of_another(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    def unfair(state: SchedulerState, tasks: Any) -> None:
        for program in state.programs.values():
            program.deaths_ms.append(state.now_ms)
            program.to_check = True

    patch.setattr(programs, "note_death", unfair)


@mutant
def a_worker_that_ends_while_a_program_uses_it(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    forget = programs._forget

    def hasty(state: SchedulerState, program: Any) -> None:
        forget(state, program)
        for worker in programs.workers_of(state, program):
            programs._dismiss(state, worker)

    patch.setattr(programs, "_forget", hasty)


@mutant
def a_worker_that_outlives_the_programs_that_use_it(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(programs, "_dismiss", lambda state, worker: None)


@mutant
def memory_that_is_returned_while_a_process_has_it(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(device_memory, "_is_gone", lambda state, worker: True)


@mutant
def memory_of_an_ended_worker_that_is_never_returned(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(device_memory, "_is_gone", lambda state, worker: False)


@mutant
def an_ended_worker_that_is_started_again(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    dismiss = workers.dismiss

    def forgetful(state: SchedulerState, worker_id: int) -> bool:
        was_ready = dismiss(state, worker_id)
        state.workers[worker_id].unused = False
        return was_ready

    patch.setattr(workers, "dismiss", forgetful)


@mutant
def an_item_with_the_options_of_another_step(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    made = dispatch._metadata

    def confused(state: SchedulerState, task: Any, queue: StepQueue) -> msg.ItemMetadata:
        metadata = made(state, task, queue)
        return msgspec.structs.replace(metadata, options=max(0, metadata.options - (draws.random() < 0.2)))

    patch.setattr(dispatch, "_metadata", confused)


@mutant
def options_that_a_restarted_worker_does_not_have(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(OptionNumbers, "messages", lambda s: [])


@mutant
def options_that_are_dropped_while_a_step_has_them(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    leave = OptionNumbers.leave
    patch.setattr(OptionNumbers, "leave", lambda s, step: leave(s, step) or max(s._steps, default=0))


@mutant
def options_that_outlive_their_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    leave = OptionNumbers.leave
    patch.setattr(OptionNumbers, "leave", lambda s, step: leave(s, step) * 0)


@mutant
def a_batch_of_items_with_different_options(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(OptionNumbers, "_group", lambda s, options: 0)


@mutant
def a_number_of_options_that_is_used_twice(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    leave = OptionNumbers.leave

    def stingy(self: OptionNumbers, step: Any) -> int:
        gone = leave(self, step)
        self._last = max(self._steps, default=0)
        return gone

    patch.setattr(OptionNumbers, "leave", stingy)


@mutant
def a_check_of_outputs_that_another_step_wants(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(item_options, "_policy", lambda step: CallPolicy())


@mutant
def a_chain_with_the_options_of_another_program(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    patch.setattr(routes, "Stage", lambda step, inputs, options: msg.Stage(step, inputs))


@mutant
def a_stream_that_takes_two_programs_for_one(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    join = OptionNumbers.join
    patch.setattr(OptionNumbers, "join", lambda s, step, program: join(s, step, 0))


@mutant
def a_seed_of_the_step_that_was_opened(patch: pytest.MonkeyPatch, draws: random.Random) -> None:
    encoded, policy = item_options._encoded, item_options._policy

    def nameless(self: OptionNumbers, step: Any, program: int) -> Any:
        own = self._own
        same = encoded(step.planned) == own.options and policy(step.planned) == own.policy
        return None if same else join(self, step, program)

    join = OptionNumbers.join
    patch.setattr(OptionNumbers, "join", nameless)
