"""KV memory in the simulation: what streaming steps hold, report and receive, drawn at random."""

import random
from collections.abc import Iterator
from dataclasses import replace

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.kv_budget import Part
from weftline.pipelines.placement.plan import DeviceBudget, Plan

LEAST_BYTES, DEVICE_BYTES = 20_000, 100_000
"""What each instance starts with, and how much there is for it on its device."""


def with_memory(plan: Plan, seed: int) -> Plan:
    """Return the plan with KV memory that its streaming steps share; in some worlds the size arrives late."""
    least = None if seed % 3 == 0 else LEAST_BYTES
    steps = tuple(
        replace(step, options={"kv_bytes": least}, devices=("cpu",) * len(step.workers)) if step.streams else step
        for step in plan.steps
    )
    count = sum(len(step.workers) for step in steps if step.streams)
    limits = replace(plan.limits, kv_bytes={"cpu": count * DEVICE_BYTES} if count else {})
    if least is None:
        return replace(plan, steps=steps, budgets=(DeviceBudget("cpu", count * DEVICE_BYTES, ()),))
    return replace(plan, steps=steps, limits=limits)


class KvWorld:
    """The memory of all workers of a plan. A starved step stays so for a while, and then others are."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._rng = random.Random(seed)
        self._parts = [(worker, at) for at, step in enumerate(plan.steps) if step.streams for worker in step.workers]
        self._most = plan.limits.kv_bytes.get("cpu", 0) or len(self._parts) * DEVICE_BYTES
        self._has: dict[Part, int] = {}
        self._asleep: set[Part] = set()
        self._hungry = self._rng.choices(self._parts, k=2) if self._parts else []

    def start(self, worker: int) -> None:
        self._has |= dict.fromkeys(self._of(worker), LEAST_BYTES)
        self._asleep = {part for part in self._asleep if part[0] != worker}

    def die(self, worker: int) -> None:
        for part in self._of(worker):
            self._has[part] = 0

    def sleep(self, worker: int, step: int) -> None:
        """A step gives up all it has; only those that have memory are noted."""
        if (worker, step) in self._has:
            self._has[(worker, step)] = 0
            self._asleep.add((worker, step))

    def wake(self, worker: int, step: int) -> None:
        if (worker, step) in self._has:
            self._has[(worker, step)] = LEAST_BYTES
            self._asleep.discard((worker, step))

    def beat(self, worker: int) -> msg.Heartbeat:
        if self._parts and self._rng.random() < 0.1:
            self._hungry = self._rng.choices(self._parts, k=2)
        return msg.Heartbeat(tuple(self._report(part) for part in self._of(worker) if part not in self._asleep))

    def resize(self, worker: int, message: msg.KvResize) -> msg.KvResized:
        """Resize in pages of 512 bytes; now and then a step cannot free all of it."""
        part, to = (worker, message.step), message.bytes // 512 * 512
        if part in self._asleep:
            raise AssertionError(f"step {message.step} of worker {worker} sleeps and got KV memory")
        if part not in self._parts or message.bytes < LEAST_BYTES:
            raise AssertionError(f"step {message.step} of worker {worker} got {message.bytes} bytes to hold")
        if to < self._has[part] and self._rng.random() < 0.2:
            to = (to + self._has[part]) // 2
        self._has[part] = to
        return msg.KvResized(message.step, to)

    def left(self) -> ev.DeviceLeft:
        """Say how much is left for them when others of the process have been measured."""
        return ev.DeviceLeft("cpu", self._most - len(self._parts) * LEAST_BYTES)

    def check(self) -> None:
        if sum(self._has.values()) > self._most:
            raise AssertionError(f"steps hold {sum(self._has.values())} bytes of KV memory, and there are {self._most}")

    def _of(self, worker: int) -> Iterator[Part]:
        return (part for part in self._parts if part[0] == worker)

    def _report(self, part: Part) -> msg.KvReport:
        has = self._has[part]
        used = has if part in self._hungry else self._rng.randint(0, has // 4)
        return msg.KvReport(part[1], used, 0, has - used, int(part in self._hungry), 0)
