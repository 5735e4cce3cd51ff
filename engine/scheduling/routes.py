"""Which steps a request needs for the outputs it asks for, who reads what, and what is dispatched together.

Values are numbered once for a plan (*slots*): pipeline inputs first, then every step's outputs in plan order. A Route
is worked out once for each choice of outputs and kept; steps that nobody asked for are pruned from it. What a route
schedules are *units*: a step, or a chain of steps that hand over to each other inside one worker.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from weftline.engine.messages import Chain, Stage
from weftline.errors import InputError
from weftline.pipelines.condition import Condition
from weftline.pipelines.plan import Plan
from weftline.pipelines.wire import Wire

ROUTES_MAX = 256
"""Most choices of outputs remembered; a plan has a handful, a hostile client could ask for thousands. For more of them
no chains are made, because every worker remembers the chains it was told of: their steps are dispatched one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What is queued and dispatched as one.

    chain:    0 for a step alone, else the chain's id.
    step:     the step, or the chain's first; its queue is the unit's.
    steps:    all of them, in running order.
    slots:    the values that go to the worker, in the order of Item.inputs.
    required: for each of `slots`, whether an absent value skips the unit.
    returns:  the values that come back, in the order of Given.outputs.
    looks_at: the values its condition reads, beside `slots`.
    when:     its condition, over `looks_at`.
    mapped:   positions in `slots` that are lists, given item by item.
    feed:     position in `slots` of the one that is taken in pieces; -1: none.
    control:  '' for what a worker runs; 'first', 'switch' or 'passes' for what is decided at once.
    plain:    it has no condition, map or control, and nothing it reads can be absent: the quick path.
    message:  what tells a worker of the chain; None for a step alone.
    """

    chain: int
    step: int
    steps: tuple[int, ...]
    slots: tuple[int, ...]
    required: tuple[bool, ...]
    returns: tuple[int, ...]
    looks_at: tuple[int, ...] = ()
    when: Condition | None = None
    mapped: tuple[int, ...] = ()
    feed: int = -1
    control: str = ""
    plain: bool = True
    message: Chain | None = None

    def takes(self, slot: int) -> bool:
        """Whether it takes this value in pieces."""
        return self.feed >= 0 and self.slots[self.feed] == slot


@dataclass(frozen=True, slots=True)
class StandIn:
    """The fallback of a unit.

    unit:  the unit that answers in its place.
    group: the units that run only for it, itself included, in running order; they wait until it is called.
    ports: for each output of the unit it stands in for, the position among its own outputs; -1 when it has none.
    """

    unit: int
    group: tuple[int, ...]
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What has to happen for a given choice of outputs.

    units:      in running order.
    readers:    for each slot, the units that read it (twice if in two places), as indexes into `units`.
    takers:     for each slot, the units that take it in pieces.
    outputs_at: for each slot, the pipeline outputs it is.
    tickets:    for each slot, how many readers it has: both of the above together.
    missing:    for each unit, how many values it waits for; one more when it waits to be called as a stand-in.
    next:       for each unit, the units that read what it gives: what is still to come after it.
    entries:    units that wait for pipeline inputs only.
    stand_ins:  fallbacks, by the unit they stand in for.
    vital:      steps without which no such request can be answered: no condition, no fallback, nobody's stand-in.
    waits_for:  for each unit of a stand-in's group, the unit that is called.
    """

    units: tuple[Unit, ...]
    readers: tuple[tuple[int, ...], ...]
    takers: tuple[tuple[int, ...], ...]
    outputs_at: tuple[tuple[str, ...], ...]
    tickets: tuple[int, ...]
    missing: tuple[int, ...]
    next: tuple[tuple[int, ...], ...]
    entries: tuple[int, ...]
    stand_ins: dict[int, StandIn]
    waits_for: dict[int, int]
    vital: frozenset[int]
    outputs: tuple[str, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(step for unit in self.units for step in unit.steps))


class Routes:
    """Numbers a plan's values and finds the route for a choice of outputs."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        wires = [Wire(None, given.name) for given in plan.inputs]
        wires += [Wire(step.name, port.name) for step in plan.steps for port in step.outputs]
        self.slots = {wire: slot for slot, wire in enumerate(wires)}
        self._producer = [-1] * len(plan.inputs) + [i for i, step in enumerate(plan.steps) for _ in step.outputs]
        self._step_at = {step.name: index for index, step in enumerate(plan.steps)}
        self.input_slots = [tuple(self.slots[given.wire] for given in step.inputs) for step in plan.steps]
        self.output_slots = [
            tuple(self.slots[Wire(step.name, port.name)] for port in step.outputs) for step in plan.steps
        ]
        self._looks_at = [
            tuple(self.slots[wire] for wire in step.when.wires) if step.when else () for step in plan.steps
        ]
        self._fallback = [self._step_at[step.fallback] if step.fallback else -1 for step in plan.steps]
        self._input_slot = {given.name: slot for slot, given in enumerate(plan.inputs)}
        self._may_lack = {slot for slot, given in enumerate(plan.inputs) if given.optional and given.default is None}
        self._may_lack |= {
            slot for index, step in enumerate(plan.steps) if step.conditional for slot in self.output_slots[index]
        }
        self._outputs = {output.name: self.slots[output.wire] for output in plan.outputs}
        self._kept: dict[tuple[str, ...] | None, Route] = {}
        self._chains: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def slot_of_input(self, name: str) -> int:
        return self._input_slot[name]

    def route(self, wanted: tuple[str, ...] | None) -> Route:
        """Return the route for these outputs (None: all); InputError names an output the pipeline does not have."""
        route = self._kept.get(wanted)
        if route is None:
            kept = len(self._kept) < ROUTES_MAX
            route = self._work_out(wanted, chained=kept)
            if kept:
                self._kept[wanted] = route
        return route

    def _work_out(self, wanted: tuple[str, ...] | None, chained: bool) -> Route:
        outputs = tuple(dict.fromkeys(self._outputs if wanted is None else wanted))
        unknown = [name for name in outputs if name not in self._outputs]
        if unknown or not outputs:
            raise InputError(
                f"no output is called {', '.join(unknown) or 'nothing'}; outputs: {', '.join(self._outputs)}"
            )
        needed = self._needed([self._outputs[name] for name in outputs])
        names: list[list[str]] = [[] for _ in self.slots]
        for name in outputs:
            names[self._outputs[name]].append(name)
        units = self._units(needed, names, self._plan.chains if chained else ())
        unit_of = {step: place for place, unit in enumerate(units) for step in unit.steps}
        readers: list[list[int]] = [[] for _ in self.slots]
        missing = []
        for place, unit in enumerate(units):
            for slot in (*unit.slots, *unit.looks_at):
                readers[slot].append(place)
            missing.append(len(unit.slots) + len(unit.looks_at))
        stand_ins = self._stand_ins(units, unit_of, readers, names)
        for one in stand_ins.values():
            for place in one.group:
                missing[place] += 1
        inputs = len(self._plan.inputs)
        return Route(
            units=units,
            readers=tuple(map(tuple, readers)),
            takers=tuple(
                tuple(dict.fromkeys(place for place in read if units[place].takes(slot)))
                for slot, read in enumerate(readers)
            ),
            outputs_at=tuple(map(tuple, names)),
            tickets=tuple(len(read) + len(answered) for read, answered in zip(readers, names)),
            missing=tuple(missing),
            next=tuple(tuple(dict.fromkeys(r for slot in unit.returns for r in readers[slot])) for unit in units),
            entries=tuple(
                place
                for place, unit in enumerate(units)
                if all(slot < inputs for slot in (*unit.slots, *unit.looks_at))
                and not any(place in one.group for one in stand_ins.values())
            ),
            stand_ins=stand_ins,
            vital=frozenset(
                step
                for place, unit in enumerate(units)
                if place not in stand_ins and not any(place in one.group for one in stand_ins.values())
                for step in unit.steps
                if not self._plan.steps[step].conditional and self._plan.steps[step].when is None
            ),
            waits_for={member: one.unit for one in stand_ins.values() for member in one.group},
            outputs=outputs,
        )

    def _needed(self, slots: Sequence[int]) -> list[int]:
        """Return the steps behind these values, those that decide about them and their fallbacks, in running order."""
        needed: set[int] = set()
        ahead = [self._producer[slot] for slot in slots]
        while ahead:
            step = ahead.pop()
            if step >= 0 and step not in needed:
                needed.add(step)
                ahead += [self._producer[slot] for slot in (*self.input_slots[step], *self._looks_at[step])]
                ahead.append(self._fallback[step])
        return sorted(needed)

    def _units(
        self, needed: Sequence[int], names: Sequence[Sequence[str]], chains: Sequence[tuple[int, ...]]
    ) -> tuple[Unit, ...]:
        chains = [tuple(step for step in chain if step in needed) for chain in chains]
        chained = {step: chain for chain in chains if len(chain) > 1 for step in chain}
        units = []
        for step in needed:
            chain = chained.get(step)
            if chain is None:
                units.append(self._single(step))
            elif chain[0] == step:
                units.append(self._chain(chain, needed, names))
        return tuple(units)

    def _single(self, index: int) -> Unit:
        step, slots, looks_at = self._plan.steps[index], self.input_slots[index], self._looks_at[index]
        required = tuple(not given.optional for given in step.inputs)
        can_lack = any(must and slot in self._may_lack for must, slot in zip(required, slots))
        return Unit(
            chain=0,
            step=index,
            steps=(index,),
            slots=slots,
            required=required,
            returns=self.output_slots[index],
            looks_at=looks_at,
            when=step.when,
            mapped=tuple(at for at, given in enumerate(step.inputs) if given.port in step.map),
            feed=next((at for at, given in enumerate(step.inputs) if given.pieces), -1),
            control=step.control,
            plain=not (step.when or step.map or step.control or can_lack),
        )

    def _chain(self, steps: tuple[int, ...], needed: Sequence[int], names: Sequence[Sequence[str]]) -> Unit:
        stage_of = {step: stage for stage, step in enumerate(steps)}
        slots: dict[int, int] = {}  # value -> position among the item's inputs
        stages = []
        for step in steps:
            sources = []
            for slot in self.input_slots[step]:
                producer = self._producer[slot]
                if producer in stage_of:
                    sources.append((stage_of[producer], self.output_slots[producer].index(slot)))
                else:
                    sources.append((-1, slots.setdefault(slot, len(slots))))
            stages.append(Stage(step, tuple(sources)))
        outside = {
            slot
            for step in needed
            for slot in (*(self.input_slots[step] if step not in stage_of else ()), *self._looks_at[step])
        }
        returns = tuple(
            (stage, port)
            for stage, step in enumerate(steps)
            for port, slot in enumerate(self.output_slots[step])
            if slot in outside or names[slot]
        )
        slots_out = tuple(self.output_slots[steps[stage]][port] for stage, port in returns)
        id = self._chains.setdefault((steps, slots_out), len(self._chains) + 1)
        required = (True,) * len(slots)
        message = Chain(id, tuple(stages), returns)
        return Unit(id, steps[0], steps, tuple(slots), required, slots_out, message=message)

    def _stand_ins(
        self,
        units: Sequence[Unit],
        unit_of: dict[int, int],
        readers: Sequence[Sequence[int]],
        names: Sequence[Sequence[str]],
    ) -> dict[int, StandIn]:
        found = {}
        groups = _Groups(
            [
                None
                if any(names[slot] for slot in unit.returns)
                else {r for slot in unit.returns for r in readers[slot]}
                for unit in units
            ],
            [unit_of.get(self._fallback[unit.step], -1) for unit in units],
        )
        for place, unit in enumerate(units):
            target = self._fallback[unit.step]
            if target < 0:
                continue
            own = [port.name for port in self._plan.steps[target].outputs]
            ports = tuple(
                own.index(port.name) if port.name in own else -1 for port in self._plan.steps[unit.step].outputs
            )
            called = unit_of[target]
            found[place] = StandIn(called, groups.of(called), ports)
        return found


class _Groups:
    """Which units run only for a stand-in.

    readers:   for each unit, the units that read what it gives; None where the request itself asks for that.
    stand_ins: for each unit, the one that answers in its place, or -1.
    """

    def __init__(self, readers: Sequence[Set[int] | None], stand_ins: Sequence[int]) -> None:
        self._readers = readers
        self._stand_ins = stand_ins

    def of(self, called: int) -> tuple[int, ...]:
        """Return the units that run only for `called`, itself included: all that they give is read among them."""
        return tuple(sorted(self._reach(called)[0]))

    def _reach(self, called: int) -> tuple[set[int], set[int]]:
        """Return the group of `called`; and with it the groups of its members' own stand-ins, which may read it too."""
        group, inside, added = set[int](), set[int](), [called]
        while added:
            for place in added:
                group.add(place)
                inside.add(place)
                if self._stand_ins[place] >= 0:
                    inside |= self._reach(self._stand_ins[place])[1]
            added = [place for place in range(called) if place not in group and self._is_for(place, group, inside)]
        return group, inside

    def _is_for(self, place: int, group: Set[int], inside: Set[int]) -> bool:
        read = self._readers[place]
        return read is not None and bool(group & read) and inside >= read
