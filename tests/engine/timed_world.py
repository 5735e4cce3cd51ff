"""Worlds in which steps take a time of their own, and often have a timeout: what was measured can be relied on.

In such a world every batch of a step takes the same time, and workers report it. So it can be checked from outside that
no task is started that cannot finish within its timeout, and that no request is refused for steps that it need not run.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from tests.engine.program_world import SLOW_MS, ProgramWorld, Version
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.condition_values import peek
from weftline.engine.scheduler.known_path import known_path
from weftline.engine.scheduler.latency import FRESH_MS, SAMPLES_MIN
from weftline.engine.scheduler.scheduler import Scheduler
from weftline.pipelines.placement.chains import chains
from weftline.pipelines.placement.plan import Plan, PlannedStep

TAKES_MS = (5.0, 40.0, 120.0)
TIMEOUTS_MS = (10.0, 50.0, 130.0, 200.0)


def is_timed(seed: int) -> bool:
    return seed % 4 == 1


def with_timeouts(plan: Plan, seed: int) -> Plan:
    """Add timeouts to the plan of a timed world, and failures that count as absent."""
    if not is_timed(seed):
        return plan
    rng = random.Random(seed)
    lacking = {(None, one.name) for one in plan.inputs if one.optional}
    steps: list[PlannedStep] = []
    for step in plan.steps:
        lacks = any((one.wire.step, one.wire.port) in lacking and not one.optional for one in step.inputs)
        lacks = step.conditional or (lacks and step.control != "first")
        if not step.control:
            timeout_ms = rng.choice(TIMEOUTS_MS) if rng.random() < 0.5 else step.timeout_ms
            absent = step.fallback is None and rng.random() < 0.15
            lacks = lacks or absent
            step = replace(step, timeout_ms=timeout_ms, absent_on_failure=absent)
        steps.append(replace(step, conditional=lacks))
        if lacks:
            lacking |= {(step.name, port.name) for port in step.outputs}
    return replace(plan, steps=tuple(steps), chains=chains(tuple(steps), plan.inputs))


class TimedWorld:
    """Facts about a timed world, seen from outside: the time of each step, and which were measured."""

    def __init__(self, plan: Plan, seed: int, programs: ProgramWorld) -> None:
        rng = random.Random(seed)
        self.on = is_timed(seed)
        self._programs = programs
        self._takes_ms = [rng.choice(TAKES_MS) for _ in plan.steps]
        self._measured: dict[tuple[str, str], list[float]] = {}
        self._inputs: dict[int, Mapping[str, msg.Value]] = {}
        self._own: dict[int, tuple[str, str]] = {}

    def takes_ms(self, message: msg.RunBatch, chain: msg.Chain | None) -> float:
        return sum(one.run_ms for one in self.ran(message, chain))

    def ran(self, message: msg.RunBatch, chain: msg.Chain | None) -> tuple[msg.StepRun, ...]:
        """Return what a worker reports."""
        extra_ms = max(self._programs.extra_ms(item.id) for item in message.items)
        times = [self._takes_ms[step] for step in self._steps(message, chain)]
        times[0] += extra_ms
        return tuple(msg.StepRun(run_ms, 1, len(message.items)) for run_ms in times)

    def learned(self, message: msg.RunBatch, now_ms: float) -> None:
        """Note a measurement of the only step that a batch has items of."""
        steps = {self._own.get(item.id) for item in message.items}  # None: it ended in the turn in which it was sent
        own = steps.pop()
        if own is not None and not steps:
            self._measured.setdefault(own, []).append(now_ms)

    def submitted(self, event: ev.Submitted) -> None:
        self._inputs[event.request] = event.inputs

    def check_sent(self, scheduler: Scheduler, step: int, item: msg.Item, now_ms: float) -> None:
        """Check that a task can finish within its timeout, and that its due time follows what is known."""
        task = scheduler.state.live[item.id]
        request, planned = task.request, task.unit.head.planned
        own = self._own[item.id] = (request.program.plan.name, planned.name)
        if request.deadline_ms is not None and request.path is not None:
            path = known_path(request.route, request.values, request.missing, request.active_fallbacks)
            started = [at for at, left in enumerate(request.missing) if left < 0]
            if [one for at, one in enumerate(path) if at not in started] != [
                one for at, one in enumerate(request.path) if at not in started
            ]:
                raise AssertionError(f"request {request.id} is scheduled by a path that is not the known one")
        if planned.timeout_ms is None or task.attempts > 1 or task.element >= 0 or item.inputs[:1] == (msg.PIECES,):
            return
        if task.request.group is not None or any(one is msg.PIECES for one in item.inputs):
            return
        by_ms = task.arrived_ms + planned.timeout_ms
        if task.stream_input is None and not planned.fed and now_ms > by_ms + 1e-6:
            raise AssertionError(f"item {item.id} was sent after its timeout")
        measured = self.on and not planned.streams and self._is_measured(own, now_ms)
        takes_ms = self._takes_ms[step] + self._programs.extra_ms(item.id)
        if measured and now_ms + takes_ms > by_ms + 1e-6:
            raise AssertionError(f"item {item.id} was sent although it cannot finish within its timeout")

    def check_refused(self, refusal: ev.Refuse, is_idle: bool) -> None:
        """Check that an idle pipeline refuses no request for steps that it is not known to run."""
        needs = re.search(r"needs about ([0-9.e+]+) ms", refusal.message)
        if not self.on or not is_idle or needs is None or refusal.error != "DeadlineExceeded":
            return
        version = self._programs.version_of[refusal.request]
        most_ms = self._most_ms(version, self._inputs[refusal.request])
        if float(needs.group(1)) > 1.1 * most_ms + 1:
            raise AssertionError(f"refused: {refusal.message}; it need not take more than {most_ms} ms")

    def _is_measured(self, step: tuple[str, str], now_ms: float) -> bool:
        times = self._measured.get(step, [])
        gaps = [later - before for before, later in pairwise(times)]
        recent = len(times) >= SAMPLES_MIN and now_ms - times[-1] < FRESH_MS
        return recent and all(gap < FRESH_MS for gap in gaps[1 - SAMPLES_MIN :])

    def _most_ms(self, version: Version, inputs: Mapping[str, msg.Value]) -> float:
        """Return the time of all steps that are certain to run, one after the other."""
        there = {(None, name) for name, value in inputs.items() if value.kind != "absent"}
        dormant = {step.fallback for step in version.plan.steps}
        total = 0.0
        for step, deployment in zip(version.plan.steps, version.deployments):
            if not self._is_certain(step, there, inputs) or step.name in dormant:
                continue
            there |= {(step.name, port.name) for port in step.outputs}
            if not step.control:
                total += self._bounded_ms(version, step, deployment)
        return total

    def _is_certain(
        self, step: PlannedStep, there: set[tuple[str | None, str]], inputs: Mapping[str, msg.Value]
    ) -> bool:
        if step.when is not None:
            wire = step.when.wires[0]
            if wire.step is not None or not step.when.holds([peek(inputs[wire.port])]):
                return False
        reads = [(one.wire.step, one.wire.port) in there for one in step.inputs]
        if step.control:
            return any(reads)
        return all(read or one.optional for read, one in zip(reads, step.inputs)) and not step.map

    def _bounded_ms(self, version: Version, step: PlannedStep, deployment: int) -> float:
        takes_ms = self._takes_ms[deployment] + SLOW_MS * (version.program.id % 2)
        if step.streams:
            return math.inf  # its rounds take a random time
        if step.timeout_ms is None or takes_ms <= step.timeout_ms:
            return takes_ms
        others = 0.0 if step.fallback is None else sum(self._takes_ms) + SLOW_MS * len(self._takes_ms)
        return min(takes_ms, step.timeout_ms + others)

    def _steps(self, message: msg.RunBatch, chain: msg.Chain | None) -> list[int]:
        return [stage.step for stage in chain.stages] if chain else [message.step]
