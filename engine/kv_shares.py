"""The KV memory that llm steps share, device by device: what workers say about it, and what they are told.

Reports come with a worker's beats, once a second, so memory moves at that pace. Which steps share, and the least of
each, was settled by the plan: `limits.kv_bytes` has the device, and the step's own `kv_bytes` is its least. Pure; owned
by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.kv_budget import KvBudget, KvUse, Part
from weftline.pipelines.kv_memory import shares
from weftline.pipelines.plan import Plan


class KvShares:
    """Every device's budget, and which of them a part belongs to."""

    def __init__(self, plan: Plan, emit: Callable[[ev.Command], None]) -> None:
        self._steps = plan.steps
        self._workers = plan.workers
        self._emit = emit
        self._budgets: dict[str, KvBudget] = {}
        self._devices: dict[Part, str] = {}
        for device, total_bytes in plan.limits.kv_bytes.items():
            least = {
                (worker, index): step.options["kv_bytes"]
                for index, step in enumerate(plan.steps)
                if shares(step)
                for worker, own in zip(step.workers, step.devices)
                if own == device
            }
            if least:
                self._budgets[device] = KvBudget(total_bytes, least)
                self._devices |= dict.fromkeys(least, device)

    def reported(self, worker: int, reports: tuple[msg.KvReport, ...], now_ms: float) -> None:
        """Take in what a worker's steps use, and tell those that are to have more or less."""
        for one in reports:
            device = self._devices.get((worker, one.step))
            if device is not None:
                use = KvUse(one.used_bytes, one.idle_bytes, one.free_bytes, one.waiting, one.preempted)
                self._budgets[device].reported((worker, one.step), use, now_ms)
                self._decide(device, now_ms)

    def resized(self, worker: int, step: int, bytes: int, now_ms: float) -> None:
        """A step has changed its size; ValueError when it was not told to, or holds more than it may."""
        device = self._devices.get((worker, step))
        if device is None:
            raise ValueError("it changed the KV memory of a step that shares none")
        self._budgets[device].confirmed((worker, step), bytes)
        self._decide(device, now_ms)

    def died(self, worker: int) -> None:
        """A worker is gone, and what its steps held with it. Others are told when they next report."""
        for part, device in self._devices.items():
            if part[0] == worker:
                self._budgets[device].died(part)

    def stats(self) -> Mapping[str, Any]:
        """Return each shared device's bytes: all, those that nobody has, and what each instance may hold and uses."""
        return {
            device: {
                "total_bytes": budget.total_bytes,
                "unassigned_bytes": budget.unassigned,
                "held_bytes": {self._name(part): held for part, held in budget.held.items()},
                "used_bytes": {self._name(part): used for part, used in budget.used.items()},
            }
            for device, budget in self._budgets.items()
        }

    def _decide(self, device: str, now_ms: float) -> None:
        for order in self._budgets[device].decide(now_ms):
            worker, step = order.part
            self._emit(ev.Send(worker, msg.KvResize(step, order.bytes)))

    def _name(self, part: Part) -> str:
        """Return the step's name, with its worker's where that is another."""
        step, worker = self._steps[part[1]].name, self._workers[part[0]].name
        return step if step == worker else f"{step} in {worker}"
