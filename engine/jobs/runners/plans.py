"""Plans of jobs: rewrite for block requests, and reproducibility of outputs; pure.

A request costs the scheduler some hundred microseconds, whatever it carries. Where a row takes less, the scheduler
limits the job; with a thousand rows per request its cost is negligible. The rewrite keeps steps, workers and devices,
and makes blocks the items. It requires that every step is a plain batch node: nothing in the graph may depend on a
row's values.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weftline.engine.jobs.runners.packing import COLUMN
from weftline.engine.jobs.runners.rows_node import OUTCOME, SEEDS, HeavyRowsNode, RowsConfig, RowsNode
from weftline.errors import InputError
from weftline.fields import classes, default_of
from weftline.nodes.ports import Port, PortType
from weftline.pipelines.check.options import to_options
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.placement.budget import ARENA, OF_OTHERS
from weftline.pipelines.placement.chains import chains
from weftline.pipelines.placement.plan import DeviceBudget, Plan, PlannedInput, PlannedOutput, PlannedStep
from weftline.pipelines.spec.graph import Input, StepPolicy
from weftline.pipelines.spec.policy import BatchPolicy, Limits, Slo
from weftline.pipelines.spec.wire import Wire
from weftline.shm.spec import ITEM_BYTES

ROWS = 1024
"""Rows of a block of small values: the cost of a request is then below a microsecond per row."""

ROWS_MIN = 16
"""Fewest rows of a block, however large its values."""

BLOCK_BYTES = 32 << 20
"""Most bytes of one port's values in a block, estimated from types."""

ARENA_BYTES = 64 << 20
"""Least shared memory of each process: two blocks' values."""

OPEN_BYTES_MAX = 1 << 40
"""The pipeline's limits apply per row; whole blocks are limited by memory only."""

RUN_MAX_MS = 86_400_000.0
"""Longest run of a block in a step: a day."""

TYPICAL_BYTES: Mapping[str, int] = {"image": 1 << 20, "audio": 1 << 20, "tensor": 1 << 18}
"""Assumed size of values without a fixed size: an image of 640 x 480, 16 s of audio."""

PADS: Mapping[str, str] = {
    "weftline.nodes.embed:Embed": "text",
    "weftline.nodes.classify:Classify": "text",
}
"""Nodes that pad a batch to its longest item, and the input that determines the length."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A plan for blocks.

    plan:     its inputs and outputs are columns, and tensors of seeds.
    seeds:    name of the input with the rows' seeds.
    outcomes: by step in running order, the output with its rows_node.BlockOutcome.
    """

    plan: Plan
    seeds: str
    outcomes: Mapping[str, str]


def find_block_obstacle(plan: Plan, outputs: Collection[str] | None = None) -> str:
    """Return why the steps of these outputs (None: all) cannot run in blocks; '' if they can."""
    steps = required_steps(plan, outputs)
    if not steps:
        return "no step runs for these outputs"
    for step in steps:
        for hindrance, found in _hindrances(step).items():
            if found:
                return f"step {step.name} {hindrance}"
    stand_ins = {step.fallback for step in plan.steps}
    return next((f"step {step.name} is a fallback of another step" for step in steps if step.name in stand_ins), "")


def _hindrances(step: PlannedStep) -> Mapping[str, bool]:
    return {
        "is decided by the scheduler, row by row": bool(step.control),
        "streams": step.streams or bool(step.fed),
        "streams an input": any(given.pieces for given in step.inputs),
        "keeps state between requests": step.sequence is not None,
        "has a fallback": step.fallback is not None or step.absent_on_failure,
        "pads its inputs": bool(step.batch.pad),
        "is not idempotent": not step.idempotent,
        **{f"has `{key}`, which applies to single items": getattr(step, key) != usual for key, usual in _OF_ITEMS},
    }


_OF_ITEMS = [
    (one.name, default_of(one))
    for one in dataclasses.fields(StepPolicy)
    if (found := classes(StepPolicy)[one.name]) is not None and found.part == "graph"
]
"""Keys of a step that apply to single items, with their defaults."""


def required_steps(plan: Plan, outputs: Collection[str] | None = None) -> tuple[PlannedStep, ...]:
    """Return the steps that these outputs (None: all) require, in running order."""
    wanted = {one.wire.step for one in plan.outputs if outputs is None or one.name in outputs}
    found: list[PlannedStep] = []
    for step in reversed(plan.steps):
        if step.name in wanted:
            found.append(step)
            wires = [given.wire for given in step.inputs] + list(step.when.wires if step.when is not None else ())
            wanted |= {wire.step for wire in wires} | {step.fallback}
    return tuple(reversed(found))


def block_rows_of(plan: Plan, outputs: Collection[str] | None = None) -> int:
    """Return the rows of a block: as many as fit into BLOCK_BYTES, in whole batches where possible.

    A block that ends within a batch of a step leaves a small batch.
    """
    steps = required_steps(plan, outputs)
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
    """Return the plan that computes these outputs (None: all) for whole blocks.

    Requires that `find_block_obstacle` returns ''. Steps, workers, instances and devices are those of `plan`, without
    steps that these outputs do not require and without outputs that are inputs. block_rows: most rows of a block, by
    which run_max_ms is multiplied.
    """
    run = required_steps(plan, outputs)
    constants = {one.name: one for one in plan.inputs if one.hidden}
    read = dict.fromkeys(given.wire.port for step in run for given in step.inputs if given.wire.step is None)
    inputs = [Input(name, str(COLUMN)) for name in read if name not in constants]
    seeds = _free("seeds", read)
    outcomes = {step.name: _free("outcome", [port.name for port in step.outputs]) for step in run}
    at = _workers(run)
    limits = _limits(plan.limits)
    uses = Counter(given.wire for step in run for given in step.inputs)
    wanted = [
        PlannedOutput(one.name, one.wire, COLUMN)
        for one in plan.outputs
        if one.wire.step is not None and (outputs is None or one.name in outputs)
    ]
    uses.update(one.wire for one in wanted)
    steps = tuple(_step(step, constants, seeds, outcomes[step.name], at, uses, block_rows) for step in run)
    names = {step.name: f"{step.name}: {outcomes[step.name]}" for step in run}  # no output's name has a colon
    inputs.append(Input(seeds, str(SEEDS)))
    new = Plan(
        name=plan.name,
        inputs=tuple(inputs),
        input_types={one.name: PortType.parse(one.type) for one in inputs},
        input_readers={one.name: uses[Wire(None, one.name)] for one in inputs} | {seeds: len(run)},
        steps=steps,
        outputs=(*wanted, *(PlannedOutput(names[name], Wire(name, port), OUTCOME) for name, port in outcomes.items())),
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
    """Return the claims on each GPU in use, without arenas and removed steps."""
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
    outcome: str,
    at: Mapping[int, int],
    uses: Mapping[Wire, int],
    block_rows: int,
) -> PlannedStep:
    """Return the step that runs this one on blocks. at: new index by worker. uses: readers by wire."""
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
        inputs={
            given.port: known[given.port].type if given.port in known else str(given.type) for given in step.inputs
        },
        outputs={port.name: str(port.type) for port in step.outputs},
        optional=tuple(given.port for given in step.inputs if given.optional),
        fixed=fixed,
        absent=absent,
        unread=tuple(port.name for port in step.outputs if not uses.get(Wire(step.name, port.name))),
        rows_max=step.batch.items_max,
        same_shapes=step.batch.shapes == "same",
        by_length=PADS.get(step.node, ""),
        mutates=step.mutates_inputs,
        seeds=seeds_port,
        outcome=outcome,
    )
    columns = [PlannedInput(given.port, given.wire, COLUMN) for given in step.inputs if given.port not in known]
    node = HeavyRowsNode if step.heavy else RowsNode
    calls = math.ceil(block_rows / step.batch.items_max)
    return dataclasses.replace(
        step,
        node=f"{node.__module__}:{node.__name__}",
        options=to_options(config),
        request_options=(),  # those of the node that it runs are part of its own
        mixed_options=False,
        inputs=(*columns, PlannedInput(seeds_port, Wire(None, seeds), SEEDS)),
        outputs=(*(Port(port.name, COLUMN) for port in step.outputs), Port(outcome, OUTCOME)),
        readers={port.name: uses.get(Wire(step.name, port.name), 0) for port in step.outputs} | {outcome: 1},
        batch=BatchPolicy(order="arrival"),
        mutates_inputs=False,
        workers=tuple(at[old] for old in step.workers),
        run_max_ms=min(step.run_max_ms * calls, RUN_MAX_MS),
        conditional=False,
        reserved=0,
        device_inputs=(),  # columns are in host memory
        device_outputs={},
    )


def _workers(steps: Sequence[PlannedStep]) -> dict[int, int]:
    """Return the new index of each worker in use, in the old order."""
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
"""Equal rows produce equal bytes in every run, or numbers that may differ by rounding."""


def repeatable(plan: Plan, outputs: Sequence[str], shared: bool) -> dict[str, str]:
    """Return the reproducibility of each output.

    Batches shared with other requests and steps with continuous batching make numbers differ by rounding, and so does
    everything computed from them.
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


def row_inputs(plan: Plan) -> tuple[dict[str, PortType], set[str]]:
    """Return the types of a row's inputs, and the names of those that every row must have."""
    inputs = [one for one in plan.inputs if not one.hidden]
    types = {one.name: plan.input_types[one.name] for one in inputs}
    return types, {one.name for one in inputs if not one.may_be_left_out}


def check_outputs(plan: Plan, outputs: Sequence[str]) -> None:
    """Raise InputError when the pipeline lacks one of these outputs."""
    known = [one.name for one in plan.outputs]
    unknown = [name for name in outputs if name not in known]
    if unknown or not outputs:
        hints = [hint for name in unknown if (hint := did_you_mean(name, known))]
        found = f"no output is named {listed(unknown)}; outputs: {listed(known)}"
        raise InputError(found + (f"\n    fix: {hints[0]}" if hints else ""))
