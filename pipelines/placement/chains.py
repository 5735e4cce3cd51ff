"""Chains: steps of one worker that pass values directly inside it.

A chain starts with a step of any batch policy, and takes in the steps of the same worker that need nothing but the
pipeline's inputs and what the chain already gives. A step that could gain from a queue of its own (a wait for company,
equal shapes), and one that may be skipped, tried again or answered for by another, is left out of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.spec.graph import Input


def chains(steps: Sequence[PlannedStep], inputs: Sequence[Input]) -> tuple[tuple[int, ...], ...]:
    """Return the chains of these steps, as indexes in running order; a step is in at most one.

    steps: in running order.
    """
    present = {one.name for one in inputs if not one.optional or one.default is not None}
    stand_ins = {step.fallback for step in steps}
    apart = {index for index, step in enumerate(steps) if step.name in stand_ins or not _is_simple(step)}
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
    """Return True when an item at this step is only ever run, once, in its worker."""
    special = (step.when, step.fallback, step.retry, step.timeout_ms, step.sequence)
    never = step.streams or step.control or step.map or step.conditional or step.batch.pad
    return bool(step.workers) and not never and all(one is None for one in special)


def _needs_no_queue(step: PlannedStep) -> bool:
    """Return True when a step gains nothing from a batch of its own."""
    return step.batch.wait == "fixed" and not step.batch.wait_max_ms and step.batch.shapes == "any"
