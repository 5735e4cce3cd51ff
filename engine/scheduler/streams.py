"""Stream inputs: output chunks on their way from one step to another, and back-pressure.

A unit with a stream input starts with the first chunk, when everything else that it reads is settled; the complete
value follows as the last one. Chunks are not kept once they are sent, so a task that has received chunks is not
retried, nor is a task whose chunks were read. A reader with more than `limits.stream_bytes_max` unread pauses its
source. When the last reader of a source ends early, the source is cancelled.

Chunks for callers are sent by `results`; the leases of complete values belong to `request_table`.
"""

from __future__ import annotations

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES, Value
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import graph, task_table
from weftline.engine.scheduler.request import OPEN, Request, StreamInput, Task
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue

# from the source


def forward(state: SchedulerState, source: Task, slot: int, value: Value) -> None:
    """Pass an output chunk in `slot` on to every unit that streams it."""
    request = source.request
    for place in request.route.stream_readers[slot]:
        if request.state != OPEN:
            return
        stream = request.stream_inputs.get(place)
        if stream is None:
            if request.missing[place] < 0:
                continue  # it will not run, or its fallback was not needed
            stream = request.stream_inputs[place] = StreamInput(source)
        if not stream.open:
            continue
        source.streamed = True
        stream.waiting.append(value)
        stream.unread_bytes += value.size_bytes + CHUNK_OVERHEAD_BYTES
        if stream.task is None and request.missing[place] == 1:  # all else is there
            graph.advance(state, request, place)
            if request.path is not None and slot in request.route.deciding:  # it runs, though its input may yet fail
                task_table.on_path_changed(state, request)
        if request.state != OPEN:
            return
        if stream.task is not None:
            _send(state, stream, stream.task)
            _update_pause(state, stream)
        elif stream.unread_bytes > request.program.plan.limits.stream_bytes_max or request.missing[place] < 0:
            stream.end()  # it is given the whole, or nothing


def complete_input(state: SchedulerState, request: Request, place: int, slot: int, value: Value) -> bool:
    """Pass a complete value to the task that received its chunks; return False if there is none any more.

    The task keeps the value's leases like those of any other input.
    """
    stream = request.stream_inputs.get(place)
    task = stream.task if stream is not None else None
    if stream is None or task is None or not stream.open or task.unit.slots[task.unit.stream_position] != slot:
        return False
    task.keys = (*task.keys, *graph.take(state, request, slot))
    task_table.set_timeout(state, task, state.now_ms)  # its time counts from here: until now it waited for its input
    if task.worker < 0:  # it was never given a piece, and is as good as any other
        inputs = list(task.inputs)
        inputs[task.unit.stream_position] = value
        task.inputs, task.stream_input = tuple(inputs), None
        stream.end()
        return True
    stream.waiting.append(value)
    _send(state, stream, task, last=True)
    stream.whole_ms = state.now_ms
    stream.end()
    return True


# to the reader


def on_dispatched(state: SchedulerState, task: Task) -> None:
    """Send the chunks that waited for a task's worker."""
    stream = task.stream_input
    if stream is not None and stream.open:
        task.streamed = True
        _send(state, stream, task)
        flush(state)


def on_chunk_read(state: SchedulerState, task: Task) -> None:
    """Count a chunk as read: the worker has passed it to the node."""
    stream = task.stream_input
    if stream is not None and stream.unread:
        stream.unread_bytes -= stream.unread.popleft()
        _update_pause(state, stream)


def on_unit_over(state: SchedulerState, request: Request, place: int) -> None:
    """Handle the end of a unit: cancel its source when no other reader is left."""
    stream = request.stream_inputs.get(place)
    if stream is None or request.state != OPEN or stream.source.id not in state.live:
        return
    if _is_wanted(state, stream.source):
        _update_pause(state, stream)
        return
    task_table.drop(state, stream.source)
    on_unit_over(state, request, stream.source.place)


def flush(state: SchedulerState) -> None:
    """Send the collected chunks, one message per worker and step."""
    unsent, state.unsent = state.unsent, {}
    for (worker_id, step), pieces in unsent.items():
        state.out.append(ev.Send(worker_id, msg.InputChunks(step, tuple(pieces))))


def _send(state: SchedulerState, stream: StreamInput, task: Task, last: bool = False) -> None:
    if task.worker < 0 or not stream.waiting:
        return
    state.workers[task.worker].stream_active_ms = state.now_ms
    to = state.unsent.setdefault((task.worker, task.unit.deployment), [])
    for value in stream.waiting:
        whole = last and value is stream.waiting[-1]
        to.append(msg.InputChunk(task.id, task.unit.stream_position, value, whole))
        stream.unread.append(0 if whole else value.size_bytes + CHUNK_OVERHEAD_BYTES)
    stream.waiting.clear()


# between the two


def resume_sources(state: SchedulerState, queue: StepQueue) -> None:
    """Resume the sources of tasks that wait behind suspects of a step."""
    for task in state.live.values():
        if task.unit.deployment == queue.index and task.stream_input is not None and task.worker < 0:
            _update_pause(state, task.stream_input)


def _is_behind(state: SchedulerState, reader: Task) -> bool:
    """Return whether suspects go before a waiting task."""
    return bool(state.queues[reader.unit.deployment].suspects)


def _is_wanted(state: SchedulerState, task: Task) -> bool:
    """Return whether any output of a task has a reader left."""
    request, route = task.request, task.request.route
    if task.place in request.active_fallbacks or task.element >= 0:
        return True
    stream_inputs, missing = request.stream_inputs, request.missing
    return any(
        bool(route.outputs_at[slot])
        or any(missing[r] >= 0 or (r in stream_inputs and stream_inputs[r].open) for r in route.readers[slot])
        for slot in task.unit.returns
    )


def _update_pause(state: SchedulerState, stream: StreamInput) -> None:
    """Pause the source of a reader that has fallen behind; resume it when all readers have caught up.

    Nothing starts beside a suspect, and a suspect starts only on an idle worker: a source does not wait for a reader
    that may be waiting for the source to end.
    """
    source, reader = stream.source, stream.task
    waits = reader is not None and reader.worker < 0 and (source.deaths > 0 or _is_behind(state, reader))
    most = source.request.program.plan.limits.stream_bytes_max * (0.5 if stream.slow else 1)
    stream.slow = stream.open and not waits and stream.unread_bytes > most
    held = any(one.slow for one in source.request.stream_inputs.values() if one.source is source)
    if held == source.held or source.id not in state.live:
        return
    source.held = held
    if not source.request.stalled and source.worker >= 0:
        state.workers[source.worker].stream_active_ms = state.now_ms
        state.out.append(
            ev.Send(source.worker, (msg.PauseItems if held else msg.ResumeItems)(source.unit.deployment, (source.id,)))
        )
