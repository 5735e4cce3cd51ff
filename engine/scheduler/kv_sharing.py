"""KV memory that llm steps share on a device: reports in, resize messages out.

Workers report with their heartbeats, once a second. The plan decides which steps share and the least of each:
`limits.kv_bytes` names the device, the step's own `kv_bytes` its least. Where the plan left it open, because the memory
of everything else on a GPU was unknown, steps share what is left once all of it is open, and their least is what they
opened with. A step that is alone there took everything that was left when it opened.

A sleeping step holds no KV memory; its least stays reserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.kv_budget import KvBudget, KvUse, Part
from weftline.engine.scheduler.state import KvAccounts, SchedulerState
from weftline.pipelines.placement.budget import own_kv_bytes, shares
from weftline.pipelines.placement.plan import Plan, PlannedStep

MOVING_SHARE = 16
"""This part of what is left is not given out: layers change their size one after the other, and the one at it lies
there twice. A model of fewer layers than this is a small one."""


def make_accounts(plan: Plan) -> KvAccounts:
    """Return the KV accounts of a plan, without any report."""
    accounts = KvAccounts()
    for device, total_bytes in plan.limits.kv_bytes.items():
        least = {
            (worker_id, index): step.options["kv_bytes"]
            for index, step in enumerate(plan.steps)
            if shares(step)
            for worker_id, own in zip(step.workers, step.devices)
            if own == device
        }
        if least:
            accounts.budgets[device] = KvBudget(total_bytes, least)
            accounts.devices |= dict.fromkeys(least, device)
    for budget in plan.budgets:
        if not (budget.kv_bytes or budget.rest_bytes) and budget.device not in accounts.budgets:
            parts = dict.fromkeys(_unstated(plan.steps, budget.device), 0)
            if parts:
                accounts.undivided[budget.device] = parts
    return accounts


def on_device_left(state: SchedulerState, device: str, bytes: int) -> None:
    """Record the bytes left of a device when everything on it is open; open its budget if all parts reported."""
    if device in state.kv.undivided:
        state.kv.left[device] = max(0, bytes)
        _divide(state, device)


def on_report(state: SchedulerState, worker_id: int, reports: tuple[msg.KvReport, ...]) -> None:
    """Update the budgets with a worker's KV use, and send resizes."""
    for one in reports:
        part = worker_id, one.step
        if part in state.kv.asleep:
            continue
        for undivided, parts in list(state.kv.undivided.items()):
            if parts.get(part) == 0:
                parts[part] = one.used_bytes + one.idle_bytes + one.free_bytes
                _divide(state, undivided)
        device = state.kv.devices.get(part)
        if device is not None:
            kinds = one.used_bytes, one.idle_bytes, one.free_bytes
            use = KvUse(*kinds, one.waiting, one.preempted, one.wanted_bytes)
            state.kv.budgets[device].reported(part, use, state.now_ms)
            _decide(state, device)


def on_resized(state: SchedulerState, worker_id: int, step: int, bytes: int) -> None:
    """Confirm a resize; ValueError when it was not requested, or is larger than allowed."""
    device = state.kv.devices.get((worker_id, step))
    if device is None:
        raise ValueError("it resized the KV memory of a step that has no KV budget")
    state.kv.budgets[device].confirmed((worker_id, step), bytes)
    _decide(state, device)


def on_death(state: SchedulerState, worker_id: int) -> None:
    """Release what a dead worker's steps held. Others are resized after their next report."""
    state.kv.asleep = {part for part in state.kv.asleep if part[0] != worker_id}
    for part, device in state.kv.devices.items():
        if part[0] == worker_id:
            state.kv.budgets[device].died(part)


def on_dismissed(state: SchedulerState, worker_id: int) -> None:
    """Ignore the reports of a worker that ends for good; it holds its memory until its process has ended."""
    for step in state.steps_of[worker_id]:
        on_falling_asleep(state, worker_id, step)


def on_retired(state: SchedulerState, worker_id: int) -> dict[str, int]:
    """Remove the parts of a worker that has ended for good; its KV memory is for the others on the device.

    Return, by device, the bytes of those that took them from the remainder when they opened.
    """
    left: dict[str, int] = {}
    for part, device in [(part, device) for part, device in state.kv.devices.items() if part[0] == worker_id]:
        del state.kv.devices[part]
        bytes = state.kv.budgets[device].remove(part)
        if not own_kv_bytes(state.deployments[part[1]]):
            left[device] = left.get(device, 0) + bytes
        if device not in state.kv.devices.values():
            del state.kv.budgets[device]
    for device, parts in list(state.kv.undivided.items()):
        for part in [part for part in parts if part[0] == worker_id]:
            del parts[part]
        if parts:
            _divide(state, device)
        else:
            del state.kv.undivided[device]
    return left


def on_falling_asleep(state: SchedulerState, worker_id: int, step: int) -> None:
    """Ignore the reports of a step that falls asleep."""
    part = worker_id, step
    state.kv.asleep.add(part)
    if part in state.kv.devices:
        state.kv.budgets[state.kv.devices[part]].rests(part)


def on_asleep(state: SchedulerState, worker_id: int, step: int) -> None:
    """Release what a step held before it slept."""
    part = worker_id, step
    if part in state.kv.devices:
        state.kv.budgets[state.kv.devices[part]].died(part)


def on_awake(state: SchedulerState, worker_id: int, step: int) -> None:
    """Accept reports of a step that is awake again, with its least."""
    state.kv.asleep.discard((worker_id, step))


def stats(state: SchedulerState) -> Mapping[str, Any]:
    """Return each budget in bytes: total, unassigned, and what each part holds and uses."""
    return {
        device: {
            "total_bytes": budget.total_bytes,
            "unassigned_bytes": budget.unassigned,
            "held_bytes": {_name(state, part): held for part, held in budget.held.items()},
            "used_bytes": {_name(state, part): used for part, used in budget.used.items()},
        }
        for device, budget in state.kv.budgets.items()
    }


def _unstated(steps: Sequence[PlannedStep], device: str) -> list[Part]:
    return [
        (worker_id, index)
        for index, step in enumerate(steps)
        if shares(step) and not step.options["kv_bytes"]
        for worker_id, own in zip(step.workers, step.devices)
        if own == device
    ]


def _divide(state: SchedulerState, device: str) -> None:
    """Open a device's budget once it is known what is left and what every part has."""
    parts = state.kv.undivided[device]
    if device in state.kv.left and all(parts.values()):
        left = state.kv.left[device]
        state.kv.budgets[device] = KvBudget(sum(parts.values()) + left - left // MOVING_SHARE, parts)
        state.kv.devices |= dict.fromkeys(parts, device)
        del state.kv.undivided[device]


def _decide(state: SchedulerState, device: str) -> None:
    for order in state.kv.budgets[device].decide(state.now_ms):
        worker_id, step = order.part
        state.out.append(ev.Send(worker_id, msg.KvResize(step, order.bytes)))


def _name(state: SchedulerState, part: Part) -> str:
    """Return the step's name, with its worker's where that is another."""
    step, name = state.deployments[part[1]].name, state.deployed.workers[part[0]].name
    return step if step == name else f"{step} in {name}"
