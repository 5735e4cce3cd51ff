"""Worker deaths: retry or fail what the worker ran, requeue what waited for it, end the sequences that it kept.

Device memory that it was reading is fenced until no read of it can be left (lost_devices.py). What depended on its
unfinished work on the device ends too: the workers that wait for it there, and the requests that need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import (
    graph,
    host_copies,
    kv_sharing,
    lost_devices,
    programs,
    request_table,
    task_table,
    workers,
)
from weftline.engine.scheduler.death_report import DeathReport, cause_of
from weftline.engine.scheduler.device_work import Unfinished
from weftline.engine.scheduler.lost_devices import LostDevice, dependent_workers, lost_with
from weftline.engine.scheduler.recovery import Verdict
from weftline.engine.scheduler.request import Request, Task, record_timings
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.engine.scheduler.workers import GIVEN_UP, LEAVING, Dispatch, WorkerState


def on_death(state: SchedulerState, event: ev.WorkerDied) -> None:
    """Handle the end of a worker's process."""
    worker = state.workers[event.worker]
    if event.arena != worker.arena or not worker.alive:
        state.counters.stale += 1
        return
    report = _report(state, worker, event)
    if worker.state != LEAVING and not worker.unused:  # a leaving one has only gone to sleep
        state.counters.deaths += 1
        by = state.counters.deaths_by
        by[report.step, report.cause] = by.get((report.step, report.cause), 0) + 1
    kv_sharing.on_death(state, event.worker)
    why = worker.failed or worker.why or event.how
    unfinished, fetches = list(worker.unfinished.values()), list(worker.fetches)
    heads = {dispatch.id for dispatch in worker.heads}
    dispatches, streams = workers.on_death(state, event.worker, event.refused)
    in_hand = [*(task for one in dispatches if one.id in heads for task in one.tasks), *streams]
    _retire_arenas(state, event.arena, worker.device_arena)
    _end_reads(state, dispatches, streams, unfinished)
    for dispatch in dispatches:
        request_table.release_blocks(state, (*dispatch.blocks, *dispatch.granted))
    for one in unfinished:
        request_table.release_blocks(state, one.blocks)
    request_table.release_blocks(state, worker.granted)
    worker.granted.clear()
    _fail_dependents(state, lost_with(unfinished, worker.device_arena, worker.share_mode), why)
    host_copies.on_owner_death(state, fetches, why)
    for task in [task for one in dispatches if one.id not in heads for task in one.tasks]:
        task.worker = -1  # it was waiting: nothing is held against it
        if task.id in state.live:
            report.waiting += 1
            task_table.enqueue(state, task)
        else:
            task_table.end(state, task)
    if not worker.spared:
        programs.note_death(state, in_hand)
    report.requests = [task.request.id for task in in_hand if task.id in state.live]
    _retry_after_death(state, in_hand, why, worker.spared, report)
    for queue in state.queues_of[event.worker]:
        if queue.sequences is not None:
            report.sequences += _lose_sequences(state, queue, event.worker, why)
        state.due.add(queue.index)
    if worker.state == GIVEN_UP:
        task_table.fail_hopeless_steps(state, why)
    if not report.expected and not worker.unused:
        state.out.append(ev.LogDeath(event.worker, *report.line(worker, state.now_ms)))


def _report(state: SchedulerState, worker: WorkerState, event: ev.WorkerDied) -> DeathReport:
    """Return the report of a death, before it is handled."""
    units = [*(dispatch.unit for dispatch in worker.heads), *(task.unit for task in worker.streams.values())]
    steps = sorted({unit.deployment for unit in units} or state.steps_of[event.worker])
    name = ", ".join(state.deployments[step].name for step in steps)
    how = worker.failed or worker.why or event.how
    return DeathReport(worker.name, name, how, cause_of(worker, event), worker.state, last=event.last)


def _retire_arenas(state: SchedulerState, arena: int, device_arena: int) -> None:
    state.ledger.retire_arena(arena)
    if device_arena:
        state.ledger.retire_arena(device_arena)
        state.ledger.retire_arena(-device_arena)


def _end_reads(
    state: SchedulerState, dispatches: Iterable[Dispatch], streams: Iterable[Task], unfinished: Iterable[Unfinished]
) -> None:
    """Fence what a dead worker may still be reading on devices. Its tasks keep tickets of their own."""
    held = [key for one in unfinished for key in one.reads]
    tasks = [*streams, *(task for dispatch in dispatches for task in dispatch.tasks)]
    for key in [key for task in tasks for key in task.keys if workers.owner_on_device(state, key[0]) is not None]:
        state.ledger.hold(key)
        held.append(key)
    lost_devices.fence_reads(state, held)


def _fail_dependents(state: SchedulerState, what: LostDevice, why: str) -> None:
    """Kill the workers, and fail the requests and tasks, that need what was lost."""
    if not what:
        return
    lost_devices.add(state, what)
    for worker_id in dependent_workers(what, state.workers, state.device_inputs):
        worker = state.workers[worker_id]
        worker.why, worker.spared = "it waits on the device for the work of a dead worker", True
        state.out.append(ev.KillWorker(worker_id, worker.why))
    for request in list(state.requests.values()):
        gathered = [value for gather in request.gathers.values() for row in gather.outputs for value in row]
        gone = next(filter(what.has, [*request.values.values(), *gathered]), None)
        if gone is not None:
            request_table.end(state, request, "fail", "WorkerDied", *_lost_message(request, what, gone, why))
            continue
        request_table.replace_lost_values(state, request, what.remaining)
        for task in list(request.tasks.values()):
            gone = next(filter(what.has, task.inputs), None)
            if gone is None:
                task.inputs = tuple(map(what.remaining, task.inputs))
            elif task.id in state.live:  # else one before it has ended it
                task_table.drop(state, task)
                graph.failed(state, request, task.place, "WorkerDied", *_lost_message(request, what, gone, why))


def _lost_message(request: Request, what: LostDevice, gone: Value, why: str) -> tuple[str, str]:
    """Return the error text for a lost value of a request, and the step that produced it."""
    step = what.step(gone, request.id)
    if not step:
        return f"a device tensor was lost when its worker died ({why})", ""
    return f"the worker died ({why}) before its work on the device was finished", step


def _retry_after_death(
    state: SchedulerState, in_hand: Sequence[Task], why: str, spared: bool, report: DeathReport
) -> None:
    live = []
    for task in in_hand:
        if task.id in state.live:
            live.append(task)
            record_timings(state, task, "lost")
        else:
            task_table.end(state, task)
        task.worker = -1
    kinds: dict[tuple[int, int], list[Task]] = {}
    for task in live:
        kinds.setdefault((task.unit.deployment, task.unit.group), []).append(task)
    for (index, _), tasks in kinds.items():
        tasks = [task for task in tasks if task.id in state.live]  # one that failed may have ended others
        verdict = _verdict(state, tasks, why, spared)
        queue = state.queues[index]
        again = sum(map(len, verdict.groups))
        if len(verdict.groups) > 1 and not spared:
            report.bisected += again
        else:
            report.retried += again
        report.failed += len(verdict.failed)
        report.quarantined += len(verdict.kept_out)
        for group in verdict.groups:
            for task in group:
                task.request.program.counters.retried += 1
            if spared:
                task_table.enqueue(state, group[0])
            else:
                queue.suspects.append(group)
        for step, _, program in verdict.kept_out:
            program.counters.quarantined += 1
            send_quarantine(state, step)
        for task, message in verdict.failed:
            if task_table.forget(state, task):
                task_table.end(state, task)
                graph.failed(state, task.request, task.place, "WorkerDied", message, task.unit.head.name)


def _verdict(state: SchedulerState, tasks: Sequence[Task], why: str, spared: bool) -> Verdict:
    recovery = state.recovery
    return recovery.after_loss(tasks, why) if spared else recovery.after_death(tasks, why, state.now_ms)


def send_quarantine(state: SchedulerState, step: int) -> None:
    """Send the digests that a step must not run to its workers."""
    digests = state.recovery.quarantine.digests(step)
    workers.send_ready(state, step, msg.QuarantineItems(step, digests))


def _lose_sequences(state: SchedulerState, queue: StepQueue, worker_id: int, why: str) -> int:
    """End the sequences that a step kept in a dead worker: their waiting tasks fail, later ones will.

    Returns their number.
    """
    lost = set(queue.sequences.lost(worker_id)) if queue.sequences is not None else set()
    for request in state.requests.values() if lost else ():
        if request.sequence is not None and request.sequence.id in lost and queue.index not in request.reached:
            request.reached.add(queue.index)
            request.lost.add(queue.index)
    for task in [t for t in state.live.values() if t.unit.deployment == queue.index]:
        if task.request.sequence is not None and task.request.sequence.id in lost and task.id in state.live:
            queue.discard(task)
            if task_table.forget(state, task):
                task_table.end(state, task)
                reason = f"the state of the sequence was lost when its worker died ({why}); start the sequence again"
                graph.failed(state, task.request, task.place, "WorkerDied", reason, task.unit.head.name)
    return len(lost)
