"""Handle messages from workers: pass results to the graph, retry failures or end their unit.

A message from an earlier incarnation of a worker, or about an item that is over, is counted and dropped. A worker is
killed when it sends a message that its state does not allow, or one that does not match its work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.figures import sound
from weftline.engine.scheduler import (
    device_memory,
    device_messages,
    graph,
    host_copies,
    idle,
    kv_sharing,
    lost_devices,
    message_check,
    programs,
    request_table,
    streams,
    task_table,
    workers,
)
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.request import Task, record_timings
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.engine.scheduler.workers import LEAVING, READY, STARTING, Dispatch, WorkerState
from weftline.shm.block import Block

OPENING = frozenset({msg.Hello, msg.DeviceUp, msg.OpenFailed, msg.Ready})
EITHER = frozenset({msg.AttachFailed, msg.OpenProgress})
BESIDE = frozenset({msg.Heartbeat, msg.Released, msg.Settled, msg.OpenProgress})
"""Messages that other threads of a worker may send while its main thread waits for an output buffer."""

BESIDE_THREADS = BESIDE | {msg.BatchDone, msg.BufferRequest, msg.AttachFailed}
"""The same for a worker whose steps have separate threads: one thread waits, and the others continue."""

ALLOWED: Mapping[str, frozenset[type]] = {
    STARTING: OPENING | EITHER,
    READY: frozenset(get_args(msg.FromWorker)) - OPENING,
    LEAVING: frozenset(get_args(msg.FromWorker)) - OPENING,
}
"""The messages that a worker may send in each state with a process. It is killed for any other one."""


ALWAYS_ALLOWED = ALLOWED[READY] & ALLOWED[LEAVING]
"""The messages that any open worker may send unless it waits for an output buffer."""


def on_message(state: SchedulerState, event: ev.FromWorker) -> None:
    """Handle a message from a worker."""
    worker = state.workers[event.worker]
    if event.arena != worker.arena or not worker.alive:  # from an earlier process of the worker
        state.counters.stale += 1
        return
    if worker.state == STARTING and (worker.failed or worker.why):  # its process is ending
        state.counters.stale += 1
        return
    kind = type(event.message)
    if kind not in ALWAYS_ALLOWED or worker.state == STARTING or worker.needs or worker.device_needs or worker.threads:
        wrong = _protocol_error(state, worker, event.message)
        if wrong:
            workers.kill(state, event.worker, wrong)
            return
    if kind in message_check.CHECKED:
        wrong = message_check.fault(state, event.worker, event.message)
        if wrong:
            workers.kill(state, event.worker, wrong)
            return
    worker.last_message_ms = state.now_ms
    HANDLERS[kind](state, event.worker, event.message)


def _protocol_error(state: SchedulerState, worker: WorkerState, message: msg.FromWorker) -> str:
    """Return the protocol error of a message in the worker's state; '' if it is allowed."""
    kind = type(message)
    if kind not in ALLOWED[worker.state]:
        return f"it sent {kind.__name__} while it was {worker.state}"
    if worker.waits_for_buffer and kind not in (BESIDE_THREADS if worker.threads else BESIDE):
        return f"it sent {kind.__name__} while it waited for memory"
    if kind in (msg.DeviceUp, msg.Ready) and not state.ledger.arena_bytes(worker.arena):
        return f"it sent {kind.__name__} before Hello"
    return ""


def _on_open_progress(state: SchedulerState, worker_id: int, message: msg.OpenProgress) -> None:
    """Mark a waking step as loading: the worker may be silent from now on."""
    sleep = state.workers[worker_id].sleep
    for queue in state.queues_of[worker_id] if sleep.moving else ():
        if queue.name == message.step:
            sleep.begin(queue.index)


def _on_heartbeat(state: SchedulerState, worker_id: int, message: msg.Heartbeat) -> None:
    if message.memory:
        kv_sharing.on_report(state, worker_id, message.memory)
    for one in message.figures:
        if not sound(one.values):
            workers.kill(state, worker_id, "it sent statistics for a step that it does not run")
            return
        state.workers[worker_id].figures[one.step] = one.values


def _on_kv_resized(state: SchedulerState, worker_id: int, message: msg.KvResized) -> None:
    try:
        kv_sharing.on_resized(state, worker_id, message.step, message.bytes)
    except ValueError as error:
        workers.kill(state, worker_id, str(error))


def _on_hello(state: SchedulerState, worker_id: int, message: msg.Hello) -> None:
    if state.ledger.arena_bytes(state.workers[worker_id].arena):
        workers.kill(state, worker_id, "it sent Hello twice")
        return
    state.ledger.add_arena(state.workers[worker_id].arena, message.arena_bytes)


def _on_ready(state: SchedulerState, worker_id: int, message: msg.Ready) -> None:
    workers.on_ready(state, worker_id)
    device_memory.on_ready(state, worker_id, message)
    idle.on_ready(state, worker_id, message)
    for queue in state.queues_of[worker_id]:
        if message.warm_ms.get(queue.name):
            queue.latency.seed(1, message.warm_ms[queue.name])
        state.out += [ev.Send(worker_id, one) for one in queue.options.messages()]
        digests = state.recovery.quarantine.digests(queue.index)
        if digests:
            state.out.append(ev.Send(worker_id, msg.QuarantineItems(queue.index, digests)))
        state.due.add(queue.index)


def _on_open_failed(state: SchedulerState, worker_id: int, message: msg.OpenFailed) -> None:
    users = [one for one in state.programs.values() if worker_id in programs.workers_of(state, one)]
    step = f"step {message.step}: " if len(users) == 1 else ""  # else it may be the name of another pipeline's step
    state.workers[worker_id].failed = step + message.failure.message


def _on_buffer_request(state: SchedulerState, worker_id: int, message: msg.BufferRequest) -> None:
    worker = state.workers[worker_id]
    if message.device_sizes and not worker.device_arena:
        workers.kill(state, worker_id, "it requested device memory and has no device arena")
        return
    if not (worker.running or worker.streams or worker.fetches):
        workers.kill(state, worker_id, "it requested memory without a running batch")
        return
    waits = worker if not message.dispatch else _running_dispatch(worker, message.dispatch)
    # with threads, a request names its dispatch; only a fetch requests memory for the worker
    named = bool(worker.threads) if message.dispatch else not worker.threads or bool(worker.fetches)
    if waits is None or not named or waits.waits_for_buffer:
        workers.kill(state, worker_id, "it requested memory twice, or for a batch that is not running")
        return
    waits.needs, waits.device_needs = message.sizes, message.device_sizes
    state.buffers_requested = True
    if isinstance(waits, Dispatch):
        state.queues[waits.unit.deployment].in_place = True
    elif worker.running and not worker.threads:
        state.queues[worker.running[0].unit.deployment].in_place = True


def _on_suspected(state: SchedulerState, worker_id: int, message: msg.Suspected) -> None:
    worker = state.workers[worker_id]
    for id, digest in zip(message.streams, message.digests):
        if id in worker.streams:
            worker.streams[id].digest = digest
        else:
            state.counters.stale += 1
    running = worker.running
    if running and running[0].id == message.dispatch:
        for task, digest in zip(running[0].tasks, message.digests):
            task.digest = digest
    elif not message.streams:
        state.counters.stale += 1


def _on_batch_done(state: SchedulerState, worker_id: int, message: msg.BatchDone) -> None:
    worker = state.workers[worker_id]
    dispatch = _running_dispatch(worker, message.dispatch)
    if dispatch is None or dispatch.needs or dispatch.device_needs:
        workers.kill(state, worker_id, "it returned results of a batch that is not running")
        return
    wrong = message_check.result_fault(dispatch, message)
    if wrong:
        workers.kill(state, worker_id, wrong)
        return
    if message.unfinished:
        wrong = device_messages.unfinished_error(state, worker_id, dispatch, message)
        if wrong:
            workers.kill(state, worker_id, wrong)
            return
        device_messages.keep_unfinished(state, worker_id, dispatch)
    worker.running.remove(dispatch)
    now_ms, unit = state.now_ms, dispatch.unit
    queue = state.queues[unit.deployment]
    _learn(state, queue, dispatch, message)
    state.counters.copied_bytes += message.copied_bytes
    state.counters.device_moved_bytes += message.device_moved_bytes
    blocks = (*dispatch.blocks, *dispatch.granted, *worker.granted)
    for task, result in zip(dispatch.tasks, message.results):
        if task.id in state.live:
            _on_result(state, worker_id, queue, task, result, message.ran, blocks)
        else:
            task_table.end(state, task)
    if blocks and not message.unfinished:
        request_table.release_blocks(state, blocks)
    worker.granted.clear()
    worker.free_ms = now_ms
    if worker.running:
        for then in worker.on_thread(unit.deployment)[:1]:  # its thread starts the next dispatch
            then.started_ms = now_ms
            for task in then.tasks:
                task.started_ms = now_ms
    _mark_due(state, worker_id)


def _on_released(state: SchedulerState, worker_id: int, message: msg.Released) -> None:
    wrong = device_messages.on_released(state, worker_id, message)
    if wrong:
        workers.kill(state, worker_id, wrong)
    _mark_due(state, worker_id)


def _mark_due(state: SchedulerState, worker_id: int) -> None:
    for queue in state.queues_of[worker_id]:
        if queue.any_waiting():
            state.due.add(queue.index)


def _learn(state: SchedulerState, queue: StepQueue, dispatch: Dispatch, message: msg.BatchDone) -> None:
    ran = message.ran
    if message.out_of_memory:
        state.counters.out_of_memory += 1
        if queue.out_of_memory(message.out_of_memory):
            short = f"step {queue.name}: out of memory at {message.out_of_memory} items"
            state.out.append(ev.LogWarning(f"{short}; batches have at most {queue.items_max} items from now on"))
        return
    if not ran or not ran[0].items:
        return
    batches = max(ran[0].batches, 1)
    run_ms = 0.0
    for one in ran:
        run_ms += one.run_ms
    run_ms /= batches
    items = -(-ran[0].items // batches)
    queue.learn(dispatch.tasks, items, run_ms, state.now_ms, (state.now_ms - dispatch.started_ms) / batches)
    if queue.went_well(items):
        state.out.append(
            ev.LogWarning(
                f"step {queue.name}: no out-of-memory errors recently; batches have at most {queue.items_max} items now"
            )
        )


def _on_output_chunks(state: SchedulerState, worker_id: int, message: msg.OutputChunks) -> None:
    worker = state.workers[worker_id]
    queue = next((queue for queue in state.queues_of[worker_id] if queue.index == message.step), None)
    if queue is None:
        workers.kill(state, worker_id, "it sent chunks of a step that it does not run")
        return
    worker.stream_active_ms = state.now_ms
    state.counters.copied_bytes += message.copied_bytes
    for piece in message.pieces:
        task = worker.streams.get(piece.item)
        if task is None or task.unit.deployment != message.step:
            state.counters.stale += 1
            continue
        if not piece.last:
            if task.id in state.live:
                if any(value.keys for value in piece.outputs.values()):
                    workers.kill(state, worker_id, "it sent a chunk that is not inline")
                    break
                _forward_chunk(state, task, piece)
            continue
        beside = len(worker.streams)
        del worker.streams[piece.item]
        if task.id in state.live:
            ports = range(len(task.unit.returns))
            given = msg.ItemResult(tuple(piece.outputs[port] for port in ports if port in piece.outputs))
            result = piece.failure or given  # if a port is missing, _on_result kills the worker
            run_ms = state.now_ms - task.started_ms
            if piece.failure is None and not (task.stream_input is not None and task.stream_input.open):
                since_ms = (
                    task.started_ms if task.stream_input is None else max(task.started_ms, task.stream_input.whole_ms)
                )
                queue.learn((task,), 1, state.now_ms - since_ms, state.now_ms)  # without the wait for its source
            ran = (msg.StepRun(run_ms, 1, beside),)
            _on_result(state, worker_id, queue, task, result, ran, worker.granted)
        else:
            task_table.end(state, task)
    streams.flush(state)
    request_table.release_blocks(state, worker.granted)
    worker.granted.clear()
    _mark_due(state, worker_id)


def _forward_chunk(state: SchedulerState, task: Task, piece: msg.OutputChunk) -> None:
    """Send an output chunk to the caller and to the steps that stream it."""
    request = task.request
    if task.element >= 0 or task.place in request.active_fallbacks:
        return
    for port, value in piece.outputs.items():
        if not 0 <= port < len(task.unit.returns):
            continue
        slot = task.unit.returns[port]
        for name in request.route.outputs_at[slot] if request.pieces else ():
            task.streamed = True
            state.out.append(ev.ChunkReady(request.id, name, value))
        if request.route.stream_readers[slot]:
            streams.forward(state, task, slot, value)


def _on_chunk_read(state: SchedulerState, worker_id: int, message: msg.ChunkRead) -> None:
    worker = state.workers[worker_id]
    worker.stream_active_ms = state.now_ms
    for item in message.items:
        task = worker.streams.get(item)
        if task is not None and task.unit.deployment == message.step:
            streams.on_chunk_read(state, task)
        else:
            state.counters.stale += 1


def _on_result(
    state: SchedulerState,
    worker_id: int,
    queue: StepQueue,
    task: Task,
    result: msg.ItemResult | msg.Failure,
    ran: Sequence[msg.StepRun],
    blocks: Sequence[Block],
) -> None:
    """Handle the result of a live task: produce its outputs, or retry or fail it. blocks: leased for its outputs."""
    if isinstance(result, msg.Failure):
        wrong = message_check.failure_fault(task.unit, result)
        if wrong:
            workers.kill(state, worker_id, wrong)
            task_table.fail(state, task, "WorkerDied", wrong, task.unit.head.name)
            return
        if host_copies.retry_with_copy(state, worker_id, task):
            return
        name = task.unit.stages[result.stage].name
        record_timings(state, task, "failed", ran[: result.stage + 1])
        task_table.fail(state, task, result.error, result.message, name, traceback=result.traceback, param=result.param)
        return
    outputs = result.outputs
    wrong = message_check.outputs_fault(task.unit, outputs)
    for value in outputs if not wrong else ():
        if value.data is None:
            held = request_table.holds_all(state, outputs)
            if not held or message_check.foreign(outputs, task.keys, blocks):
                wrong = "it referred to memory that it does not hold"
            break
    if wrong:
        workers.kill(state, worker_id, wrong)
        task_table.fail(state, task, "WorkerDied", wrong, task.unit.head.name)
        return
    if state.lost_devices:  # an output may refer to inputs lost with another worker
        if any(lost_devices.has(state, value) for value in outputs):
            task_table.fail(
                state, task, "WorkerDied", "it passed on a tensor that was lost with a dead worker", task.unit.head.name
            )
            return
        outputs = tuple(lost_devices.remaining(state, value) for value in outputs)
    record_timings(state, task, "ok", ran)
    task_table.forget(state, task)
    graph.finished(state, task.request, task.place, outputs, task.element)
    if task.keys or task.deaths or queue.sequences is not None:
        task_table.end(state, task)


def _running_dispatch(worker: WorkerState, dispatch: int) -> Dispatch | None:
    """Return the dispatch with this id if the worker is running it."""
    if not worker.threads:
        running = worker.running
        return running[0] if running and running[0].id == dispatch else None
    return next((one for one in worker.heads if one.id == dispatch), None)


HANDLERS: Mapping[type, Callable[[SchedulerState, int, Any], None]] = {
    msg.Hello: _on_hello,
    msg.DeviceUp: device_messages.on_device_up,
    msg.AttachFailed: device_messages.on_attach_failed,
    msg.Ready: _on_ready,
    msg.OpenFailed: _on_open_failed,
    msg.OpenProgress: _on_open_progress,
    msg.Heartbeat: _on_heartbeat,
    msg.BufferRequest: _on_buffer_request,
    msg.Suspected: _on_suspected,
    msg.BatchDone: _on_batch_done,
    msg.Released: _on_released,
    msg.Settled: device_messages.on_settled,
    msg.Fetched: host_copies.on_fetched,
    msg.OutputChunks: _on_output_chunks,
    msg.ChunkRead: _on_chunk_read,
    msg.KvResized: _on_kv_resized,
    msg.Asleep: idle.on_asleep,
    msg.Awake: idle.on_awake,
}
"""Handler of each message type."""
