"""Dispatch: which batch goes to which worker, and when.

After every event the queues that changed are served, the most urgent first. A free worker gets the next batch of a
queue when the batcher closes one; suspects go first, and alone. A worker that runs short batches gets a second one
ahead, so that it does not idle for a message round trip between two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import allocations, estimates, host_copies, request_table, streams, task_table
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.routes import Unit
from weftline.engine.scheduler.sleep_state import AWAKE
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.engine.scheduler.workers import LEAVING, READY, STARTING, Dispatch, WorkerState
from weftline.shm.block import Block

NAP_MS = 0.05
"""Shortest batching wait in milliseconds: a queue that is due sooner is dispatched at the next event."""

JOB_STREAMS, JOB_STREAMS_ALONE = 4, 64
"""Limit on rows of jobs in an instance of a streaming step: with recent interactive requests, and without. Started rows
are not preempted."""

LATELY_MS = 2000.0
"""Interactive requests of a streaming step count as recent for this time."""

DISPATCHES_MAX = 2
"""Most dispatches with one thread of a worker: the one it runs, and one so that it need not wait for the next."""


def dispatch_due(state: SchedulerState) -> None:
    """Send the due batches of the queues that changed to free workers, the most urgent first."""
    while state.due:
        queues = list(map(state.queues.__getitem__, state.due))
        state.due.clear()
        if len(queues) > 1:
            queues.sort(key=_urgency)
        for queue in queues:
            _dispatch_queue(state, queue)


def _dispatch_queue(state: SchedulerState, queue: StepQueue) -> None:
    if state.batch_waits:
        state.batch_waits.pop(queue.index, None)
    if queue.has_new:
        for worker_id in queue.workers if queue.takes_new_at_once else ():
            if can_take_batch(state, state.workers[worker_id], queue):
                new = queue.take_new()
                if new is None:
                    break
                if queue.streams:
                    _assign(state, worker_id, queue, new)
                else:
                    _send_batch(state, worker_id, queue, new)
                if queue.job.any:
                    _serve_jobs(state, queue)
                return
        queue.settle(state.now_ms)
    if queue.sequences is not None:
        instances = {worker_id: state.workers[worker_id] for worker_id in queue.workers}
        load = {id: len(one.running) for id, one in instances.items() if one.state == READY and not one.why}
        queue.release_sequences(state.live, load, state.now_ms)
    for worker_id in queue.workers:
        worker = state.workers[worker_id]
        while queue.suspects and worker.state == READY and not worker.busy and not worker.why:
            if worker.sleep.any and _is_asleep(state, worker, queue):
                break
            _send_batch(state, worker_id, queue, queue.suspects.popleft(), suspect=True)
        batcher = queue.queue(worker_id)
        while batcher.waiting and can_take_batch(state, worker, queue):
            starts_ms = state.now_ms
            if queue.expires and worker.running:  # it starts when the worker has run that
                starts_ms += estimates.left_ms(state, worker, queue)
            for late in batcher.late(starts_ms):
                if late in state.live:
                    _expire_late(state, state.live[late], queue)
            taken = batcher.take(starts_ms, queue.batches_a_message())
            if not taken:
                wake = batcher.wake_at_ms()
                if wake is not None:
                    wake = max(wake, state.now_ms + NAP_MS)
                    state.batch_waits[queue.index] = min(state.batch_waits.get(queue.index, wake), wake)
                break
            tasks = [state.live[id] for id in taken]
            if queue.mixed:
                tasks = _in_time(state, queue, tasks, starts_ms)
                if not tasks:
                    continue
            _assign(state, worker_id, queue, tasks)
    if queue.suspects and queue.streams:
        streams.resume_sources(state, queue)
    if queue.job.any:
        _serve_jobs(state, queue)


def _serve_jobs(state: SchedulerState, queue: StepQueue) -> None:
    """Send rows of jobs to workers that usual requests leave free."""
    for worker_id in queue.job_workers:
        while queue.job.any and queue.calm and _can_take_job(state, state.workers[worker_id], queue):
            items_max = queue.job_items()
            if queue.streams and queue.shared:
                items_max = min(items_max, _job_streams_left(state, state.workers[worker_id], queue))
                if items_max <= 0:
                    break
            tasks = queue.job.take(items_max)
            if queue.expires:
                tasks, expired = queue.split_expired(tasks, state.now_ms)
                for task in expired:
                    if task.id in state.live:
                        task_table.time_out(state, task)
            if tasks:
                _assign(state, worker_id, queue, tasks, queue.job_workers)


def _job_streams_left(state: SchedulerState, worker: WorkerState, queue: StepQueue) -> int:
    """Return how many more rows of jobs an instance of a streaming step may hold now.

    When that number grows by the passing of time alone, the queue is served again then.
    """
    of_step = [task for task in worker.streams.values() if task.unit.deployment == queue.index]
    held = sum(task.request.job for task in of_step)
    calm_ms = queue.usual_ms + LATELY_MS
    if held < len(of_step):
        queue.usual_ms = state.now_ms
    elif calm_ms <= state.now_ms:
        return JOB_STREAMS_ALONE - held
    else:
        state.batch_waits[queue.index] = min(state.batch_waits.get(queue.index, calm_ms), calm_ms)
    return JOB_STREAMS - held


def _can_take_job(state: SchedulerState, worker: WorkerState, queue: StepQueue) -> bool:
    """Return True if a worker can take a job batch: the first one, or a second one where interactive requests cannot
    be delayed by both."""
    if not _is_available(state, worker, queue):
        return False
    running = worker.on_thread(queue.index) if worker.threads else worker.running
    if queue.streams or not running:
        return True
    return (
        len(running) < DISPATCHES_MAX
        and not queue.shared
        and queue.quick
        and not queue.suspects
        and not (queue.beside and not worker.threads and any(one.any_waiting() for one in queue.beside))
        and not worker.waits_for_buffer
        and not any(_is_free(state, one, queue) for one in queue.job_workers)
    )


def can_take_batch(state: SchedulerState, worker: WorkerState, queue: StepQueue) -> bool:
    """Return whether a worker may get (more) of a step's work now."""
    running = worker.on_thread(queue.index) if worker.threads else worker.running
    if queue.streams or not running:
        return (not queue.suspects or not queue.streams) and _is_available(state, worker, queue)
    return (
        len(running) < DISPATCHES_MAX
        and len(queue.queue(queue.workers[0]).waiting) >= queue.items_max  # mostly not: it is checked first
        and _is_available(state, worker, queue)
        and queue.sequences is None
        and queue.quick
        and not queue.suspects  # they wait for a worker that has nothing else to do
        and not (queue.beside and not worker.threads and any(one.waiting for one in queue.beside))  # it would starve
        and not worker.waits_for_buffer
        and not any(_is_free(state, worker_id, queue) for worker_id in queue.workers)
    )


def _is_available(state: SchedulerState, worker: WorkerState, queue: StepQueue) -> bool:
    """Return whether a worker can run a step at all, however much it has to do."""
    if worker.state != READY or worker.why:
        return False
    busy = worker.running or worker.streams or worker.unfinished or worker.fetches
    if busy and (worker.suspect or worker.full(queue.index)):
        return False
    if worker.threads and any(state.queues[step].suspects for step in worker.threads):
        return False  # they wait until none of its threads has anything to do
    return not (worker.sleep.any and _is_asleep(state, worker, queue))


def _is_asleep(state: SchedulerState, worker: WorkerState, queue: StepQueue) -> bool:
    """Return whether a worker cannot run a step, or a step chained to it, because of its sleep state."""
    return worker.sleep.moving or any(worker.sleep.state(step) != AWAKE for step in queue.together)


def _is_free(state: SchedulerState, worker_id: int, queue: StepQueue) -> bool:
    worker = state.workers[worker_id]
    return worker.state == READY and not worker.on_thread(queue.index)


def _in_time(state: SchedulerState, queue: StepQueue, tasks: list[Task], starts_ms: float) -> list[Task]:
    """Return which tasks of a batch can be in time by what their own steps have measured; the others fail."""
    good, late = queue.split_late(tasks, starts_ms)
    for task in late:
        if task.id in state.live:
            _expire_late(state, task, queue)
    return [task for task in good if task.id in state.live] if late else good


def _expire_late(state: SchedulerState, task: Task, queue: StepQueue) -> None:
    """Fail a request whose task cannot meet its deadline any more, or a task that would expire, before it reaches a
    model."""
    if task.expires_ms < task.due_ms:
        task_table.time_out(state, task)
        return
    request, step = task.request, task.unit.head
    request.program.counters.late += 1
    by_ms = state.now_ms + step.latency.run_ms(1) - task.due_ms
    reason = f"by recent measurements it would be about {max(by_ms, 0):.0f} ms too late; it was not started"
    queue.discard(task)
    request_table.end(state, request, "expire", "DeadlineExceeded", reason, step.name)


def _assign(
    state: SchedulerState, worker_id: int, queue: StepQueue, tasks: list[Task], among: Sequence[int] | None = None
) -> None:
    """Send tasks to a worker; tasks of a streaming step go to the instances with the fewest.

    among: the workers to choose from; None: all of the step's.
    """
    among = queue.workers if among is None else among
    if not queue.streams or len(among) == 1:
        _send_batch(state, worker_id, queue, tasks)
        return
    workers = state.workers
    load = {one: len(workers[one].streams) for one in among if can_take_batch(state, workers[one], queue)}
    shares: dict[int, list[Task]] = {}
    for task in tasks:
        least = min(load, key=load.__getitem__)
        load[least] += 1
        shares.setdefault(least, []).append(task)
    for one, share in shares.items():
        _send_batch(state, one, queue, share)


def _send_batch(
    state: SchedulerState, worker_id: int, queue: StepQueue, tasks: list[Task], suspect: bool = False
) -> None:
    worker, now_ms = state.workers[worker_id], state.now_ms
    if worker.cannot_import:
        tasks = host_copies.readable(state, worker_id, tasks)
        if not tasks:
            return
    counters = state.counters
    counters.dispatches += 1
    counters.items += len(tasks)
    items = []
    firsts = 0
    for task in tasks:
        task.worker, task.started_ms, request = worker_id, now_ms, task.request
        firsts += task.attempts == 1
        usual = (
            request.deadline_ms is None
            and request.sequence is None
            and not request.priority
            and request.seed is None
            and not request.caller
            and not queue.marks_items
        )
        items.append(msg.Item(task.id, task.inputs, None if usual else _metadata(state, task, queue)))
    limit_ms = task.unit.head.run_max_ms
    if queue.mixed:
        for task in tasks:
            task.request.program.retries.first(task.attempts == 1)
            limit_ms = max(limit_ms, task.unit.head.run_max_ms)  # so that no program ends the work of another
    else:
        request.program.retries.first(firsts)
    if queue.streams:
        if not worker.streams:
            worker.stream_active_ms = now_ms
        for task in tasks:
            worker.streams[task.id] = task
        state.out.append(ev.Send(worker_id, msg.Submit(queue.index, tuple(items), suspect)))
        stalled = tuple(task.id for task in tasks if task.request.stalled)
        if stalled:
            state.out.append(ev.Send(worker_id, msg.PauseItems(queue.index, stalled)))
        for task in tasks:
            streams.on_dispatched(state, task)
        return
    unit = tasks[0].unit
    host_blocks: dict[int, Block] = {}
    device_blocks: dict[int, Block] = {}
    blocks: tuple[Block, ...] = ()
    if queue.sizes.any and not unit.chain:
        host_blocks, device_blocks = allocations.lease_outputs(state, worker, queue.sizes, items)
        if host_blocks or device_blocks:
            queue.in_place, blocks = True, (*host_blocks.values(), *device_blocks.values())
    ready = None
    if worker.device_events and not (suspect or worker.on_host) and _has_device_outputs(state, unit):
        ready = allocations.lease_event(state, worker)
        blocks = blocks if ready is None else (*blocks, ready)
    if unit.message is not None and unit.chain not in worker.chains:
        worker.chains.add(unit.chain)
        state.out.append(ev.Send(worker_id, unit.message))
    state.dispatch_ids += 1
    id = state.dispatch_ids
    worker.running.append(Dispatch(id, unit, tasks, blocks, now_ms, limit_ms, suspect, ready))
    run = msg.RunBatch(id, queue.index, tuple(items), host_blocks, unit.chain, suspect, device_blocks, ready)
    state.out.append(ev.Send(worker_id, run))


def _has_device_outputs(state: SchedulerState, unit: Unit) -> bool:
    return any(state.queues[one].sizes.device_ports for one in unit.deployments)


def _metadata(state: SchedulerState, task: Task, queue: StepQueue) -> msg.ItemMetadata:
    request = task.request
    by_ms = request.deadline_ms
    if by_ms is None or task.expires_ms < by_ms:
        by_ms = task.expires_ms
    left_ms = None if by_ms == math.inf else by_ms - state.now_ms
    if request.sequence is None and request.seed is None and not task.unit.head.options:
        return msg.ItemMetadata(request.priority, left_ms, caller=request.caller)
    part, seed, step = request.sequence, request.seed, task.unit.head
    named = (step.sends_options or seed is not None) and not task.unit.chain
    place = "", False, False
    if part is not None:
        first = queue.sequences is not None and queue.sequences.begin(part.id)
        place = part.id, part.start or first, part.end
    return msg.ItemMetadata(
        request.priority, left_ms, *place, seed, task.element, request.caller, step.options if named else 0
    )


def stuck(state: SchedulerState) -> bool:
    """Return whether no memory will come free by itself: nothing runs, restarts, waits for a timer or can be sent."""
    if state.unread_outputs or state.timers.any:
        return False
    for worker in state.workers:
        if (worker.busy and not worker.all_wait_for_buffer) or worker.state == STARTING or worker.start_ms is not None:
            return False
        if worker.state == LEAVING or worker.sleep.moving or worker.unfinished or worker.settles:
            return False
    workers = state.workers
    waiting = [queue for queue in state.queues if queue.waiting]
    if any(can_take_batch(state, workers[worker_id], queue) for queue in waiting for worker_id in queue.workers):
        return False
    rows = [queue for queue in state.queues if queue.job.any and queue.calm]
    return not any(_can_take_job(state, workers[one], queue) for queue in rows for one in queue.job_workers)


def _urgency(queue: StepQueue) -> float:
    if queue.suspects:
        return -math.inf
    if queue.job.any and queue.calm:
        return math.inf
    return min((key for batcher in queue.queues() if (key := batcher.urgency()) is not None), default=math.inf)
