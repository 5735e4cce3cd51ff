"""Execution inside a worker: chains of steps that pass values directly, and the steps that run in threads of their own.

A chain starts with a step of any batch policy, followed by steps of the same worker that read only pipeline inputs and
outputs of the chain. A step that may gain from its own queue (a batching wait, equal shapes) is not part of a chain,
and neither is a step that may be skipped, retried or replaced by a fallback.

Steps of one GPU that share a process run concurrently: each chain, and each step outside of one, has a thread and a
stream of its own. Steps on the CPU share one thread, because they would only compete for the worker's cores. A worker
with a streaming step, or with the debugged step, has one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.spec.graph import Input
from weftline.shm.device.names import is_gpu


def chains(steps: Sequence[PlannedStep], inputs: Sequence[Input]) -> tuple[tuple[int, ...], ...]:
    """Return the chains of steps, as indexes in running order; a step is in at most one.

    steps: in running order.
    """
    present = {one.name for one in inputs if not one.optional or one.default is not None}
    fallbacks = {step.fallback for step in steps}
    apart = {index for index, step in enumerate(steps) if step.name in fallbacks or not _is_simple(step)}
    found: list[tuple[int, ...]] = []
    for head in range(len(steps)):
        if head not in apart:
            chain = _from(head, steps, present, apart)
            if len(chain) > 1:
                found.append(chain)
                apart |= {*chain}
    return tuple(found)


def _from(head: int, steps: Sequence[PlannedStep], present: Collection[str], apart: Collection[int]) -> tuple[int, ...]:
    """Return the longest chain that starts with `head`."""
    chain, names = [head], {steps[head].name}
    for index in range(head + 1, len(steps)):
        step = steps[index]
        if index in apart or step.workers != steps[head].workers or not _needs_no_queue(step):
            continue
        sources = [read.wire for read in step.inputs]
        inside = [wire.step in names if wire.step else wire.port in present for wire in sources]
        if all(inside) and any(wire.step for wire in sources):
            chain.append(index)
            names.add(step.name)
    return tuple(chain)


def _is_simple(step: PlannedStep) -> bool:
    """Return True when an item of this step always runs exactly once, in its worker."""
    special = (step.when, step.fallback, step.absent_on_failure or None, step.retry, step.timeout_ms, step.sequence)
    never = step.streams or step.control or step.map or step.conditional or step.batch.pad
    return bool(step.workers) and not never and all(one is None for one in special)


def _needs_no_queue(step: PlannedStep) -> bool:
    """Return True when a step does not gain from a batch of its own."""
    return step.batch.wait == "fixed" and not step.batch.wait_max_ms and step.batch.shapes == "any"


ALONE: Mapping[int, int] = {}


def step_threads(plan: Plan, worker: int) -> Mapping[int, int]:
    """Return the thread, from 1, of each step of a worker by its index; empty where one thread runs them all."""
    held = [index for index, step in enumerate(plan.steps) if worker in step.workers]
    if any(plan.steps[index].streams or plan.steps[index].name == plan.debug for index in held):
        return ALONE
    head = {index: chain[0] for chain in plan.chains for index in chain}
    on_gpu = {index: is_gpu(_device(plan, index, worker)) for index in held}
    beside = {
        head.get(index, index) for index in held if on_gpu[index]
    }  # the device of a chain is that of one of its steps
    keys = [head.get(index, index) if head.get(index, index) in beside else -1 for index in held]
    numbers = {key: at for at, key in enumerate(dict.fromkeys(keys), 1)}
    return ALONE if len(numbers) < 2 else {index: numbers[key] for index, key in zip(held, keys, strict=True)}


def _device(plan: Plan, index: int, worker: int) -> str:
    step = plan.steps[index]
    return step.devices[step.workers.index(worker)] if step.devices else step.device
