"""Draw random plans for the simulation: every scheduler construct, in unusual combinations.

A plan is drawn from a seed and is sound by construction (types fit, fallbacks have no other readers), because what
is tested is the scheduler; `pipelines.check` has tests of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weftline.nodes.ports import Port, PortType, list_of
from weftline.pipelines.placement.chains import chains
from weftline.pipelines.placement.plan import Plan, PlannedInput, PlannedOutput, PlannedStep, PlannedWorker
from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.policy import BatchPolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.wire import Wire
from weftline.shm.block import INLINE_BYTES_MAX

TENSOR = PortType("tensor", "uint8", (INLINE_BYTES_MAX + 64,))
BYTES = PortType("bytes")
JSON = PortType("json")
LIST = list_of(BYTES)

WORKER_ARENA_BYTES = 1 << 18
INGRESS_ARENA_BYTES = 1 << 19
STREAM_BYTES_MAX = 1_000
"""Four pieces: a step that takes them falls behind now and then."""


@dataclass(frozen=True, slots=True)
class Coin(Condition):
    """A condition that holds when the first value it looks at is truthy."""

    def holds(self, values: Sequence[Any]) -> bool:
        return bool(values[0])


@dataclass(slots=True)
class _Draft:
    """Wires drawn so far: all of one kind each, those whose value may be absent, and those that bring pieces."""

    plain: list[Wire]
    json: list[Wire]
    lists: list[Wire]
    lacking: set[Wire]
    pieces: list[Wire] = field(default_factory=list)
    streamy: bool = False  # most steps stream
    listed: bool = False  # most steps return lists or map over them


def random_plan(rng: random.Random, listed: bool = False) -> Plan:
    """Draw a plan of 1 to 8 steps over 1 to 3 inputs; what is new is read most, so that paths get long.

    listed: most steps return lists or map over them.
    """
    inputs = tuple(
        Input(f"in{i}", rng.choice(("bytes", "json")), optional=rng.random() < 0.15) for i in range(rng.randint(1, 3))
    )
    wires = [Wire(None, given.name) for given in inputs]
    draft = _Draft(
        list(wires),
        [wire for wire, given in zip(wires, inputs) if given.type == "json"],
        [],
        {wire for wire, given in zip(wires, inputs) if given.optional},
    )
    draft.streamy, draft.listed = rng.random() < 0.25, listed
    workers: list[PlannedWorker] = []
    steps: list[PlannedStep] = []
    plain = not (draft.streamy or draft.listed) and rng.random() < 0.3
    for index in range(rng.randint(1, 8)):
        steps += [_plain(f"s{index}", rng, draft, workers)] if plain else _steps(f"s{index}", rng, draft, workers)
    pool = [*draft.plain, *draft.lists]
    outputs = tuple(PlannedOutput(f"o{i}", _recent(rng, pool), BYTES) for i in range(rng.randint(1, 3)))
    plan = Plan(
        "sim", inputs, {one.name: PortType(one.type) for one in inputs}, {}, tuple(steps), outputs, tuple(workers),
        Limits(
            requests_max=12, arena_bytes=INGRESS_ARENA_BYTES, map_items_max=5, stall_max_ms=300.0,
            stream_bytes_max=STREAM_BYTES_MAX,
            open_bytes_max=rng.choice((1 << 30, 100_000)), refuse_early=rng.random() < 0.7,
        ),
        Slo(), 2, Path(),
    )  # fmt: skip
    return replace(plan, chains=chains(plan.steps, plan.inputs))


def _steps(name: str, rng: random.Random, draft: _Draft, workers: list[PlannedWorker]) -> list[PlannedStep]:
    draw = rng.random()
    if draw < 0.08:
        return [_first(name, rng, draft)]
    if draw < 0.16 and draft.json:
        return [_switch(name, rng, draft)]
    types = (LIST, TENSOR, LIST) if draft.listed else (TENSOR, BYTES, JSON, LIST)
    ports = tuple(Port(f"out{i}", rng.choice(types)) for i in range(rng.randint(1, 2)))
    reads = _reads(rng, draft, rng.randint(0 if rng.random() < 0.1 else 1, 3))
    mapped: tuple[str, ...] = ()
    if draft.lists and rng.random() < (0.8 if draft.listed else 0.4):
        reads = (PlannedInput("list", rng.choice(draft.lists), BYTES), *reads)
        mapped = ("list",)
        ports = tuple(Port(port.name, TENSOR if draft.listed else BYTES) for port in ports)
    streams = rng.random() < (0.7 if draft.streamy else 0.15)
    fed = streams and not mapped and bool(draft.pieces) and rng.random() < 0.8
    if fed:
        source = PlannedInput("fed", _recent(rng, draft.pieces), BYTES, rng.random() < 0.2, pieces=True)
        reads = (source, *(reads if rng.random() < 0.5 else ()))
    when = _coin(rng, draft)
    lacks = when is not None or any(not read.optional and read.wire in draft.lacking for read in reads)
    sequence = SequencePolicy(3, 400.0) if not streams and not mapped and rng.random() < 0.1 else None
    step = PlannedStep(
        name, "sim", {}, reads, ports, {}, _policy(rng), streams, False, False, "cpu", _place(rng, workers), 1000.0,
        when=when, map=mapped, sequence=sequence, conditional=lacks,
        retry=Retry(rng.randint(1, 2), rng.choice((0.0, 5.0))) if rng.random() < 0.2 else None,
        timeout_ms=rng.choice((10.0, 40.0, 200.0)) if rng.random() < 0.15 else None,
        idempotent=rng.random() < 0.85, fed=("fed",) if fed else (),
    )  # fmt: skip
    made = [step]
    if rng.random() < 0.2:
        made = [replace(step, fallback=f"{name}f"), *_stand_in(f"{name}f", ports, rng, draft, workers, bool(mapped))]
    for port in ports:
        _offer(Wire(name, port.name), LIST if mapped else port.type, lacks, draft)
    if streams and not mapped and made[0].fallback is None:
        draft.pieces.append(Wire(name, ports[0].name))  # the simulation gives pieces of the first port
    return made


def _plain(name: str, rng: random.Random, draft: _Draft, workers: list[PlannedWorker]) -> PlannedStep:
    """Return a step that may hand over inside its worker."""
    reads = tuple(replace(read, optional=False) for read in _reads(rng, draft, rng.randint(1, 2)))
    lacks = any(read.wire in draft.lacking for read in reads)
    ports = tuple(Port(f"out{i}", rng.choice((TENSOR, BYTES))) for i in range(rng.randint(1, 2)))
    for port in ports:
        _offer(Wire(name, port.name), port.type, lacks, draft)
    policy = BatchPolicy(rng.choice((1, 2, 4, 8)), rng.choice((0.0, 0.0, 2.0)))
    return PlannedStep(
        name, "sim", {}, reads, ports, {}, policy, False, False, False, "cpu", _place(rng, workers), 1000.0,
        conditional=lacks,
    )  # fmt: skip


def _offer(wire: Wire, type: PortType, lacks: bool, draft: _Draft) -> None:
    if type.kind == "list":
        draft.lists.append(wire)
    else:
        draft.plain.append(wire)
    if type == JSON:
        draft.json.append(wire)
    if lacks:
        draft.lacking.add(wire)


def _recent(rng: random.Random, wires: Sequence[Wire]) -> Wire:
    """Return one of the wires, most likely one of the last."""
    return wires[-1 - min(int(rng.expovariate(0.6)), len(wires) - 1)]


def _reads(rng: random.Random, draft: _Draft, count: int) -> tuple[PlannedInput, ...]:
    return tuple(PlannedInput(f"p{i}", _recent(rng, draft.plain), BYTES, rng.random() < 0.2) for i in range(count))


def _stand_in(
    name: str, ports: tuple[Port, ...], rng: random.Random, draft: _Draft, workers: list[PlannedWorker], mapped: bool
) -> list[PlannedStep]:
    """Return a step that answers in another's place, and what runs for it alone; or constants instead of a node."""
    if not mapped and rng.random() < 0.4 and not any(port.type == LIST for port in ports):
        wires = [wire for wire in draft.plain if wire not in draft.lacking]
        if wires:
            reads = tuple(PlannedInput(port.name, rng.choice(wires), port.type) for port in ports)
            return [_control(name, "passes", reads, ports)]
    reads = _reads(rng, draft, rng.randint(1, 2))
    made = []
    lacks = any(not read.optional and read.wire in draft.lacking for read in reads)
    if rng.random() < 0.4:
        helper = _helper(f"{name}h", rng, draft, workers)
        made.append(helper)
        reads = (*reads, PlannedInput("help", Wire(helper.name, "value"), BYTES, rng.random() < 0.3))
        lacks = lacks or (helper.conditional and not reads[-1].optional)
    given = tuple(Port(port.name, LIST if mapped else port.type) for port in ports)
    step = PlannedStep(
        name, "sim", {}, reads, given, {}, _policy(rng), rng.random() < 0.1, False, False, "cpu", _place(rng, workers),
        1000.0, conditional=lacks,
    )  # fmt: skip
    return [*made, step]


def _helper(name: str, rng: random.Random, draft: _Draft, workers: list[PlannedWorker]) -> PlannedStep:
    """Return a step or a choice that only a fallback reads."""
    if rng.random() < 0.3:
        return _first(name, rng, draft, offers=False)
    reads = _reads(rng, draft, 1)
    return PlannedStep(
        name, "sim", {}, reads, (Port("value", BYTES),), {}, _policy(rng), False, False, False, "cpu",
        _place(rng, workers), 1000.0,
        conditional=any(not read.optional and read.wire in draft.lacking for read in reads),
    )  # fmt: skip


def _first(name: str, rng: random.Random, draft: _Draft, offers: bool = True) -> PlannedStep:
    reads = tuple(replace(read, optional=True) for read in _reads(rng, draft, rng.randint(2, 3)))
    when = _coin(rng, draft)
    lacks = when is not None or all(read.wire in draft.lacking for read in reads)
    if offers:
        _offer(Wire(name, "value"), BYTES, lacks, draft)
    return _control(name, "first", reads, (Port("value", BYTES),), conditional=lacks, when=when)


def _coin(rng: random.Random, draft: _Draft) -> Condition | None:
    return Coin("coin", (rng.choice(draft.json),), ("coin",)) if draft.json and rng.random() < 0.2 else None


def _switch(name: str, rng: random.Random, draft: _Draft) -> PlannedStep:
    by = PlannedInput("by", rng.choice(draft.json), JSON)
    reads = (by, *(replace(read, optional=True) for read in _reads(rng, draft, rng.randint(1, 3))))
    default = rng.random() < 0.5 and len(reads) > 2
    cases: tuple[Any, ...] = (True, False, "other")[: len(reads) - 1 - default]
    when = _coin(rng, draft)
    lacks = when is not None or not default or any(read.wire in draft.lacking for read in reads)
    _offer(Wire(name, "value"), BYTES, lacks, draft)
    return _control(
        name, "switch", reads, (Port("value", BYTES),), cases=cases, default=default, conditional=lacks, when=when
    )


def _control(
    name: str, control: str, reads: tuple[PlannedInput, ...], ports: tuple[Port, ...], **more: Any
) -> PlannedStep:
    return PlannedStep(
        name, f"sim:{control}", {}, reads, ports, {}, BatchPolicy(), False, False, False, "cpu", (), 1000.0,
        control=control, **more,
    )  # fmt: skip


def _policy(rng: random.Random) -> BatchPolicy:
    items_max = rng.choice((1, 2, 4, 8))
    return BatchPolicy(
        items_max,
        rng.choice((0.0, 0.0, 2.0, 10.0)),
        "auto" if rng.random() < 0.15 else "fixed",
        (2, 4) if items_max >= 4 and rng.random() < 0.2 else (),
        "same" if rng.random() < 0.15 else "any",
        order="arrival" if rng.random() < 0.2 else "deadline",
    )


def _place(rng: random.Random, workers: list[PlannedWorker]) -> tuple[int, ...]:
    if workers and rng.random() < 0.45:
        return (len(workers) - 1 if rng.random() < 0.7 else rng.randrange(len(workers)),)
    places = tuple(range(len(workers), len(workers) + rng.choice((1, 1, 2))))
    workers += [PlannedWorker(f"w{i}", (), 1, WORKER_ARENA_BYTES) for i in places]
    return places
