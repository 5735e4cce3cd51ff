"""Plan rewrite for block requests: same steps, workers and devices, blocks as items.

A request costs the scheduler some hundred microseconds whatever it carries. Where a row takes less than that, the
scheduler is what a job waits for; a request for a thousand rows makes that nothing. It can be done where every step is
a plain batch node: nothing in the graph may depend on a row's values.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weftline.engine.jobs.runners.columns import COLUMN
from weftline.engine.jobs.runners.rows_node import OUTCOME, SEEDS, HeavyRowsNode, RowsConfig, RowsNode
from weftline.errors import InputError
from weftline.nodes.ports import Port, PortType
from weftline.pipelines.check.options import to_options
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.placement.budget import ARENA, OF_OTHERS
from weftline.pipelines.placement.chains import chains
from weftline.pipelines.placement.plan import DeviceBudget, Plan, PlannedInput, PlannedOutput, PlannedStep
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.policy import BatchPolicy, Limits, Slo
from weftline.pipelines.spec.wire import Wire
from weftline.shm.spec import ITEM_BYTES

ROWS = 1024
"""Rows of a block of small values: a request's cost is then well below a microsecond for each."""

ROWS_MIN = 16
"""Fewest rows of a block, however large its values."""

BLOCK_BYTES = 32 << 20
"""Most bytes of one port's values in a block, as far as types tell their size."""

ARENA_BYTES = 64 << 20
"""Least shared memory of each process: two blocks' values."""

OPEN_BYTES_MAX = 1 << 40
"""Inputs are held to the pipeline's own limits row by row; whole blocks of them only to memory."""

RUN_MAX_MS = 86_400_000.0
"""Longest a block may be in a step, a day."""

TYPICAL_BYTES: Mapping[str, int] = {"image": 1 << 20, "audio": 1 << 20, "tensor": 1 << 18}
"""Taken as the size of a value whose type does not tell: a picture of 640 x 480, 16 s of sound."""

PADS: Mapping[str, str] = {
    "weftline.nodes.embed:Embed": "text",
    "weftline.nodes.classify:Classify": "text",
}
"""Nodes that pad a batch to its longest item, and the input that has the length."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A plan for blocks.

    plan:  what is run; its inputs and outputs are columns, and tensors of seeds.
    seeds: name of the input that has the rows' seeds.
    told:  for each step that runs, in running order, the output that has its rows_node.BlockOutcome.
    """

    plan: Plan
    seeds: str
    told: Mapping[str, str]


def find_block_obstacle(plan: Plan, outputs: Collection[str] | None = None) -> str:
    """Return why the steps that these outputs need (None: all) cannot be given blocks; '' when they can."""
    steps = needed(plan, outputs)
    if not steps:
        return "no step runs for these outputs"
    for step in steps:
        for hindrance, found in _hindrances(step).items():
            if found:
                return f"step {step.name} {hindrance}"
    stand_ins = {step.fallback for step in plan.steps}
    return next((f"step {step.name} answers for another" for step in steps if step.name in stand_ins), "")


def _hindrances(step: PlannedStep) -> Mapping[str, bool]:
    return {
        "is decided by the scheduler, row by row": bool(step.control),
        "streams": step.streams or bool(step.fed),
        "takes pieces": any(given.pieces for given in step.inputs),
        "remembers between requests": step.sequence is not None,
        "has a condition": step.when is not None,
        "runs for each element of a list": bool(step.map),
        "has a fallback": step.fallback is not None,
        "is tried again when it fails": step.retry is not None,
        "has a timeout_ms": step.timeout_ms is not None,
        "pads its inputs": bool(step.batch.pad),
        "must not run twice for a row": not step.idempotent,
        "is finite": step.finite,
    }


def needed(plan: Plan, outputs: Collection[str] | None = None) -> tuple[PlannedStep, ...]:
    """Return the steps that these outputs (None: all) need, in running order."""
    wanted = {one.wire.step for one in plan.outputs if outputs is None or one.name in outputs}
    found: list[PlannedStep] = []
    for step in reversed(plan.steps):
        if step.name in wanted:
            found.append(step)
            wires = [given.wire for given in step.inputs] + list(step.when.wires if step.when is not None else ())
            wanted |= {wire.step for wire in wires} | {step.fallback}
    return tuple(reversed(found))


def rows_of(plan: Plan, outputs: Collection[str] | None = None) -> int:
    """Return how many rows make a good block: as many as fit into BLOCK_BYTES, in whole batches where possible.

    A block that ends within a batch of some step makes a small batch of what is left over.
    """
    steps = needed(plan, outputs)
    types = [given.type for step in steps for given in step.inputs]
    types += [port.type for step in steps for port in step.outputs]
    rows = min(ROWS, max(ROWS_MIN, BLOCK_BYTES // max(map(_typical_bytes, types), default=1)))
    sizes = [step.batch.items_max for step in steps]
    together = math.lcm(*sizes)
    whole = together if together <= rows else max(sizes, default=1)
    return max(whole, rows // whole * whole)


def _typical_bytes(type: PortType) -> int:
    if type.item is not None:
        return 4 * _typical_bytes(type.item)
    if type.kind == "tensor" and type.dtype is not None and type.dims is not None:
        sizes = [dim for dim in type.dims if isinstance(dim, int)]
        if len(sizes) == len(type.dims):
            return max(1, math.prod(sizes) * ITEM_BYTES[type.dtype])
    return TYPICAL_BYTES.get(type.kind, 1024)


def block_plan(plan: Plan, outputs: Collection[str] | None = None, block_rows: int = ROWS) -> BlockPlan:
    """Return the plan that answers these outputs (None: all) for whole blocks; `blockable` must have said ''.

    Steps, their workers, instances and devices are those of `plan`; what these outputs do not need is left out, as are
    outputs that are inputs passed on. block_rows: most rows of a block, by which run_max_ms is raised.
    """
    run = needed(plan, outputs)
    constants = {one.name: one for one in plan.inputs if one.hidden}
    read = dict.fromkeys(given.wire.port for step in run for given in step.inputs if given.wire.step is None)
    inputs = [Input(name, str(COLUMN)) for name in read if name not in constants]
    seeds = _free("seeds", read)
    told = {step.name: _free("told", [port.name for port in step.outputs]) for step in run}
    at = _workers(run)
    limits = _limits(plan.limits)
    uses = Counter(given.wire for step in run for given in step.inputs)
    wanted = [
        PlannedOutput(one.name, one.wire, COLUMN)
        for one in plan.outputs
        if one.wire.step is not None and (outputs is None or one.name in outputs)
    ]
    uses.update(one.wire for one in wanted)
    steps = tuple(_step(step, constants, seeds, told[step.name], at, uses, block_rows) for step in run)
    names = {step.name: f"{step.name}: {told[step.name]}" for step in run}  # no output's name has a colon
    inputs.append(Input(seeds, str(SEEDS)))
    new = Plan(
        name=plan.name,
        inputs=tuple(inputs),
        input_types={one.name: PortType.parse(one.type) for one in inputs},
        input_readers={one.name: uses[Wire(None, one.name)] for one in inputs} | {seeds: len(run)},
        steps=steps,
        outputs=(*wanted, *(PlannedOutput(names[name], Wire(name, port), OUTCOME) for name, port in told.items())),
        workers=tuple(
            dataclasses.replace(
                plan.workers[old],
                steps=tuple(name for name in plan.workers[old].steps if name in names),
                arena_bytes=limits.arena_bytes,
                device_arena_bytes=0,
            )
            for old in at
        ),
        limits=limits,
        slo=Slo(),
        cores=plan.cores,
        base_dir=plan.base_dir,
        file=plan.file,
        about=plan.about,
        ordering=plan.ordering,
        mps=plan.mps,
        chains=chains(steps, inputs),
    )
    return BlockPlan(dataclasses.replace(new, budgets=_budgets(plan, new)), seeds, names)


def _budgets(plan: Plan, new: Plan) -> tuple[DeviceBudget, ...]:
    """Return what is claimed of each GPU that is still used: without arenas, and what belonged to steps left out."""
    kept = {"", *(step.name for step in new.steps), *(worker.name for worker in new.workers)}
    used = {worker.device for worker in new.workers}
    return tuple(
        dataclasses.replace(
            one,
            claims=tuple(
                claim for claim in one.claims if claim.owner in kept and claim.what not in {ARENA, *OF_OTHERS}
            ),
            kv_bytes=0,
        )
        for one in plan.budgets
        if one.device in used
    )


def _step(
    step: PlannedStep,
    constants: Mapping[str, Input],
    seeds: str,
    told: str,
    at: Mapping[int, int],
    uses: Mapping[Wire, int],
    block_rows: int,
) -> PlannedStep:
    """Return a step that runs this one on blocks. at: the new index of each worker. uses: readers of each wire."""
    known = {
        given.port: constants[given.wire.port]
        for given in step.inputs
        if given.wire.step is None and given.wire.port in constants
    }
    absent = tuple(port for port, one in known.items() if one.default is None and one.optional)
    fixed = {port: one.default for port, one in known.items() if port not in absent}
    seeds_port = _free("seeds", [given.port for given in step.inputs])
    config = RowsConfig(
        step=step.name,
        runs=step.node,
        runs_options=dict(step.options),
        takes={given.port: known[given.port].type if given.port in known else str(given.type) for given in step.inputs},
        gives={port.name: str(port.type) for port in step.outputs},
        optional=tuple(given.port for given in step.inputs if given.optional),
        fixed=fixed,
        absent=absent,
        unread=tuple(port.name for port in step.outputs if not uses.get(Wire(step.name, port.name))),
        rows_max=step.batch.items_max,
        same_shapes=step.batch.shapes == "same",
        by_length=PADS.get(step.node, ""),
        mutates=step.mutates_inputs,
        seeds=seeds_port,
        told=told,
    )
    columns = [PlannedInput(given.port, given.wire, COLUMN) for given in step.inputs if given.port not in known]
    node = HeavyRowsNode if step.heavy else RowsNode
    calls = math.ceil(block_rows / step.batch.items_max)
    return dataclasses.replace(
        step,
        node=f"{node.__module__}:{node.__name__}",
        options=to_options(config),
        inputs=(*columns, PlannedInput(seeds_port, Wire(None, seeds), SEEDS)),
        outputs=(*(Port(port.name, COLUMN) for port in step.outputs), Port(told, OUTCOME)),
        readers={port.name: uses.get(Wire(step.name, port.name), 0) for port in step.outputs} | {told: 1},
        batch=BatchPolicy(order="arrival"),
        mutates_inputs=False,
        workers=tuple(at[old] for old in step.workers),
        run_max_ms=min(step.run_max_ms * calls, RUN_MAX_MS),
        conditional=False,
        reserved=0,
        near_inputs=(),  # columns of many rows travel in host memory
        near_outputs={},
    )


def _workers(steps: Sequence[PlannedStep]) -> dict[int, int]:
    """Return the new index of each worker that is still needed, in the old order."""
    return {old: new for new, old in enumerate(sorted({worker for step in steps for worker in step.workers}))}


def _limits(limits: Limits) -> Limits:
    return dataclasses.replace(
        limits,
        request_bytes_max=OPEN_BYTES_MAX,
        open_bytes_max=OPEN_BYTES_MAX,
        arena_bytes=max(limits.arena_bytes, ARENA_BYTES),
        retry_share=1.0,
        deadline_ms=None,
        refuse_early=True,
    )


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


EXACT, ROUNDING = "exact", "rounding"
"""Whether the same rows give the same bytes in every run, or numbers that may differ by rounding."""


def repeatable(plan: Plan, outputs: Sequence[str], shared: bool) -> dict[str, str]:
    """Return for each output whether a job gives the same bytes in every run.

    Batches that usual requests share, and steps that batch as they go along, make numbers differ by rounding; so does
    everything that is made of these.
    """
    loose = {None: False} | {step.name: shared or step.streams for step in plan.steps}
    for step in plan.steps:  # each comes after what it reads
        wires = [given.wire for given in step.inputs] + list(step.when.wires if step.when is not None else ())
        loose[step.name] = loose[step.name] or any(loose[wire.step] for wire in wires)
    for step in plan.steps:
        if step.fallback is not None:
            loose[step.name] = loose[step.name] or loose[step.fallback]
    wire_of = {one.name: one.wire for one in plan.outputs}
    return {name: ROUNDING if loose[wire_of[name].step] else EXACT for name in outputs}


def check_outputs(plan: Plan, outputs: Sequence[str]) -> None:
    """Raise InputError when the pipeline lacks one of these outputs."""
    known = [one.name for one in plan.outputs]
    unknown = [name for name in outputs if name not in known]
    if unknown or not outputs:
        hints = [hint for name in unknown if (hint := did_you_mean(name, known))]
        told = f"no output is called {listed(unknown)}; outputs: {listed(known)}"
        raise InputError(told + (f"\n    fix: {hints[0]}" if hints else ""))
