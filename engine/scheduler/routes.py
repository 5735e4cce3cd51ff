"""Routes: the steps that a choice of outputs needs, the readers of each value, and the units of dispatch.

Values are numbered once for a plan (*slots*): pipeline inputs first, then every step's outputs in plan order. A Route
is computed once per choice of outputs and cached; steps that are not needed are pruned from it. A route schedules
*units*: a step, or a chain of steps that run one after the other inside one worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import count

from weftline.engine.protocol.messages import Chain, Stage
from weftline.engine.scheduler.latency import Latency, ShortestLatency
from weftline.errors import InputError
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.wire import Wire

KNOWN = 2
"""A unit that is known to run, in a known path."""

ROUTES_MAX = 256
"""Most routes in the cache. A plan has a handful; a hostile client could request thousands. Routes beyond that have no
chains, because every worker keeps the chains that were sent to it: their steps are dispatched one by one."""


@dataclass(slots=True, eq=False)
class ProgramStep:
    """A step of a program, and what it alone has measured. Its policies are in `planned`, beside copies of some.

    timeout_ms: infinite without one.
    deployment: what runs it; -1 for a control.
    latency:    run times of calls with its items: the deployment's own where no other step uses that.
    batch_size: recent size of these calls, and when it was seen; see estimates.py.
    options:    number of its items' options in the deployment; see item_options.py.
    group:      number of the batch group of its items; 0: those of the node's own options, or of any.
    sends_options: its items carry `options`, not only those with a seed.
    """

    planned: PlannedStep
    name: str
    timeout_ms: float
    run_max_ms: float
    deployment: int
    latency: Latency
    batch_size: tuple[float, float] = (1.0, -math.inf)
    options: int = 0
    group: int = 0
    sends_options: bool = False


def steps_over(plan: Plan, deployments: Sequence[int]) -> tuple[ProgramStep, ...]:
    """Return the steps of a plan over the deployments that run them, without measurements."""
    return tuple(
        ProgramStep(
            step,
            step.name,
            math.inf if step.timeout_ms is None else step.timeout_ms,
            step.run_max_ms,
            -1 if step.control else deployment,
            ShortestLatency() if step.streams else Latency(),
        )
        for step, deployment in zip(plan.steps, deployments, strict=True)
    )


Form = tuple[str, str, tuple[int, ...], int]
"""Kind, dtype, shape and size in bytes of an inline value."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What is queued and dispatched as one: a step, or a chain of steps.

    chain:           0 for a step alone, else the chain's id.
    group:           items of one batch have the same number here: the chain's id, or the negative group of the step.
    step:            the step, or the chain's first, as an index in the program's plan.
    steps:           all of them, in running order.
    deployment:      that of `step`: its queue is the unit's, and messages to workers name it.
    deployments:     of all steps.
    head, stages:    `step` and `steps` themselves.
    types:           the types of `returns`; None: any.
    forms:           for each of them, forms of inline values that were found to fit (`message_check.outputs_fault`).
    slots:           the values sent to the worker, in the order of Item.inputs.
    required:        for each of `slots`, whether an absent value skips the unit.
    returns:         the values that come back, in the order of ItemResult.outputs.
    condition_slots: the values that its condition reads, in addition to `slots`.
    when:            its condition, over `condition_slots`.
    mapped:          positions in `slots` of lists that are mapped over.
    stream_position: position in `slots` of the input that comes in chunks; -1: none.
    control:         '' if a worker runs it; 'first', 'switch' or 'passes' if the scheduler evaluates it.
    plain:           it has no condition, map or control, and no input can be absent: the fast path.
    message:         the message that describes the chain to a worker; None for a step alone.
    """

    chain: int
    group: int
    step: int
    steps: tuple[int, ...]
    deployment: int
    deployments: tuple[int, ...]
    head: ProgramStep
    stages: tuple[ProgramStep, ...]
    slots: tuple[int, ...]
    required: tuple[bool, ...]
    returns: tuple[int, ...]
    types: tuple[PortType | None, ...]
    forms: tuple[set[Form] | None, ...]
    condition_slots: tuple[int, ...] = ()
    when: Condition | None = None
    mapped: tuple[int, ...] = ()
    stream_position: int = -1
    control: str = ""
    plain: bool = True
    message: Chain | None = None

    def takes(self, slot: int) -> bool:
        """Return True if the unit reads this value in chunks."""
        return self.stream_position >= 0 and self.slots[self.stream_position] == slot


@dataclass(frozen=True, slots=True)
class Fallback:
    """The fallback of a unit.

    unit:  the unit that runs in its place.
    group: the units that run only for the fallback, itself included, in running order; they wait until it is called.
    ports: for each output of the replaced unit, the position among the fallback's outputs; -1 when it has none.
    """

    unit: int
    group: tuple[int, ...]
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The units that a choice of outputs needs, and how values flow between them.

    units:          in running order.
    readers:        for each slot, the units that read it (twice if in two places), as indexes into `units`.
    stream_readers: for each slot, the units that receive it in chunks.
    outputs_at:     for each slot, the names of the pipeline outputs with its value.
    tickets:        for each slot, its number of reads: `readers` and `outputs_at` together.
    missing:        for each unit, how many values it waits for; one more when it waits to be called as a fallback.
    next:           for each unit, the units that read its outputs; for a fallback also those of the unit it replaces.
    entries:        units that wait for pipeline inputs only.
    fallbacks:      by the unit that they replace.
    deployments:    those of its steps.
    required_steps: steps that every such request needs: no condition, no fallback, not itself a fallback.
    required:       their deployments.
    waits_for:      for each unit of a fallback's group, the fallback.
    order:          the units, each after those that read its outputs.
    deciding:       slots whose values decide which units run: read by conditions, switches and `map:`, or absent
                    after a failure. Inputs of the pipeline are left out: they are known from the start.
    absent_on_failure: for each unit, whether its outputs may be absent after a failure, its own or of its fallback.
    fixed_path:     the known path of every request, see known_path.py; None if it depends on the request.
    """

    units: tuple[Unit, ...]
    readers: tuple[tuple[int, ...], ...]
    stream_readers: tuple[tuple[int, ...], ...]
    outputs_at: tuple[tuple[str, ...], ...]
    tickets: tuple[int, ...]
    missing: tuple[int, ...]
    next: tuple[tuple[int, ...], ...]
    entries: tuple[int, ...]
    fallbacks: dict[int, Fallback]
    waits_for: dict[int, int]
    deployments: frozenset[int]
    required_steps: frozenset[int]
    required: frozenset[int]
    outputs: tuple[str, ...]
    order: tuple[int, ...] = ()
    deciding: frozenset[int] = frozenset()
    absent_on_failure: tuple[bool, ...] = ()
    fixed_path: bytes | None = None


class Routes:
    """Numbers a plan's values and computes the route for a choice of outputs.

    steps:     the plan's, over their deployments; None: the first deployment is that of the first step, and so on.
    chains:    the plan's chains that its deployments can run; None: all.
    new_chain: returns an id that no other chain has.
    types:     port types of the steps' outputs by slot; None for inputs.
    forms:     as in Unit, by slot.
    """

    def __init__(
        self,
        plan: Plan,
        steps: Sequence[ProgramStep] | None = None,
        chains: Sequence[tuple[int, ...]] | None = None,
        new_chain: Callable[[], int] | None = None,
    ) -> None:
        self._plan = plan
        self._steps = steps_over(plan, range(len(plan.steps))) if steps is None else steps
        self._all_chains = plan.chains if chains is None else chains
        self._new_chain = new_chain or count(1).__next__
        wires = [Wire(None, given.name) for given in plan.inputs]
        wires += [Wire(step.name, port.name) for step in plan.steps for port in step.outputs]
        self.slots = {wire: slot for slot, wire in enumerate(wires)}
        self.types: list[PortType | None] = [None] * len(plan.inputs)
        self.types += [port.type for step in plan.steps for port in step.outputs]  # by slot
        self.forms: list[set[Form] | None] = [None if type is None else set() for type in self.types]
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
        self.input_slot = {given.name: slot for slot, given in enumerate(plan.inputs)}
        self._may_lack = {slot for slot, given in enumerate(plan.inputs) if given.optional and given.default is None}
        self._may_lack |= {
            slot for index, step in enumerate(plan.steps) if step.conditional for slot in self.output_slots[index]
        }
        self._outputs = {output.name: self.slots[output.wire] for output in plan.outputs}
        self._kept: dict[tuple[str, ...] | None, Route] = {}
        self._chains: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

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
        units = self._units(needed, names, self._all_chains if chained else ())
        unit_of = {step: place for place, unit in enumerate(units) for step in unit.steps}
        readers: list[list[int]] = [[] for _ in self.slots]
        missing = []
        for place, unit in enumerate(units):
            for slot in (*unit.slots, *unit.condition_slots):
                readers[slot].append(place)
            missing.append(len(unit.slots) + len(unit.condition_slots))
        fallbacks = self._find_fallbacks(units, unit_of, readers, names)
        for one in fallbacks.values():
            for place in one.group:
                missing[place] += 1
        inputs = len(self._plan.inputs)
        absent = tuple(self._absent_on_failure(unit.steps[-1]) for unit in units)
        uncertain = (slot for unit, may_lack in zip(units, absent) if may_lack for slot in unit.returns)
        after = _next_units(units, readers, fallbacks)
        required = frozenset(
            step
            for place, unit in enumerate(units)
            if place not in fallbacks and not any(place in one.group for one in fallbacks.values())
            for step in unit.steps
            if not self._plan.steps[step].conditional and self._plan.steps[step].when is None
        )
        return Route(
            units=units,
            readers=tuple(map(tuple, readers)),
            stream_readers=tuple(
                tuple(dict.fromkeys(place for place in read if units[place].takes(slot)))
                for slot, read in enumerate(readers)
            ),
            outputs_at=tuple(map(tuple, names)),
            tickets=tuple(len(read) + len(answered) for read, answered in zip(readers, names)),
            missing=tuple(missing),
            next=after,
            entries=tuple(
                place
                for place, unit in enumerate(units)
                if all(slot < inputs for slot in (*unit.slots, *unit.condition_slots))
                and not any(place in one.group for one in fallbacks.values())
            ),
            fallbacks=fallbacks,
            deployments=frozenset(one for unit in units for one in unit.deployments if one >= 0),
            required_steps=required,
            required=frozenset(self._steps[step].deployment for step in required) - {-1},
            waits_for={place: one.unit for one in fallbacks.values() for place in one.group},
            outputs=outputs,
            order=tuple(TopologicalSorter(dict(enumerate(after))).static_order()),
            deciding=frozenset((*(slot for unit in units for slot in _deciding(unit) if slot >= inputs), *uncertain)),
            absent_on_failure=absent,
            fixed_path=bytes([KNOWN] * len(units)) if not fallbacks and all(unit.plain for unit in units) else None,
        )

    def _absent_on_failure(self, step: int) -> bool:
        """Return True if the outputs of a step are absent when it fails, and its fallbacks with it."""
        while self._fallback[step] >= 0:
            step = self._fallback[step]
        return self._plan.steps[step].absent_on_failure

    def _needed(self, slots: Sequence[int]) -> list[int]:
        """Return the steps that these values depend on, with conditions and fallbacks, in running order."""
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
        step, slots, condition_slots = self._plan.steps[index], self.input_slots[index], self._looks_at[index]
        required = tuple(not given.optional for given in step.inputs)
        can_lack = any(must and slot in self._may_lack for must, slot in zip(required, slots))
        head, returns = self._steps[index], self.output_slots[index]
        return Unit(
            chain=0,
            group=-head.group,
            step=index,
            steps=(index,),
            deployment=head.deployment,
            deployments=(head.deployment,),
            head=head,
            stages=(head,),
            slots=slots,
            required=required,
            returns=returns,
            types=tuple(self.types[slot] for slot in returns),
            forms=tuple(self.forms[slot] for slot in returns),
            condition_slots=condition_slots,
            when=step.when,
            mapped=tuple(at for at, given in enumerate(step.inputs) if given.port in step.map),
            stream_position=next((at for at, given in enumerate(step.inputs) if given.pieces), -1),
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
            stages.append(Stage(self._steps[step].deployment, tuple(sources), self._steps[step].options))
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
        id = self._chains.get((steps, slots_out)) or self._new_chain()
        self._chains[steps, slots_out] = id
        own = tuple(self._steps[step] for step in steps)
        places = tuple(one.deployment for one in own)
        return Unit(
            id, id, steps[0], steps, places[0], places, own[0], own, tuple(slots), (True,) * len(slots), slots_out,
            tuple(self.types[slot] for slot in slots_out), tuple(self.forms[slot] for slot in slots_out),
            message=Chain(id, tuple(stages), returns),
        )  # fmt: skip

    @property
    def chain_ids(self) -> Collection[int]:
        """The ids of its chains so far."""
        return self._chains.values()

    def _find_fallbacks(
        self,
        units: Sequence[Unit],
        unit_of: dict[int, int],
        readers: Sequence[Sequence[int]],
        names: Sequence[Sequence[str]],
    ) -> dict[int, Fallback]:
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
            found[place] = Fallback(called, groups.of(called), ports)
        return found


def _next_units(
    units: Sequence[Unit], readers: Sequence[Sequence[int]], fallbacks: Mapping[int, Fallback]
) -> tuple[tuple[int, ...], ...]:
    found = [dict.fromkeys(reader for slot in unit.returns for reader in readers[slot]) for unit in units]
    for place in sorted(fallbacks):  # a fallback comes after the unit that it replaces
        found[fallbacks[place].unit] |= found[place]
    return tuple(map(tuple, found))


def _deciding(unit: Unit) -> tuple[int, ...]:
    """Return the slots that decide whether a unit runs, or which of its inputs it selects."""
    by = unit.slots[:1] if unit.control == "switch" else ()
    return (*unit.condition_slots, *by, *(unit.slots[at] for at in unit.mapped))


class _Groups:
    """Computes the units that run only for a fallback.

    readers:   for each unit, the units that read its outputs; None if the request itself returns one of them.
    fallbacks: for each unit, its fallback, or -1.
    """

    def __init__(self, readers: Sequence[Set[int] | None], fallbacks: Sequence[int]) -> None:
        self._readers = readers
        self._fallbacks = fallbacks

    def of(self, called: int) -> tuple[int, ...]:
        """Return the units that run only for `called`, itself included: no other unit reads their outputs."""
        return tuple(sorted(self._reach(called)[0]))

    def _reach(self, called: int) -> tuple[set[int], set[int]]:
        """Return the group of `called`, and that group with the groups of its units' own fallbacks."""
        group, inside, added = set[int](), set[int](), [called]
        while added:
            for place in added:
                group.add(place)
                inside.add(place)
                if self._fallbacks[place] >= 0:
                    inside |= self._reach(self._fallbacks[place])[1]
            added = [place for place in range(called) if place not in group and self._is_for(place, group, inside)]
        return group, inside

    def _is_for(self, place: int, group: Set[int], inside: Set[int]) -> bool:
        read = self._readers[place]
        return read is not None and bool(group & read) and inside >= read
