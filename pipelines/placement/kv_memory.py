"""Initial KV cache size of each llm step that shares a device.

`limits.kv_bytes` gives a device so many bytes for all its llm steps together. A step's own `kv_bytes` is then its
least: what it starts with, and always keeps. Steps that name none divide half of what the others leave; the other half
goes where it is needed while the pipeline runs (`weftline.engine.scheduler.kv_budget`). Without such a limit, a GPU
whose other claims are all known gives its llm steps what is left of it; and where one llm step is all that is not
known, it finds out what is left when it opens (`weftline.engine.llm.kv_sizing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from weftline.errors import Problem
from weftline.pipelines.placement.needs import has_kv_memory
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.plan import DeviceBudget, Plan, PlannedStep

LEAST_BYTES = 64 << 10
"""Less than this is a slip: it holds a token or two of the smallest model."""

START_SHARE = 0.5
"""How much of a device's bytes steps start with when they do not say; the rest is given to those that need it."""


def shares(step: PlannedStep) -> bool:
    """Return True when a node's KV cache can share a budget: all of it is on one device."""
    return has_kv_memory(step.streams, step.options) and step.options.get("ranks") in (None, 1)


def takes_rest(step: PlannedStep, budget: DeviceBudget) -> bool:
    """Return whether a step takes what is left of a GPU when it opens."""
    return budget.rest_bytes > 0 and shares(step) and not own_kv_bytes(step) and budget.device in step.devices


def kv_most(plan: Plan, step: PlannedStep, device: str) -> int:
    """Return the most KV memory that an instance of a step may be given while it runs; 0: no more than it starts with.

    That is all that its device's llm steps share but for what the others start with; of a GPU of which it is not known
    yet what is left, it is what is not claimed.
    """
    if not shares(step):
        return 0
    total = kv_limits(plan).get(device)
    if total is not None:
        return max(0, total - _given(plan.steps, device) + own_kv_bytes(step))
    budget = next((one for one in plan.budgets if one.device == device), None)
    if budget is None or budget.rest_bytes or own_kv_bytes(step):
        return 0
    return max(0, budget.total_bytes - budget.claimed_bytes)


def least_left(takers: int) -> int:
    """Return the least that is to be left of a GPU for so many instances that name no KV memory of their own."""
    return LEAST_BYTES if takers == 1 else int(takers * LEAST_BYTES / START_SHARE)


def with_kv_memory(plan: Plan) -> tuple[Plan, list[Problem]]:
    """Return the plan with what each step starts with, and each device whose stated bytes are too few, without lines.

    Where the budgets know what is left of a GPU, its llm steps share that as if the pipeline had said so; whether it
    is enough, the budgets say (`least_left`).
    """
    limits = kv_limits(plan)
    left = {
        budget.device: budget.kv_bytes + _given(plan.steps, budget.device)
        for budget in plan.budgets
        if budget.kv_bytes and budget.device not in limits
    }
    shared = limits | left
    steps = [step for step in plan.steps if shares(step)] if shared else []
    starts: dict[str, int] = {}
    problems: list[Problem] = []
    for device, total in shared.items():
        given = _given(steps, device)
        free = {
            step.name: step.devices.count(device) for step in steps if device in step.devices and not own_kv_bytes(step)
        }
        part = 1.0 if device in left and sum(free.values()) == 1 else START_SHARE
        share = int((total - given) * part / max(1, sum(free.values())))
        if device in limits and (given > total or (free and share < LEAST_BYTES)):
            problems.append(_too_few(device, total, given, sum(free.values())))
        starts |= {name: min(share, starts.get(name, share)) for name in free}
    changed = (
        dataclasses.replace(step, options=_with(step.options, starts[step.name])) if step.name in starts else step
        for step in plan.steps
    )
    limited = dataclasses.replace(plan.limits, kv_bytes=shared)
    used = {device for step in plan.steps if shares(step) for device in step.devices}
    idle = tuple(f"limits.kv_bytes.{one} changes nothing: no llm step is on {one}" for one in limits if one not in used)
    return dataclasses.replace(plan, steps=tuple(changed), limits=limited, notes=(*plan.notes, *idle)), problems


def kv_limits(plan: Plan) -> dict[str, int]:
    """Return what `limits.kv_bytes` gives each device, by its full name."""
    return {"cuda:0" if device == "cuda" else device: total for device, total in plan.limits.kv_bytes.items()}


def own_kv_bytes(step: PlannedStep) -> int:
    """Return the KV memory that a step names as its own; 0 when it names none."""
    return int(step.options["kv_bytes"] or 0)


def _given(steps: Sequence[PlannedStep], device: str) -> int:
    return sum(own_kv_bytes(step) * step.devices.count(device) for step in steps if shares(step))


def _with(options: Mapping[str, Any], kv_bytes: int) -> dict[str, Any]:
    return {**options, "kv_bytes": kv_bytes}


def _too_few(device: str, total: int, given: int, free: int) -> Problem:
    path = f"limits.kv_bytes.{device}"
    if given > total:
        found = f"{size_text(total)}, and the llm steps there name {size_text(given)} as their own kv_bytes"
        return Problem(path, found, f"at least {given}", "give the device more, or the steps less")
    found = f"{size_text(total)}, too few for the llm steps that are to share it"
    return Problem(path, found, f"at least {given + int(free * LEAST_BYTES / START_SHARE)}", "give the device more")
