"""Control flow inside a request: run, skip, choose, map, gather and fall back.

A unit of a request is *ready* when every value that it reads is settled: produced, or known to be absent. Then it
starts (tasks are queued for it), or is skipped (its outputs are absent), or, for a control such as `first` or `switch`,
is decided at once. It is *finished* when its tasks have results. When one of them fails for good the unit has *failed*:
its fallback is called, or the request fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftline.engine.protocol.messages import ABSENT, PIECES, Value
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import request_table, streams, task_table
from weftline.engine.scheduler.condition_values import peek
from weftline.engine.scheduler.known_path import chosen_case
from weftline.engine.scheduler.request import OPEN, ActiveFallback, Gather, Request, StepTiming
from weftline.engine.scheduler.routes import Unit
from weftline.engine.scheduler.state import SchedulerState
from weftline.shm.block import Key

NESTED_MAX = 32
"""Recursion limit of units that settle others at once (skipped, decided); deeper ones are postponed."""


def produce(state: SchedulerState, request: Request, slot: int, value: Value) -> None:
    """Settle a value: start the units that waited for it; complete the request after its last output."""
    route = request.route
    tickets = route.tickets[slot]
    if not tickets or request.state != OPEN:
        return
    if value.data is None:
        for key in value.keys:
            state.ledger.hold(key, tickets)
    request.values[slot] = value
    request.tickets[slot] = tickets
    if request.path is not None and slot in route.deciding:
        task_table.on_path_changed(state, request)
    names = route.outputs_at[slot]
    for name in names:
        request.outputs[name] = value
        if request.pieces:
            state.out.append(ev.OutputReady(request.id, name, value))
    missing = request.missing
    found = None
    for place in route.readers[slot]:
        left = missing[place] - 1
        if left < 0:  # settled without this value, or started with its chunks
            if not (request.stream_inputs and streams.complete_input(state, request, place, slot, value)):
                request_table.release(state, take(state, request, slot))
            continue
        missing[place] = left
        if not left or route.units[place].control:
            found = [place] if found is None else [*found, place]
    for place in found or ():
        if missing[place] >= 0 and request.state == OPEN:
            unit = route.units[place]
            if unit.plain:
                inputs, keys = _take_inputs(state, request, place, unit)
                task_table.begin(state, request, place, inputs, keys, -1)
            else:
                _settle_next(state, request, place)
    if names and len(request.outputs) == len(route.outputs) and request.state == OPEN:
        request_table.complete(state, request)


def take(state: SchedulerState, request: Request, slot: int) -> tuple[Key, ...]:
    """Move one ticket of a settled value out of the request; return the leases that belong to it."""
    value = request.values[slot]
    left = request.tickets[slot] - 1
    if left:
        request.tickets[slot] = left
    else:
        del request.tickets[slot], request.values[slot]
    return () if value.data is not None else value.keys


def advance(state: SchedulerState, request: Request, place: int) -> None:
    """Start a unit although one of its values is not complete yet."""
    if request.route.units[place].plain:
        start_unit(state, request, place)
    else:
        _settle_next(state, request, place)


def _settle_next(state: SchedulerState, request: Request, place: int) -> None:
    """Start a unit that may settle others at once; postpone it at the recursion limit."""
    if state.nested >= NESTED_MAX:
        state.postponed.append((request, place))
        return
    state.nested += 1
    try:
        start_unit(state, request, place)
        while state.postponed and state.nested == 1:
            later, place = state.postponed.popleft()
            if later.state == OPEN and later.missing[place] >= 0:
                start_unit(state, later, place)
    finally:
        state.nested -= 1


def settle(state: SchedulerState, request: Request, place: int) -> None:
    """Mark a unit that will not run: release its inputs, now and as they are produced."""
    unit = request.route.units[place]
    if request.missing[place] < 0:
        return
    request.missing[place] = -1
    for slot in (*unit.slots, *unit.condition_slots):
        if slot in request.values:
            request_table.release(state, take(state, request, slot))


def skip(state: SchedulerState, request: Request, place: int) -> None:
    """Settle a unit and make all of its outputs absent."""
    settle(state, request, place)
    for slot in request.route.units[place].returns:
        produce(state, request, slot, ABSENT)
    if request.path is not None and request.state == OPEN:
        task_table.on_path_changed(state, request)


def start_unit(state: SchedulerState, request: Request, place: int) -> None:
    """Start a unit whose inputs are settled; a control is started whenever one of its inputs is settled."""
    unit = request.route.units[place]
    if unit.plain:
        inputs, keys = _take_inputs(state, request, place, unit)
        task_table.begin(state, request, place, inputs, keys, -1)
    elif unit.control:
        _decide(state, request, place, unit)
    elif not _should_run(state, request, place, unit):
        return
    elif unit.mapped:
        _map_items(state, request, place, unit)
    else:
        inputs, keys = _take_inputs(state, request, place, unit)
        task_table.begin(state, request, place, inputs, keys, -1)


def finished(state: SchedulerState, request: Request, place: int, outputs: Sequence[Value], element: int = -1) -> None:
    """Handle the outputs of a unit's task. The caller still holds their leases."""
    if element >= 0:
        gathered = _gather(state, request, place, outputs, element)
        if gathered is None:
            return
        holds = [key for row in gathered for value in row for key in value.keys]
        unit = request.route.units[place]
        lists = tuple(Value("list", items=tuple(row[port] for row in gathered)) for port in range(len(unit.returns)))
        _produce_all(state, request, place, lists)
        request_table.release(state, holds)
    else:
        route = request.route
        if route.fallbacks or request.active_fallbacks:
            _produce_all(state, request, place, outputs)
        else:
            for slot, value in zip(route.units[place].returns, outputs):
                produce(state, request, slot, value)
        if request.stream_inputs:
            streams.on_unit_over(state, request, place)


def failed(
    state: SchedulerState,
    request: Request,
    place: int,
    error: str,
    message: str,
    step: str,
    traceback: str = "",
    param: str = "",
) -> None:
    """Handle a unit that failed for good: call its fallback, or fail the request."""
    _abandon_unit(state, request, place)
    if request.route.units[place].stages[-1].planned.absent_on_failure:
        _produce_absent(state, request, place)
        if request.stream_inputs:
            streams.on_unit_over(state, request, place)
        return
    fallback = request.route.fallbacks.get(place)
    if fallback is None:
        request_table.end(state, request, "fail", error, message, step, traceback, param)
        return
    request.active_fallbacks[fallback.unit] = ActiveFallback(place, error, message, step, traceback, param)
    if request.path is not None:
        task_table.on_path_changed(state, request)
    for other in fallback.group:
        if request.missing[other] > 0:
            request.missing[other] -= 1
    for other in fallback.group:
        left = request.missing[other]
        if request.state == OPEN and (left == 0 or (left > 0 and request.route.units[other].control)):
            start_unit(state, request, other)
    if request.stream_inputs:
        streams.on_unit_over(state, request, place)


# start


def _take_inputs(
    state: SchedulerState, request: Request, place: int, unit: Unit
) -> tuple[tuple[Value, ...], Sequence[Key]]:
    """Move a unit's inputs out of the request; release values that only its condition read."""
    request.missing[place] = -1
    values, tickets = request.values, request.tickets
    inputs: list[Value] = []
    keys: Sequence[Key] = ()
    for position, slot in enumerate(unit.slots):
        if position == unit.stream_position and slot not in values:
            inputs.append(PIECES)
            continue
        value = values[slot]
        inputs.append(value)
        left = tickets[slot] - 1
        if left:
            tickets[slot] = left
        else:
            del tickets[slot], values[slot]
        if value.data is None:
            keys = (*keys, *value.keys)
    for slot in unit.condition_slots:
        request_table.release(state, take(state, request, slot))
    return tuple(inputs), keys


def _should_run(state: SchedulerState, request: Request, place: int, unit: Unit) -> bool:
    """Return whether a unit runs: its condition holds and no required input is absent. Else skip or fail it."""
    values = request.values
    lacks = (
        must and slot in values and values[slot].kind == "absent" for must, slot in zip(unit.required, unit.slots)
    )  # an input in chunks is present
    runs = bool(unit.control) or not any(lacks)
    if runs and unit.when is not None:
        try:
            runs = unit.when.holds([peek(request.values[slot]) for slot in unit.condition_slots])
        except ValueError as error:
            _fail_unit(state, request, place, f"its condition cannot be evaluated: {error}")
            return False
    if not runs:
        _skip(state, request, place)
    return runs


def _skip(state: SchedulerState, request: Request, place: int) -> None:
    name = request.route.units[place].head.name
    request.timings.append(StepTiming(name, 0.0, 0.0, 0, started_ms=state.now_ms, outcome="skipped"))
    called = request.active_fallbacks.get(place)
    if called is not None and request.route.units[place].head.planned.absent_on_failure:
        settle(state, request, place)
        _produce_absent(state, request, place)
        return
    if called is not None:  # a skipped fallback: the unit that it replaces has failed
        settle(state, request, place)
        request_table.end(
            state, request, "fail", called.error, called.message, called.step, called.traceback, called.param
        )
        return
    _drop_fallback(state, request, place)
    skip(state, request, place)


def _fail_unit(state: SchedulerState, request: Request, place: int, message: str) -> None:
    settle(state, request, place)
    step = request.route.units[place].head.name
    failed(state, request, place, "StepError", message, step)


def _decide(state: SchedulerState, request: Request, place: int, unit: Unit) -> None:
    """Choose among the inputs of a control as soon as the choice is certain."""
    if request.route.waits_for.get(place, -1) not in (-1, *request.active_fallbacks):
        return  # in the group of a fallback that was not called
    if unit.when is not None and (
        any(slot not in request.values for slot in unit.condition_slots) or not _should_run(state, request, place, unit)
    ):
        return
    values = [request.values.get(slot) for slot in unit.slots]
    if unit.control == "passes":
        if request.missing[place] == 0 and any(value is not None and value.kind == "absent" for value in values):
            _skip(state, request, place)  # the step whose outputs it passes on was skipped
        elif request.missing[place] == 0:
            _pass_chosen(state, request, place, unit, tuple(range(len(values))))
        return
    at = _first(values) if unit.control == "first" else _switch(state, request, place, unit, values)
    if at == UNDECIDED:
        return
    if at == NOTHING:
        _skip(state, request, place)
    else:
        _pass_chosen(state, request, place, unit, (at,))


def _switch(state: SchedulerState, request: Request, place: int, unit: Unit, values: Sequence[Value | None]) -> int:
    """Return the position of the chosen case. The first input is the value that the switch compares."""
    if values[0] is None:
        return UNDECIDED
    try:
        at = chosen_case(unit.head.planned, values[0])
    except ValueError as error:
        _fail_unit(state, request, place, f"its input cannot be evaluated: {error}")
        return UNDECIDED
    if at is None:
        return NOTHING
    chosen = values[at]
    return UNDECIDED if chosen is None else NOTHING if chosen.kind == "absent" else at


def _pass_chosen(state: SchedulerState, request: Request, place: int, unit: Unit, positions: Sequence[int]) -> None:
    """Produce a control's chosen inputs as its outputs; release everything that it read."""
    chosen = tuple(request.values[unit.slots[at]] for at in positions)
    for value in chosen:  # kept while the tickets it was read by are let go
        request_table.hold(state, value.keys)
    settle(state, request, place)
    _produce_all(state, request, place, chosen)
    for value in chosen:
        request_table.release(state, value.keys)


# lists


def _map_items(state: SchedulerState, request: Request, place: int, unit: Unit) -> None:
    """Queue a task for each element of the lists that a unit maps over."""
    lists = [request.values[unit.slots[at]] for at in unit.mapped]
    lengths = {len(value.items) if value.items is not None else -1 for value in lists}
    count = max(lengths)
    if len(lengths) > 1 or count < 0:
        found = "no list" if -1 in lengths else f"lists of {', '.join(map(str, sorted(lengths)))} items"
        _fail_unit(state, request, place, f"map: found {found}, expected lists of equal length")
        return
    most = request.program.plan.limits.map_items_max
    if count > most:
        _fail_unit(state, request, place, f"map: found {count} items; limits.map_items_max is {most}")
        return
    inputs, keys = _take_inputs(state, request, place, unit)
    if not count:
        _produce_all(state, request, place, tuple(Value("list", items=()) for _ in unit.returns))
        request_table.release(state, keys)
        return
    request.gathers[place] = Gather([()] * count, count)
    rows = []
    for element in range(count):
        row = tuple((value.items or ())[element] if at in unit.mapped else value for at, value in enumerate(inputs))
        held = tuple(key for value in row for key in value.keys)
        request_table.hold(state, held)
        rows.append((row, held))
    request_table.release(state, keys)
    for element, (row, held) in enumerate(rows):
        if place in request.gathers:
            task_table.begin(state, request, place, row, held, element)
        else:  # an earlier element has failed at once, and the unit with it
            request_table.release(state, held)


def _gather(
    state: SchedulerState, request: Request, place: int, outputs: Sequence[Value], element: int
) -> list[tuple[Value, ...]] | None:
    """Keep one element's outputs; return all of them when they are complete."""
    gather = request.gathers.get(place)
    if gather is None:
        return None
    gather.outputs[element] = tuple(outputs)
    gather.left -= 1
    for value in outputs:
        request_table.hold(state, value.keys)
    if gather.left:
        return None
    del request.gathers[place]
    return gather.outputs


def release_gathers(state: SchedulerState, request: Request) -> None:
    """Release the gathered outputs of the `map:` steps of a request."""
    for place in list(request.gathers):
        _release_gather(state, request, place)


def _release_gather(state: SchedulerState, request: Request, place: int) -> None:
    gather = request.gathers.pop(place, None)
    if gather is not None:
        request_table.release(state, [key for row in gather.outputs for value in row for key in value.keys])


def _abandon_unit(state: SchedulerState, request: Request, place: int) -> None:
    """Drop the remaining elements of a failed unit, and their outputs."""
    for task in [task for task in request.tasks.values() if task.place == place]:
        task_table.drop(state, task)
    _release_gather(state, request, place)


# end


def _produce_all(state: SchedulerState, request: Request, place: int, outputs: Sequence[Value]) -> None:
    """Produce a unit's outputs. Those of a fallback are also the outputs of the unit it replaces."""
    route = request.route
    while True:
        if route.fallbacks:
            _drop_fallback(state, request, place)
        for slot, value in zip(route.units[place].returns, outputs):
            produce(state, request, slot, value)
        called = request.active_fallbacks.get(place)
        if called is None or request.state != OPEN:
            return
        place = called.place
        fallback = route.fallbacks[place]
        outputs = tuple(outputs[at] if at >= 0 else ABSENT for at in fallback.ports)


def _produce_absent(state: SchedulerState, request: Request, place: int) -> None:
    """Make the outputs of a failed unit absent."""
    _produce_all(state, request, place, (ABSENT,) * len(request.route.units[place].returns))
    if request.path is not None and request.state == OPEN:
        task_table.on_path_changed(state, request)


def _drop_fallback(state: SchedulerState, request: Request, place: int) -> None:
    """Settle a unit's fallback, and the units that run only for it, unless it was called."""
    fallback = request.route.fallbacks.get(place)
    if fallback is None or fallback.unit in request.active_fallbacks:
        return
    for other in fallback.group:
        _drop_fallback(state, request, other)
        settle(state, request, other)


UNDECIDED, NOTHING = -2, -1


def _first(values: Sequence[Value | None]) -> int:
    """Return the position of the first present value; UNDECIDED while an earlier one is open, NOTHING if all lack."""
    for at, value in enumerate(values):
        if value is None:
            return UNDECIDED
        if value.kind != "absent":
            return at
    return NOTHING
