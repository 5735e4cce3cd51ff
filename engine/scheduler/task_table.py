"""Live tasks: begin, queue, retry, drop and end.

A task is live from the moment its unit starts until its result is handled or no longer needed. A worker may still run
a task that is not live: the leases of its inputs last until the worker has sent the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import PIECES, Value
from weftline.engine.scheduler import estimates, graph, groups, idle, request_table, workers
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.known_path import known_path
from weftline.engine.scheduler.request import OPEN, Request, Task, ms_text, record_timings
from weftline.engine.scheduler.routes import Route
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.engine.scheduler.workers import READY
from weftline.errors import KEEPS_FAILING_TO_START
from weftline.shm.block import Key

LONGER_MS = 1.0
"""A streaming item that timed out is learned as this much longer than it ran."""


def begin(
    state: SchedulerState, request: Request, place: int, inputs: tuple[Value, ...], keys: Sequence[Key], element: int
) -> None:
    """Queue a task for a unit, or for one element of it."""
    if request.state != OPEN:
        request_table.release(state, keys)
        return
    unit = request.route.units[place]
    state.task_ids += 1
    due_ms = math.inf
    if request.deadline_ms is not None:
        due_ms = request.deadline_ms - estimates.after_ms(
            state, request.program, request.route, _path(state, request), place
        )
    task = Task(state.task_ids, request, place, unit, inputs, keys, state.now_ms, due_ms, element)
    state.live[task.id] = request.tasks[task.id] = task
    if state.sleep.any:
        idle.mark_used(state, unit.deployment)
    if request.stream_inputs and place in request.stream_inputs:
        stream = request.stream_inputs[place]
        if inputs[unit.stream_position] is PIECES:
            task.stream_input, stream.task = stream, task
        else:
            stream.end()
    held = request.group is not None and groups.hold_task(state, request.group, task)
    if unit.deployment in state.hopeless:
        fail_hopeless(state, task, "it is given up")
        return
    if unit.deployment in request.lost:
        forget(state, task)
        end(state, task)
        reason = "the state of the sequence was lost when its worker died; start the sequence again"
        graph.failed(state, request, place, "WorkerDied", reason, unit.head.name)
        return
    if request.sequence is not None:
        request.reached.add(unit.deployment)
    if held:
        return
    if unit.head.timeout_ms == math.inf or task.stream_input is not None:
        enqueue(state, task)
        return
    set_timeout(state, task, state.now_ms)
    wait_ms, queue = _wait_ms(state, task), state.queues[unit.deployment]
    latest_ms = queue.latest_start_ms(task, state.now_ms, queue.waiting if wait_ms else 0)
    enqueue(state, task)
    if state.now_ms + wait_ms >= latest_ms:
        time_out(state, task, wait_ms)


def _path(state: SchedulerState, request: Request) -> bytes:
    if request.path is None:
        request.path = known_path(request.route, request.values, request.missing, request.active_fallbacks)
    return request.path


def on_path_changed(state: SchedulerState, request: Request) -> None:
    """Update the due times of the queued tasks of a request with a deadline, when more of its path is known."""
    request.path, deadline_ms = None, request.deadline_ms
    if deadline_ms is None:
        return
    path = _path(state, request)
    for task in request.tasks.values():
        due_ms = deadline_ms - estimates.after_ms(state, request.program, request.route, path, task.place)
        if task.worker < 0 and due_ms != task.due_ms:
            task.due_ms = due_ms
            state.queues[task.unit.deployment].reschedule(task)
            state.due.add(task.unit.deployment)


# timeouts of steps


def set_timeout(state: SchedulerState, task: Task, since_ms: float) -> None:
    """Start the timer of the step's timeout_ms for a task that is not with a worker yet, if the step has one."""
    timeout_ms = task.unit.head.timeout_ms
    if timeout_ms < math.inf:
        task.expires_ms = since_ms + timeout_ms
        latest_ms = state.queues[task.unit.deployment].latest_start_ms(task, state.now_ms)
        state.timers.add(max(latest_ms, since_ms), ("timeout", task.id))


def _wait_ms(state: SchedulerState, task: Task) -> float:
    """Return the time until a task of a step with a timeout can start: behind the work that its workers have now.

    Elements of one list run in as many rounds as the instances need. A task that may be retried waits in any case: its
    next attempt has the whole timeout again.
    """
    queue = state.queues[task.unit.deployment]
    if state.recovery.may_retry(task, timed_out=True):
        return 0.0
    wait_ms = estimates.busy_ms(state, queue)
    if task.element > 0 and not queue.streams:
        rounds = task.element // (queue.items_max * max(1, len(queue.workers)))
        wait_ms += rounds * task.unit.head.latency.shortest_ms(queue.items_max)
    return wait_ms


def on_timeout(state: SchedulerState, task: Task) -> None:
    """Handle the timer of a task: it has expired, or it can no longer be started in time."""
    at_ms = task.expires_ms
    if task.worker < 0:
        at_ms = state.queues[task.unit.deployment].latest_start_ms(task, state.now_ms)
    if state.now_ms < at_ms:
        state.timers.add(at_ms, ("timeout", task.id))
    else:
        time_out(state, task)


def time_out(state: SchedulerState, task: Task, wait_ms: float = 0.0) -> None:
    """Handle the timeout of a task, which has ended or is certain to: retry the task, or fail its unit.

    wait_ms: the time until it could start.
    """
    queue = state.queues[task.unit.deployment]
    message = f"it took longer than its timeout_ms, {task.unit.head.timeout_ms:g} ms"
    record_timings(state, task, "lost")
    at_work = task.worker >= 0
    if at_work:  # the worker keeps it until it answers; the next attempt is another task
        state.out.append(ev.Send(task.worker, msg.CancelItems(task.unit.deployment, (task.id,))))
        if queue.streams:  # it is cut short: all that is known is that it takes longer
            queue.learn_cut(task.unit.head, state.now_ms - task.started_ms + LONGER_MS, state.now_ms)
        task = replace(state, task)
    else:
        queue.discard(task)
        state.timers.discard(("again", task.id))
        left_ms = task.expires_ms - state.now_ms
        if left_ms > 0:
            task.request.program.counters.late += 1
            needs_ms = wait_ms + task.expires_ms - queue.latest_start_ms(task, state.now_ms)
            needs = f"it may need {ms_text(max(needs_ms, left_ms))} ms, waiting included"
            left = f"has {ms_text(left_ms)} ms left of its timeout_ms, {task.unit.head.timeout_ms:g} ms"
            message = f"by recent measurements {needs}, and {left}; it was not started"
    fail(state, task, "DeadlineExceeded", message, task.unit.head.name, timed_out=True, at_work=at_work)


# queues


def queue_group(state: SchedulerState, tasks: list[Task]) -> None:
    """Queue the tasks of an ordered group at one step, which is complete."""
    for task in tasks:
        set_timeout(state, task, state.now_ms)
    queue = state.queues[tasks[0].unit.deployment]
    queue.job.form(tasks, queue.job_items())
    state.due.add(queue.index)


def enqueue(state: SchedulerState, task: Task) -> None:
    """Queue a task for its step. A task that a worker died of is queued as a suspect, alone."""
    queue = state.queues[task.unit.deployment]
    task.waits_for_copy = False
    if task.deaths:
        queue.suspects.append([task])
    elif task.request.job and queue.sequences is None:
        queue.job.add(task)
    else:
        queue.add(task)
    state.due.add(queue.index)


def forget(state: SchedulerState, task: Task) -> bool:
    """Remove a task from the live ones; return False when it was not live."""
    if state.live.pop(task.id, None) is None:
        return False
    del task.request.tasks[task.id]
    if state.sleep.any:
        idle.mark_used(state, task.unit.deployment)
    if task.request.group is not None:
        groups.on_task_over(state, task.request.group, task)
    if task.stream_input is not None:
        task.stream_input.end()
    if state.timers.at:
        state.timers.discard(("timeout", task.id))
        state.timers.discard(("again", task.id))
    return True


def drop(state: SchedulerState, task: Task) -> None:
    """Drop a task whose result is no longer needed: dequeue it, or cancel it at its worker.

    The leases of a cancelled task last until its worker has sent the result: it may be reading.
    """
    if not forget(state, task):
        return
    if task.worker >= 0:
        state.out.append(ev.Send(task.worker, msg.CancelItems(task.unit.deployment, (task.id,))))
    else:
        state.queues[task.unit.deployment].discard(task)
        end(state, task)


def end(state: SchedulerState, task: Task) -> None:
    """Release the leases of a task, and let the next task of its sequence go."""
    if task.keys:
        request_table.release(state, task.keys)
        task.keys = ()
    queue = state.queues[task.unit.deployment]
    if task.deaths:  # others may have waited behind it
        state.due.add(queue.index)
    if queue.sequences is not None and task.request.sequence is not None:
        part, worker_id = task.request.sequence, queue.sequences.worker(task.request.sequence.id)
        if queue.sequences.done(part.id, task.id, state.now_ms) and worker_id is not None:
            end_sequences(state, queue, [(part.id, worker_id)])
        state.due.add(queue.index)


def drop_all_of(state: SchedulerState, request: Request) -> None:
    """Drop all tasks of a request, and what else it has pending."""
    for task in list(request.tasks.values()):
        drop(state, task)
    if request.gathers:
        graph.release_gathers(state, request)
    if request.stalled:
        state.timers.discard(("stall", request.id))
    if request.sequence is not None:
        for queue in sequence_queues(state, request.route):
            if queue.index not in request.reached:
                forgo_sequence(state, queue, request.sequence.id)


def fail(
    state: SchedulerState,
    task: Task,
    error: str,
    message: str,
    step: str,
    timed_out: bool = False,
    at_work: bool = False,
    traceback: str = "",
    param: str = "",
) -> None:
    """Handle a failed task, which is out of its queue and worker: retry it, or fail its unit.

    at_work:   it timed out while a worker had it, which may still run it.
    traceback: of the exception that the step's code raised.
    param:     as in InputError.
    """
    wait_ms = state.recovery.try_again_in_ms(task, error, timed_out, at_work)
    if wait_ms is None:
        if forget(state, task):
            end(state, task)
            graph.failed(state, task.request, task.place, error, message, step, traceback, param)
        return
    task.request.program.counters.retried += 1
    task.worker, task.waits_for_copy = -1, False
    state.due.add(task.unit.deployment)  # which it may have left to others meanwhile
    set_timeout(state, task, state.now_ms + wait_ms)
    if wait_ms:
        state.timers.add(state.now_ms + wait_ms, ("again", task.id))
    else:
        enqueue(state, task)


def replace(state: SchedulerState, task: Task) -> Task:
    """Leave a task at its worker, whose result will be ignored; return a copy to retry."""
    forget(state, task)
    state.task_ids += 1
    request_table.hold(state, task.keys)
    again = Task(
        state.task_ids, task.request, task.place, task.unit, task.inputs, task.keys, task.arrived_ms, task.due_ms,
        task.element, -1, task.started_ms, task.attempts, task.deaths, task.digest, task.streamed, spared=task.spared,
        expires_ms=task.expires_ms,
    )  # fmt: skip
    state.live[again.id] = again.request.tasks[again.id] = again
    if task.request.group is not None:
        groups.on_task_copied(state, task.request.group)
    return again


def fail_hopeless(state: SchedulerState, task: Task, why: str) -> None:
    """Fail a task whose step has no worker left."""
    if forget(state, task):
        end(state, task)
        reason = f"its worker {KEEPS_FAILING_TO_START} ({why})"
        graph.failed(state, task.request, task.place, "WorkerDied", reason, task.unit.head.name)


def fail_hopeless_steps(state: SchedulerState, why: str) -> None:
    """Fail every task of steps whose workers were all given up; later tasks fail when they begin."""
    state.hopeless |= {queue.index for queue in state.queues if workers.unavailable(state, queue.index)}
    for task in list(state.live.values()):
        if task.id in state.live and task.worker < 0 and task.unit.deployment in state.hopeless:
            state.queues[task.unit.deployment].discard(task)
            fail_hopeless(state, task, why)


def sequence_queues(state: SchedulerState, route: Route) -> list[StepQueue]:
    """Return the queues of a route's steps that keep state between the requests of a sequence."""
    if not state.sequenced:
        return []
    return [queue for one in sorted(route.deployments) if (queue := state.queues[one]).sequences is not None]


def forgo_sequence(state: SchedulerState, queue: StepQueue, sequence: str) -> None:
    """Record that a request of a sequence ended without reaching a step with memory."""
    if queue.sequences is not None:
        worker_id = queue.sequences.worker(sequence)
        if queue.sequences.forgo(sequence, state.now_ms):
            end_sequences(state, queue, [(sequence, worker_id)])


def end_sequences(state: SchedulerState, queue: StepQueue, ended: Iterable[tuple[str, int | None]]) -> None:
    """Send EndSequences for sequences that have ended, given as (id, worker)."""
    for id, worker_id in ended:
        if worker_id is not None and state.workers[worker_id].state == READY:
            state.out.append(ev.Send(worker_id, msg.EndSequences(queue.index, (id,))))


def end_idle_sequences(state: SchedulerState) -> None:
    """End the sequences that had no request for too long."""
    for queue in state.queues if state.sequenced else ():
        if queue.sequences is not None:
            end_sequences(state, queue, queue.sequences.idle(state.now_ms))
