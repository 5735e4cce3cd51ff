"""Measured device memory: check it against the plan, and divide the remainder among llm steps.

The plan uses stated, assumed or earlier measured sizes. A worker measures the use of its steps. When all workers of a
device have been ready once, their measurements are summed. Steps without a planned KV size share the remainder after
the reserve. When less than the reserve remains the pipeline does not open, and the error lists every use.

A worker reports its own use and the free memory of its device, which includes the use of contexts and other processes.
On a fake GPU every process sees only its own use. Other pipelines of this process hold their reservations, used or not.
The smaller result counts (`ReservationTable.settle`). The remainder is shared with pipelines that are not measured yet;
it is then set later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import kv_sharing
from weftline.engine.scheduler.state import MeasuredMemory, SchedulerState
from weftline.pipelines.placement.budget import (
    ARENA,
    CONTEXT,
    OF_OTHERS,
    RESERVE,
    WORK,
    claims_of_others,
    over_commit_text,
    remedies_of_others,
)
from weftline.pipelines.placement.plan import Claim, DeviceBudget, Plan
from weftline.pipelines.placement.reservations import Left, Settle, alone

OTHERS = "contexts and other processes"
"""Name of device memory that no worker of this process has counted."""

FIX = "\n    fix: move steps to another device, or lower their batch.items_max, gpu.arena_bytes or limits.kv_bytes"


@dataclass(frozen=True, slots=True)
class Measured:
    """Device memory measured by a worker; fields as in Ready."""

    uses: Mapping[str, msg.DeviceUse]
    device_bytes: int
    device_free: int


def make_measured(plan: Plan, settle: Settle | None) -> MeasuredMemory:
    """Return the memory measurements of a plan, none of them made. settle: None: no other pipeline uses its GPUs."""
    measured = MeasuredMemory(settle or alone(plan))
    for worker_id, planned in enumerate(plan.workers):
        if planned.device:
            measured.awaited.setdefault(planned.device, set()).add(worker_id)
    return measured


def on_ready(state: SchedulerState, worker_id: int, message: msg.Ready) -> None:
    """Record a worker's measurements; they replace those of its earlier incarnations."""
    device = state.deployed.workers[worker_id].device
    if not device:
        return
    state.measured.by_worker[worker_id] = Measured(message.device_use, message.device_bytes, message.device_free)
    _await_no_longer(state, worker_id, device)


def forget_worker(state: SchedulerState, worker_id: int) -> None:
    """Drop the measurements of a worker that ends for good, and wait for it no longer."""
    state.measured.by_worker.pop(worker_id, None)
    state.measured.ending.add(worker_id)
    device = state.deployed.workers[worker_id].device
    if device:
        _await_no_longer(state, worker_id, device)


def return_ended(state: SchedulerState) -> None:
    """Release the memory of workers that ended for good: their processes and their arenas are gone."""
    ended = [one for one in sorted(state.measured.ending) if _is_gone(state, one)]
    if not ended:
        return
    state.measured.ending.difference_update(ended)
    state.measured.ended.update(ended)
    left = Counter[str]()
    for worker_id in ended:
        left.update(kv_sharing.on_retired(state, worker_id))
    if not any(state.deployed.workers[worker_id].device for worker_id in ended):
        return
    taken = {
        budget.device: sum(one.device_bytes for _, one in _of(state, budget.device))
        for budget in state.deployed.budgets
    }
    state.out.append(ev.ReturnMemory(tuple(sorted(state.measured.ended)), taken, dict(left)))


def _is_gone(state: SchedulerState, worker_id: int) -> bool:
    worker = state.workers[worker_id]
    return not worker.alive and worker.device_arena not in state.ledger.retired


def stats(state: SchedulerState) -> Mapping[str, Any]:
    """Return the memory statistics of each device: total, remainder, workers, arenas and steps, in bytes.

    claims: reservations of the plan, as (step or worker, purpose, bytes), without those of workers that ended.
    """
    ended = {state.deployed.workers[worker_id].name for worker_id in state.measured.ended}
    return {
        budget.device: {
            "total_bytes": budget.total_bytes,
            "reserve_bytes": _reserve(budget),
            "left_bytes": state.measured.left_bytes.get(budget.device, 0),
            "workers": {
                state.deployed.workers[worker_id].name: one.device_bytes for worker_id, one in _of(state, budget.device)
            },
            "arenas": {
                state.deployed.workers[worker_id].name: state.deployed.workers[worker_id].device_arena_bytes
                for worker_id, _ in _of(state, budget.device)
            },
            "claims": [
                (claim.owner, claim.what, claim.bytes)
                for claim in budget.claims
                if claim.what not in OF_OTHERS and claim.worker not in ended
            ],
            "steps": _steps(state, budget.device),
        }
        for budget in state.deployed.budgets
    }


def _steps(state: SchedulerState, device: str) -> dict[str, dict[str, int]]:
    """Return the device memory of each step: the maximum of its instances."""
    found: dict[str, dict[str, int]] = {}
    for _, one in _of(state, device):
        for step, use in one.uses.items():
            known = found.setdefault(step, {"open_bytes": 0, "peak_bytes": 0})
            known["open_bytes"] = max(known["open_bytes"], use.open_bytes)
            known["peak_bytes"] = max(known["peak_bytes"], use.peak_bytes)
    return found


def _await_no_longer(state: SchedulerState, worker_id: int, device: str) -> None:
    waiting = state.measured.awaited[device]
    waiting.discard(worker_id)
    if not waiting and device not in state.measured.left_bytes and _of(state, device):
        _settle_device(state, device)


def _settle_device(state: SchedulerState, device: str) -> None:
    budget = next((one for one in state.deployed.budgets if one.device == device), None)
    if budget is None or all(one.device_free == 0 for _, one in _of(state, device)):
        return  # nothing was measured: no driver answered
    taken = sum(one.device_bytes for _, one in _of(state, device))
    free = min(one.device_free for _, one in _of(state, device) if one.device_free)
    left = state.measured.settle(device, taken, free)
    state.measured.left_bytes[device] = 0 if left.waits else max(0, left.bytes)
    if left.bytes < 0:
        claims = _claims(state, budget, left, budget.total_bytes - free - taken)
        fix = "; ".join([FIX, *remedies_of_others(claims)])
        state.measured.over_commit.append(over_commit_text(device, budget.total_bytes, claims) + fix)
        return
    if not left.waits:
        kv_sharing.on_device_left(state, device, left.bytes)


def on_divided(state: SchedulerState, device: str, bytes: int) -> None:
    """Set this plan's share of the remainder of a device, once every pipeline on it is measured."""
    state.measured.left_bytes[device] = bytes
    kv_sharing.on_device_left(state, device, bytes)


def _claims(state: SchedulerState, budget: DeviceBudget, left: Left, elsewhere: int) -> list[Claim]:
    """Return the claims on a device. elsewhere: its used bytes that this plan's workers have not counted."""
    held = sum(other.bytes for other in left.others)
    claims = claims_of_others(left.others, left.reserve_bytes - _reserve(budget))
    claims.append(Claim("", RESERVE, _reserve(budget), "stated"))
    claims.append(Claim(OTHERS, CONTEXT, max(0, elsewhere - held), "measured"))
    for worker_id, one in _of(state, budget.device):
        planned = state.deployed.workers[worker_id]
        claims.append(Claim(planned.name, ARENA, planned.device_arena_bytes, "stated"))
        claims += [Claim(step, WORK, use.peak_bytes, "measured") for step, use in one.uses.items()]
        rest = one.device_bytes - planned.device_arena_bytes - sum(use.peak_bytes for use in one.uses.values())
        claims.append(Claim(planned.name, WORK, max(0, rest), "measured"))
    return [claim for claim in claims if claim.bytes]


def _of(state: SchedulerState, device: str) -> list[tuple[int, Measured]]:
    return [
        (at, one) for at, one in sorted(state.measured.by_worker.items()) if state.deployed.workers[at].device == device
    ]


def _reserve(budget: DeviceBudget) -> int:
    return sum(claim.bytes for claim in budget.claims if claim.what == RESERVE)
