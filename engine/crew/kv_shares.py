"""The KV memory that llm steps share, device by device: what workers say about it, and what they are told.

Reports come with a worker's beats, once a second, so memory moves at that pace. Which steps share, and the least of
each, was settled by the plan: `limits.kv_bytes` has the device, and the step's own `kv_bytes` is its least. Where the
plan left it open, because nobody knew what everything else on a GPU takes, steps share what is left when all of it is
open: their least is what they were opened with.

A step that sleeps holds none, and is neither asked nor told anything; what it starts with is kept for it. Pure; owned
by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weftline.engine import messages as msg
from weftline.engine.crew.kv_budget import KvBudget, KvUse, Part
from weftline.engine.scheduling import events as ev
from weftline.pipelines.kv_memory import shares
from weftline.pipelines.plan import Plan, PlannedStep

MOVING_SHARE = 16
"""This part of what is left is not given out: layers change their size one after the other, and the one at it lies
there twice. A model of fewer layers than this is a small one."""


class KvShares:
    """Every device's budget, and which of them a part belongs to."""

    def __init__(self, plan: Plan, emit: Callable[[ev.Command], None]) -> None:
        self._steps = plan.steps
        self._workers = plan.workers
        self._emit = emit
        self._budgets: dict[str, KvBudget] = {}
        self._devices: dict[Part, str] = {}
        self._resting: set[Part] = set()
        self._open: dict[str, dict[Part, int]] = {}  # devices to be divided: what parts start with, 0 when unknown
        self._left: dict[str, int] = {}
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
        for budget in plan.budgets:
            if not budget.kv_bytes and budget.device not in self._budgets:
                parts = dict.fromkeys(self._unstated(plan.steps, budget.device), 0)
                if parts:
                    self._open[budget.device] = parts

    def left(self, device: str, bytes: int) -> None:
        """Everything on a device is open, and so much is left of it; steps that name no memory may have that too."""
        if device in self._open:
            self._left[device] = max(0, bytes)
            self._divide(device)

    def reported(self, worker: int, reports: tuple[msg.KvReport, ...], now_ms: float) -> None:
        """Take in what a worker's steps use, and tell those that are to have more or less."""
        for one in reports:
            part = worker, one.step
            if part in self._resting:
                continue
            for undivided, parts in list(self._open.items()):
                if parts.get(part) == 0:
                    parts[part] = one.used_bytes + one.idle_bytes + one.free_bytes
                    self._divide(undivided)
            device = self._devices.get(part)
            if device is not None:
                use = KvUse(one.used_bytes, one.idle_bytes, one.free_bytes, one.waiting, one.preempted)
                self._budgets[device].reported(part, use, now_ms)
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
        self._resting = {part for part in self._resting if part[0] != worker}
        for part, device in self._devices.items():
            if part[0] == worker:
                self._budgets[device].died(part)

    def falls_asleep(self, worker: int, step: int) -> None:
        """A step was told to sleep: what it still says of its memory is about to be untrue."""
        part = worker, step
        self._resting.add(part)
        if part in self._devices:
            self._budgets[self._devices[part]].rests(part)

    def slept(self, worker: int, step: int) -> None:
        """A step sleeps and holds nothing; it will start again with its least."""
        part = worker, step
        if part in self._devices:
            self._budgets[self._devices[part]].died(part)

    def woken(self, worker: int, step: int) -> None:
        """A step is awake again, with its least."""
        self._resting.discard((worker, step))

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

    def _unstated(self, steps: Sequence[PlannedStep], device: str) -> list[Part]:
        return [
            (worker, index)
            for index, step in enumerate(steps)
            if shares(step) and not step.options["kv_bytes"]
            for worker, own in zip(step.workers, step.devices)
            if own == device
        ]

    def _divide(self, device: str) -> None:
        """Open a device's budget, once it is known what is left and what every part has."""
        parts = self._open[device]
        if device in self._left and all(parts.values()):
            left = self._left[device]
            self._budgets[device] = KvBudget(sum(parts.values()) + left - left // MOVING_SHARE, parts)
            self._devices |= dict.fromkeys(parts, device)
            del self._open[device]

    def _decide(self, device: str, now_ms: float) -> None:
        for order in self._budgets[device].decide(now_ms):
            worker, step = order.part
            self._emit(ev.Send(worker, msg.KvResize(step, order.bytes)))

    def _name(self, part: Part) -> str:
        """Return the step's name, with its worker's where that is another."""
        step, worker = self._steps[part[1]].name, self._workers[part[0]].name
        return step if step == worker else f"{step} in {worker}"
