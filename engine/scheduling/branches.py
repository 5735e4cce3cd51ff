"""Control flow inside a request: what is skipped, chosen, spread over a list, gathered, or answered by a stand-in.

A unit of a request is *ready* when every value it reads is settled. Then it begins (tasks are queued for it), or is
skipped (what it would have given is absent), or, for `first` and `switch`, is decided here and now. When its tasks are
answered it is *finished*; when one fails for good it has *failed*, and its stand-in is called if it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftline.engine.messages import ABSENT, PIECES, Value
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.peek import peek
from weftline.engine.scheduling.request import OPEN, Called, Gather, Request, StepTiming, Task
from weftline.engine.scheduling.routes import Unit
from weftline.pipelines.plan import Plan
from weftline.shm.block import Key

Begin = Callable[[Request, int, tuple[Value, ...], Sequence[Key], int], None]
"""Queues a task: request, the unit's place, its inputs, their leases, and which element of a list it is (-1: none)."""


class Branches:
    """Moves requests through their graph. Pure; owned by the scheduler.

    begin: queues a task.
    drop:  takes a task out of its queue or worker, and ends its leases.
    """

    def __init__(self, plan: Plan, begin: Begin, drop: Callable[[Task], None]) -> None:
        self._steps = plan.steps
        self._map_items_max = plan.limits.map_items_max
        self._begin = begin
        self._drop = drop

    def attach(self, book: Book, over: Callable[[Request, int], None]) -> None:
        """Say which book the requests are in (the two know each other), and who is told that a unit is over."""
        self._book = book
        self._over = over

    def ready(self, request: Request, place: int) -> None:
        """Every value that a unit reads is settled (or, for a control, one more of them is)."""
        unit = request.route.units[place]
        if unit.plain:
            inputs, keys = self._take(request, place, unit)
            self._begin(request, place, inputs, keys, -1)
        elif unit.control:
            self._decide(request, place, unit)
        elif not self._allowed(request, place, unit):
            return
        elif unit.mapped:
            self._spread(request, place, unit)
        else:
            inputs, keys = self._take(request, place, unit)
            self._begin(request, place, inputs, keys, -1)

    def finished(self, request: Request, place: int, outputs: Sequence[Value], element: int = -1) -> None:
        """A task of a unit was answered; the leases of `outputs` are still held by whoever brings them."""
        if element >= 0:
            gathered = self._gather(request, place, outputs, element)
            if gathered is None:
                return
            holds = [key for row in gathered for value in row for key in value.keys]
            unit = request.route.units[place]
            lists = tuple(
                Value("list", items=tuple(row[port] for row in gathered)) for port in range(len(unit.returns))
            )
            self._give(request, place, lists)
            self._book.release(holds)
        else:
            self._give(request, place, outputs)
            if request.feeds:
                self._over(request, place)

    def failed(self, request: Request, place: int, error: str, message: str, step: str) -> None:
        """A unit has failed for good: its stand-in takes over, or the request fails."""
        self._abandon(request, place)
        stand_in = request.route.stand_ins.get(place)
        if stand_in is None:
            self._book.end(request, "fail", error, message, step)
            return
        request.called[stand_in.unit] = Called(place, error, message, step)
        for member in stand_in.group:
            if request.missing[member] > 0:
                request.missing[member] -= 1
        for member in stand_in.group:
            left = request.missing[member]
            if request.state == OPEN and (left == 0 or (left > 0 and request.route.units[member].control)):
                self.ready(request, member)
        if request.feeds:
            self._over(request, place)

    # beginning

    def _take(self, request: Request, place: int, unit: Unit) -> tuple[tuple[Value, ...], Sequence[Key]]:
        """Move a unit's inputs out of the request; values that only its condition read are let go."""
        request.missing[place] = -1
        book, values = self._book, request.values
        inputs: list[Value] = []
        keys: Sequence[Key] = ()
        for position, slot in enumerate(unit.slots):
            if position == unit.feed and slot not in values:
                inputs.append(PIECES)
                continue
            inputs.append(values[slot])
            own = book.take(request, slot)
            if own:
                keys = (*keys, *own)
        for slot in unit.looks_at:
            book.release(book.take(request, slot))
        return tuple(inputs), keys

    def _allowed(self, request: Request, place: int, unit: Unit) -> bool:
        """Whether a unit runs: its condition holds and nothing it must have is absent; else it is skipped or fails."""
        values = request.values
        lacks = (
            must and slot in values and values[slot].kind == "absent" for must, slot in zip(unit.required, unit.slots)
        )  # what comes in pieces is there
        runs = bool(unit.control) or not any(lacks)
        if runs and unit.when is not None:
            try:
                runs = unit.when.holds([peek(request.values[slot]) for slot in unit.looks_at])
            except ValueError as error:
                self._refuse(request, place, f"its condition cannot be decided: {error}")
                return False
        if not runs:
            self._skip(request, place)
        return runs

    def _skip(self, request: Request, place: int) -> None:
        name = self._steps[request.route.units[place].step].name
        request.timings.append(StepTiming(name, 0.0, 0.0, 0, started_ms=self._book.now_ms, outcome="skipped"))
        called = request.called.get(place)
        if called is not None:  # a stand-in that does not run: what it stood in for has failed
            self._book.settle(request, place)
            self._book.end(request, "fail", called.error, called.message, called.step)
            return
        self._dismiss(request, place)
        self._book.skip(request, place)

    def _refuse(self, request: Request, place: int, message: str) -> None:
        self._book.settle(request, place)
        step = self._steps[request.route.units[place].step].name
        self.failed(request, place, "StepError", message, step)

    def _decide(self, request: Request, place: int, unit: Unit) -> None:
        """Choose among the inputs of a control as soon as the choice is sure."""
        if request.route.waits_for.get(place, -1) not in (-1, *request.called):
            return  # a stand-in's, and nobody has called it
        if unit.when is not None and (
            any(slot not in request.values for slot in unit.looks_at) or not self._allowed(request, place, unit)
        ):
            return
        values = [request.values.get(slot) for slot in unit.slots]
        if unit.control == "passes":
            if request.missing[place] == 0:
                self._choose(request, place, unit, tuple(range(len(values))))
            return
        at = _first(values) if unit.control == "first" else self._switch(request, place, unit, values)
        if at == UNDECIDED:
            return
        if at == NOTHING:
            self._skip(request, place)
        else:
            self._choose(request, place, unit, (at,))

    def _switch(self, request: Request, place: int, unit: Unit, values: Sequence[Value | None]) -> int:
        """Return the position of the case that is chosen; the first input is what the switch decides by."""
        if values[0] is None:
            return UNDECIDED
        if values[0].kind == "absent":
            return NOTHING
        step = self._steps[unit.step]
        try:
            by = peek(values[0])
        except ValueError as error:
            self._refuse(request, place, f"it cannot decide: {error}")
            return UNDECIDED
        cases = (
            at for at, case in enumerate(step.cases, 1) if case == by and isinstance(case, bool) == isinstance(by, bool)
        )
        at = next(cases, len(values) - 1 if step.default else NOTHING)
        if at == NOTHING:
            return NOTHING
        chosen = values[at]
        return UNDECIDED if chosen is None else NOTHING if chosen.kind == "absent" else at

    def _choose(self, request: Request, place: int, unit: Unit, positions: Sequence[int]) -> None:
        """Give a control's chosen inputs as its outputs, and let go of all it read."""
        chosen = tuple(request.values[unit.slots[at]] for at in positions)
        for value in chosen:  # kept while the tickets it was read by are let go
            self._book.hold(value.keys)
        self._book.settle(request, place)
        self._give(request, place, chosen)
        for value in chosen:
            self._book.release(value.keys)

    # lists

    def _spread(self, request: Request, place: int, unit: Unit) -> None:
        """Queue a task for each element of the lists that a unit maps over."""
        lists = [request.values[unit.slots[at]] for at in unit.mapped]
        lengths = {len(value.items) if value.items is not None else -1 for value in lists}
        count = max(lengths)
        if len(lengths) > 1 or count < 0:
            found = "no list" if -1 in lengths else f"lists of {', '.join(map(str, sorted(lengths)))} items"
            self._refuse(request, place, f"it maps over lists of one length, and was given {found}")
            return
        if count > self._map_items_max:
            self._refuse(request, place, f"it was given {count} items; limits.map_items_max is {self._map_items_max}")
            return
        inputs, keys = self._take(request, place, unit)
        if not count:
            self._give(request, place, tuple(Value("list", items=()) for _ in unit.returns))
            self._book.release(keys)
            return
        request.gathers[place] = Gather([()] * count, count)
        rows = []
        for element in range(count):
            row = tuple((value.items or ())[element] if at in unit.mapped else value for at, value in enumerate(inputs))
            held = tuple(key for value in row for key in value.keys)
            self._book.hold(held)
            rows.append((row, held))
        self._book.release(keys)
        for element, (row, held) in enumerate(rows):
            if place in request.gathers:
                self._begin(request, place, row, held, element)
            else:  # one before it has failed at once, and the unit with it
                self._book.release(held)

    def _gather(
        self, request: Request, place: int, outputs: Sequence[Value], element: int
    ) -> list[tuple[Value, ...]] | None:
        """Keep one element's outputs; return all of them when they are complete."""
        gather = request.gathers.get(place)
        if gather is None:
            return None
        gather.outputs[element] = tuple(outputs)
        gather.left -= 1
        for value in outputs:
            self._book.hold(value.keys)
        if gather.left:
            return None
        del request.gathers[place]
        return gather.outputs

    def abandon_gathers(self, request: Request) -> None:
        """Let go of what `map:` steps of a request had gathered."""
        for place in list(request.gathers):
            self._let_go(request, place)

    def _let_go(self, request: Request, place: int) -> None:
        gather = request.gathers.pop(place, None)
        if gather is not None:
            self._book.release(key for row in gather.outputs for value in row for key in value.keys)

    def _abandon(self, request: Request, place: int) -> None:
        """Drop what is left of a unit that has failed: its other elements, and what they gave."""
        for task in [task for task in request.tasks.values() if task.place == place]:
            self._drop(task)
        self._let_go(request, place)

    # ends

    def _give(self, request: Request, place: int, outputs: Sequence[Value]) -> None:
        """Settle what a unit gives; a stand-in's outputs are those of the unit it stands in for, too."""
        route = request.route
        while True:
            if route.stand_ins:
                self._dismiss(request, place)
            for slot, value in zip(route.units[place].returns, outputs):
                self._book.produce(request, slot, value)
            called = request.called.get(place)
            if called is None or request.state != OPEN:
                return
            place = called.place
            stand_in = route.stand_ins[place]
            outputs = tuple(outputs[at] if at >= 0 else ABSENT for at in stand_in.ports)

    def _dismiss(self, request: Request, place: int) -> None:
        """A unit's stand-in is not needed, unless it was called: it and what runs only for it are settled."""
        stand_in = request.route.stand_ins.get(place)
        if stand_in is None or stand_in.unit in request.called:
            return
        for member in stand_in.group:
            self._dismiss(request, member)
            self._book.settle(request, member)


UNDECIDED, NOTHING = -2, -1


def _first(values: Sequence[Value | None]) -> int:
    """Return the position of the first present value; UNDECIDED while one before it is open, NOTHING if all lack."""
    for at, value in enumerate(values):
        if value is None:
            return UNDECIDED
        if value.kind != "absent":
            return at
    return NOTHING
