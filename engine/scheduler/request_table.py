"""Open requests and the leases they hold.

Life of a value. The producer's block is leased with one ticket, the writer's. When the value is produced, one ticket is
added per reader and the writer's ticket is released. A task moves the tickets of its inputs out of the request, so a
request can end at any time while a worker still reads the bytes. A pipeline output keeps its ticket until the caller
has copied it (`Delivered`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import graph, task_table
from weftline.engine.scheduler.request import OPEN, Request, passed_before
from weftline.engine.scheduler.routes import Route
from weftline.engine.scheduler.state import SchedulerState
from weftline.shm.block import Block, Key

if TYPE_CHECKING:
    from weftline.engine.scheduler.groups import OrderedGroup
    from weftline.engine.scheduler.programs import Program

STALE_DEADLINES_MAX = 1024
"""The heap is rebuilt when deadlines of ended requests exceed those of open ones by more than this."""


# the life of a request


def admit(
    state: SchedulerState,
    event: ev.Submitted,
    program: Program,
    route: Route,
    size: int,
    path: bytes | None = None,
    group: OrderedGroup | None = None,
    row: int = 0,
) -> None:
    """Open an admitted request and start it. The caller keeps the writer's tickets of the inputs.

    size: their bytes.
    path: the units that it is known to run; None without a deadline.
    """
    program.admission.enter(size, event.job)
    program.counters.admitted += 1
    request = Request(
        event.request, program, route, state.now_ms, event.deadline_ms, size, list(route.missing), event.priority,
        event.sequence, event.pieces, job=event.job, seed=event.seed, caller=event.caller, group=group, row=row,
        called_ms=state.now_ms if event.called_ms is None else event.called_ms, path=path,
    )  # fmt: skip
    state.requests[request.id] = request
    if request.deadline_ms is not None:
        heappush(state.deadlines, (request.deadline_ms, request.id))
        if len(state.deadlines) > 2 * len(state.requests) + STALE_DEADLINES_MAX:
            state.deadlines = [entry for entry in state.deadlines if entry[1] in state.requests]
            heapify(state.deadlines)
    for place in route.entries:
        if not request.missing[place]:
            graph.start_unit(state, request, place)
    slots = program.routes.input_slot
    for name, value in event.inputs.items():
        graph.produce(state, request, slots[name], value)
    if request.path is not path and request.state == OPEN:  # it changed before all inputs were there
        task_table.on_path_changed(state, request)


def end(
    state: SchedulerState,
    request: Request,
    event: str,
    error: str,
    message: str,
    step: str = "",
    traceback: str = "",
    param: str = "",
) -> None:
    """End a request without outputs: drop its tasks, release its tickets and emit Fail."""
    if request.state != OPEN:
        return
    request.move(event)
    counters = request.program.counters
    setattr(counters, request.state, getattr(counters, request.state) + 1)
    task_table.drop_all_of(state, request)
    for slot, value in request.values.items():
        _release_value(state, value, request.tickets[slot])
    _close(state, request)
    state.out.append(ev.Fail(request.id, error, message, step, tuple(request.timings), traceback, param))


def withdraw(state: SchedulerState, request_id: int) -> None:
    """Cancel a request; an unknown id is ignored."""
    request = state.requests.get(request_id)
    if request is not None:
        end(state, request, "cancel", "RequestCancelled", "the caller withdrew the request")


def delivered(state: SchedulerState, request_id: int) -> None:
    """Release the outputs of a finished request: the caller has copied them."""
    keys = state.unread_outputs.pop(request_id, None)
    if keys is not None:
        release(state, keys)


def expire(state: SchedulerState) -> None:
    """End every request whose deadline has passed."""
    while state.deadlines and state.deadlines[0][0] <= state.now_ms:
        deadline_ms, request_id = heappop(state.deadlines)
        request = state.requests.get(request_id)
        if request is not None:
            after_ms = state.now_ms - request.admitted_ms
            left = ", ".join(unfinished(request)) or "none"
            reason = f"the deadline passed after {after_ms:.0f} ms; unfinished steps: {left}"
            if deadline_ms <= request.admitted_ms:
                reason = passed_before(request.admitted_ms - deadline_ms)
            end(state, request, "expire", "DeadlineExceeded", reason)


def unfinished(request: Request) -> list[str]:
    """Return the names of the steps that a request still waits for, except fallbacks that were not called."""
    called, waits_for = (-1, *request.active_fallbacks), request.route.waits_for
    return [
        stage.name
        for place, unit in enumerate(request.route.units)
        if (request.missing[place] >= 0 and waits_for.get(place, -1) in called) or _has_task(request, place)
        for stage in unit.stages
    ]


def _has_task(request: Request, place: int) -> bool:
    return any(task.place == place for task in request.tasks.values())


def wake_at_ms(state: SchedulerState) -> float | None:
    """Return the next deadline; None when no open request has one."""
    while state.deadlines and state.deadlines[0][1] not in state.requests:
        heappop(state.deadlines)
    return state.deadlines[0][0] if state.deadlines else None


# leases


def hold(state: SchedulerState, keys: Iterable[Key], readers: int = 1) -> None:
    """Add tickets to leases."""
    for key in keys:
        state.ledger.hold(key, readers)


def release(state: SchedulerState, keys: Iterable[Key], readers: int = 1) -> None:
    """Release tickets of leases."""
    for key in keys:
        state.ledger.release(key, readers)


def release_blocks(state: SchedulerState, blocks: Iterable[Block]) -> None:
    """Release one ticket of each block."""
    for block in blocks:
        state.ledger.release(block.key)


def holds_all(state: SchedulerState, values: Sequence[Value]) -> bool:
    """Return whether every place that the values name is leased, and inside its lease."""
    for value in values:
        if value.data is not None:
            continue
        if value.place is not None and not state.ledger.holds(value.place):
            return False
        if value.device_place is not None and not _has_live_device_copy(state, value):
            return False
        if value.items and not holds_all(state, value.items):
            return False
    return True


def _has_live_device_copy(state: SchedulerState, value: Value) -> bool:
    """Return True if the device memory of a value is leased, and its event, if any, is valid and leased."""
    place, ready = value.device_place, value.ready
    if place is None or not state.ledger.holds(place):
        return False
    return ready is None or (ready.arena < 0 and state.ledger.holds(ready))


def replace_lost_values(state: SchedulerState, request: Request, left_of: Callable[[Value], Value]) -> None:
    """Replace the values that a request holds by what is left of them; release the rest."""
    for slot, value in request.values.items():
        left = left_of(value)
        if left is not value:
            _release_rest(state, value, left, request.tickets[slot])
            request.values[slot] = left
            for name in request.route.outputs_at[slot]:
                request.outputs[name] = left
    for gather in request.gathers.values():
        for element, row in enumerate(gather.outputs):
            kept = tuple(map(left_of, row))
            for value, left in zip(row, kept):
                _release_rest(state, value, left, 1)
            gather.outputs[element] = kept


def _release_rest(state: SchedulerState, value: Value, left: Value, tickets: int) -> None:
    kept = set(left.keys)
    release(state, (key for key in value.keys if key not in kept), tickets)


def complete(state: SchedulerState, request: Request) -> None:
    """Finish a request: all its outputs are produced."""
    request.move("complete")
    program = request.program
    program.counters.ok += 1
    if not request.job:
        program.objective.add(state.now_ms - request.called_ms)
    owed: list[Key] = []
    for value in request.outputs.values():
        if value.data is None:
            owed += value.keys
    if owed:
        state.unread_outputs[request.id] = owed
    if request.tasks or request.gathers or request.stalled or request.sequence is not None:
        task_table.drop_all_of(state, request)
    for slot, value in request.values.items():
        if value.data is None:
            _release_value(state, value, request.tickets[slot] - len(request.route.outputs_at[slot]))
    _close(state, request)
    outputs = request.outputs
    if len(outputs) > 1:
        outputs = {name: outputs[name] for name in request.route.outputs}  # in the pipeline's order
    state.out.append(ev.Finish(request.id, outputs, tuple(request.timings)))


def _release_value(state: SchedulerState, value: Value, tickets: int) -> None:
    if tickets > 0 and value.data is None:
        release(state, value.keys, tickets)


def _close(state: SchedulerState, request: Request) -> None:
    request.values.clear()
    request.tickets.clear()
    request.stream_inputs.clear()
    request.program.admission.leave(request.size_bytes, state.now_ms, request.job)
    del state.requests[request.id]
