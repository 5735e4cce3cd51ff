"""Selection of the steps of a worker that run in threads of their own.

Steps of one GPU that share a process compute beside each other: each chain of steps, and each step outside of one, has
a thread and a stream of its own. Steps on the CPU share one thread: they would only compete for the worker's cores. A
worker with a streaming step, or with the step that is debugged, has one thread for everything.
"""

from __future__ import annotations

from collections.abc import Mapping

from weftline.pipelines.placement.plan import Plan
from weftline.shm.device.names import is_gpu

ALONE: Mapping[int, int] = {}


def step_threads(plan: Plan, worker: int) -> Mapping[int, int]:
    """Return the thread, from 1, of each step of a worker by its index; empty where one thread runs them all."""
    held = [index for index, step in enumerate(plan.steps) if worker in step.workers]
    if any(plan.steps[index].streams or plan.steps[index].name == plan.debug for index in held):
        return ALONE
    head = {index: chain[0] for chain in plan.chains for index in chain}
    on_gpu = {index: is_gpu(_device(plan, index, worker)) for index in held}
    beside = {head.get(index, index) for index in held if on_gpu[index]}  # a chain is where one of its steps is
    keys = [head.get(index, index) if head.get(index, index) in beside else -1 for index in held]
    numbers = {key: at for at, key in enumerate(dict.fromkeys(keys), 1)}
    return ALONE if len(numbers) < 2 else {index: numbers[key] for index, key in zip(held, keys, strict=True)}


def _device(plan: Plan, index: int, worker: int) -> str:
    step = plan.steps[index]
    return step.devices[step.workers.index(worker)] if step.devices else step.device
