"""Check that each step's model fits into the machine's memory, by what its files state."""

from __future__ import annotations

from collections.abc import Iterator

from weftline.errors import Problem
from weftline.nodes.contract import StepContext
from weftline.pipelines.check.checked import Checked
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.shm.device.names import is_fake, is_gpu


def oversized(checked: Checked, plan: Plan, machine: Machine) -> Iterator[Problem]:
    """Yield a problem for each step whose model takes more than the machine's memory, swap included.

    A step on a GPU may keep its weights on all GPUs too. Models are counted alone: the lower bounds of several are no
    reason to refuse a pipeline.
    """
    for step in plan.steps:
        one = checked.steps[step.name]
        if step.control:
            continue
        needs = one.node.model_bytes(one.config, StepContext(one.step.base_dir or checked.pipeline.base_dir))
        limit, where = _memory_of(step, machine)
        if needs > limit:
            found = f"the model takes at least {size_text(needs)} of memory, by the sizes in its files"
            fix = "name a smaller model, or a machine with more memory; `check --file-only` checks without a machine"
            yield Problem(f"steps.{step.name}.model", found, f"at most {size_text(limit)}, {where}", fix)


def _memory_of(step: PlannedStep, machine: Machine) -> tuple[int, str]:
    host = machine.memory_bytes + machine.swap_bytes
    if any(is_gpu(one) and not is_fake(one) for one in step.devices or (step.device,)):
        return host + sum(one.memory_bytes for one in machine.devices), "the memory of this machine and its GPUs"
    return host, "the memory of this machine"
