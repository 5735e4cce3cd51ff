"""What was measured of each GPU's memory when everything on it was open, and what is left of it.

The plan counts with what was stated, assumed, or measured before; a worker measures what its steps really take. When
all workers of a device are ready for the first time, that is added up. Steps whose KV memory the plan left open may
have what is then left, but for the reserve; when nothing is left, not even the reserve, the pipeline does not open, and
says who took what.

A worker knows what it takes itself, and what its device has left, whoever takes the rest: contexts, and processes that
are none of ours. On a made-up GPU every process sees its own part only. Other pipelines of this process hold what they
claimed, whether they have taken it yet or not. What counts is whichever leaves less (`Holdings.settle`). What is left
is divided with those of them that are yet to be measured; then it is known later. Pure; owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine import messages as msg
from weftline.pipelines.budget import (
    ARENA,
    CONTEXT,
    RESERVE,
    WORK,
    claims_of_others,
    over_commit_text,
    ways_of_others,
)
from weftline.pipelines.holdings import Left, Settle, alone
from weftline.pipelines.plan import Claim, DeviceBudget, Plan

OTHERS = "contexts and other processes"
"""Who takes what no worker of ours has counted as its own."""

FIX = "\n    fix: move steps to another device, or lower their batch.items_max, gpu.arena_bytes or limits.kv_bytes"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a worker said of its device when it was ready; fields as in Ready."""

    uses: Mapping[str, msg.DeviceUse]
    device_bytes: int
    device_free: int


class DeviceMemory:
    """The measured memory of a plan's GPUs.

    left:   is told, once for each device, how many bytes it has left when everything on it is open.
    settle: says how many these are, beside what other pipelines hold; None: there are none.
    """

    def __init__(self, plan: Plan, left: Callable[[str, int], None], settle: Settle | None = None) -> None:
        self._plan = plan
        self._left = left
        self._settle = settle or alone(plan)
        self._measured: dict[int, Measured] = {}
        self._open: dict[str, set[int]] = {}  # by device, the workers that have not been ready yet
        self._left_bytes: dict[str, int] = {}
        self._over: list[str] = []
        for worker, planned in enumerate(plan.workers):
            if planned.device:
                self._open.setdefault(planned.device, set()).add(worker)

    def ready(self, worker: int, message: msg.Ready) -> None:
        """A worker is ready; what it says replaces what it said before it was started again."""
        device = self._plan.workers[worker].device
        if not device:
            return
        self._measured[worker] = Measured(message.device_use, message.device_bytes, message.device_free)
        waiting = self._open[device]
        waiting.discard(worker)
        if not waiting and device not in self._left_bytes:
            self._add_up(device)

    @property
    def over_commit(self) -> str:
        """What to say of devices that are too small for what is open on them; '' when all are large enough."""
        return "\n".join(self._over)

    def stats(self) -> Mapping[str, Any]:
        """Return what each device has and had left, and what its workers and steps take, in bytes."""
        return {
            budget.device: {
                "total_bytes": budget.total_bytes,
                "reserve_bytes": _reserve(budget),
                "left_bytes": self._left_bytes.get(budget.device, 0),
                "workers": {
                    self._plan.workers[worker].name: one.device_bytes for worker, one in self._of(budget.device)
                },
                "steps": self._steps(budget.device),
            }
            for budget in self._plan.budgets
        }

    def _steps(self, device: str) -> dict[str, dict[str, int]]:
        """Return what an instance of each step takes, by the largest of them."""
        found: dict[str, dict[str, int]] = {}
        for _, one in self._of(device):
            for step, use in one.uses.items():
                known = found.setdefault(step, {"open_bytes": 0, "peak_bytes": 0})
                known["open_bytes"] = max(known["open_bytes"], use.open_bytes)
                known["peak_bytes"] = max(known["peak_bytes"], use.peak_bytes)
        return found

    def _add_up(self, device: str) -> None:
        budget = next((one for one in self._plan.budgets if one.device == device), None)
        if budget is None or all(one.device_free == 0 for _, one in self._of(device)):
            return  # nothing was measured: no driver answered
        taken = sum(one.device_bytes for _, one in self._of(device))
        free = min(one.device_free for _, one in self._of(device) if one.device_free)
        left = self._settle(device, taken, free)
        self._left_bytes[device] = 0 if left.waits else max(0, left.bytes)
        if left.bytes < 0:
            claims = self._claims(budget, left, budget.total_bytes - free - taken)
            fix = "; ".join([FIX, *ways_of_others(claims)])
            self._over.append(over_commit_text(device, budget.total_bytes, claims) + fix)
            return
        if not left.waits:
            self._left(device, left.bytes)

    def divided(self, device: str, bytes: int) -> None:
        """Everything that anybody holds of a device is open now, and so many bytes of what is left are this plan's."""
        self._left_bytes[device] = bytes
        self._left(device, bytes)

    def _claims(self, budget: DeviceBudget, left: Left, elsewhere: int) -> list[Claim]:
        """Return who took what. elsewhere: bytes of the device that this plan's workers have not counted as theirs."""
        held = sum(other.bytes for other in left.others)
        claims = claims_of_others(left.others, left.reserve_bytes - _reserve(budget))
        claims.append(Claim("", RESERVE, _reserve(budget), "stated"))
        claims.append(Claim(OTHERS, CONTEXT, max(0, elsewhere - held), "measured"))
        for worker, one in self._of(budget.device):
            planned = self._plan.workers[worker]
            claims.append(Claim(planned.name, ARENA, planned.device_arena_bytes, "stated"))
            claims += [Claim(step, WORK, use.peak_bytes, "measured") for step, use in one.uses.items()]
            rest = one.device_bytes - planned.device_arena_bytes - sum(use.peak_bytes for use in one.uses.values())
            claims.append(Claim(planned.name, WORK, max(0, rest), "measured"))
        return [claim for claim in claims if claim.bytes]

    def _of(self, device: str) -> list[tuple[int, Measured]]:
        return [(at, one) for at, one in sorted(self._measured.items()) if self._plan.workers[at].device == device]


def _reserve(budget: DeviceBudget) -> int:
    return sum(claim.bytes for claim in budget.claims if claim.what == RESERVE)
