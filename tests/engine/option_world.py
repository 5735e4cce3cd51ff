"""Request options in the simulation: steps that share a deployment with options of their own.

Every step has an option that applies to single items, `p`, and may check its outputs (`finite`). Steps of one
deployment have different values of both. Whatever a worker is sent is compared with the step of the program that the
item belongs to: a worker would run it with the options whose number it carries.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.routes import ProgramStep
from weftline.pipelines.placement.plan import Plan

Used = tuple[int, int]
"""A deployment, and a number of options."""


def with_options(plan: Plan, seed: int) -> Plan:
    """Give the steps of a plan a request option; the nodes of some take different ones in one call."""
    rng = random.Random(f"options {seed}")
    steps = tuple(
        step
        if step.control
        else replace(step, options={**step.options, "p": 0}, request_options=("p",), mixed_options=rng.random() < 0.3)
        for step in plan.steps
    )
    return replace(plan, steps=steps)


class OptionWorld:
    """The options that each worker has received, and what each number means."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        self._rng = random.Random(f"versions {seed}")
        self._known: dict[Used, msg.SetOptions] = {}
        self._held: dict[int, dict[Used, msg.SetOptions]] = {}
        self._chains: dict[int, msg.Chain] = {}
        self._owner: dict[Used, int] = {}  # of a streaming step's numbers

    def vary(self, plan: Plan) -> Plan:
        """Give the steps of a program options of their own."""
        rng = self._rng
        steps = tuple(
            step
            if step.control
            else replace(
                step,
                options={**step.options, "p": rng.choice((0, 1, 2))},
                finite=not step.streams and rng.random() < 0.3,
            )
            for step in plan.steps
        )
        return replace(plan, steps=steps)

    def start(self, worker: int) -> None:
        """Note a worker that starts, or has died: it has nothing."""
        self._held[worker] = {}

    def receive(self, worker: int, message: msg.ToWorker, running: Iterable[msg.RunBatch | msg.Submit]) -> None:
        """Note what a worker receives. running: what it has at that time."""
        match message:
            case msg.SetOptions():
                used = message.step, message.number
                if self._known.setdefault(used, message) != message:
                    raise AssertionError(f"options {used} are {message}, and were {self._known[used]}")
                self._held[worker][used] = message
            case msg.DropOptions():
                gone = {(message.step, number) for number in message.numbers}
                if found := [one for run in running for one in self._uses(run) if one in gone]:
                    raise AssertionError(f"worker {worker} is to drop options {found} of items that it runs")
                for used in gone:
                    del self._held[worker][used]
            case msg.Chain():
                self._chains[message.id] = message

    def check_item(self, worker: int, message: msg.RunBatch | msg.Submit, item: msg.Item, task: Task) -> None:
        """Check that an item would run with the options of its own step."""
        for used, step in zip(self._uses(message, item), task.unit.stages, strict=True):
            self._check(worker, used, step, item, task)

    def check_batch(self, worker: int, message: msg.RunBatch | msg.Submit) -> None:
        """Check that items of one call have equal request options, unless the node takes mixed ones."""
        if isinstance(message, msg.Submit) or message.chain or self._plan.steps[message.step].mixed_options:
            return
        found = {str(self._options(worker, used)) for item in message.items for used in self._uses(message, item)}
        if len(found) > 1:
            raise AssertionError(f"a batch of step {message.step} has items with options {found}")

    def check_rest(self, used: Iterable[tuple[int, int]], ready: Iterable[int]) -> None:
        """Check that workers that are ready hold no options but those in use."""
        known = set(used)
        for worker in ready:
            if left := self._held[worker].keys() - known:
                raise AssertionError(f"worker {worker} keeps options {left}, which no step has")

    def _uses(self, message: msg.RunBatch | msg.Submit, *items: msg.Item) -> list[Used]:
        if isinstance(message, msg.RunBatch) and message.chain:
            return [(stage.step, stage.options) for stage in self._chains[message.chain].stages]
        numbers = [0 if one.metadata is None else one.metadata.options for one in items or message.items]
        return [(message.step, number) for number in numbers]

    def _options(self, worker: int, used: Used) -> Mapping[str, Any]:
        if not used[1]:
            return {"p": self._plan.steps[used[0]].options["p"]}
        if used not in self._held[worker]:
            raise AssertionError(f"worker {worker} was sent an item with options {used}, which it does not have")
        return self._held[worker][used].options

    def _check(self, worker: int, used: Used, step: ProgramStep, item: msg.Item, task: Task) -> None:
        opened, planned = self._plan.steps[used[0]], step.planned
        if self._options(worker, used) != {"p": planned.options["p"]}:
            raise AssertionError(f"item {item.id} of {step.name} has the options {self._options(worker, used)}")
        held = self._held[worker].get(used)
        name, finite = (opened.name, opened.finite) if held is None else (held.name, held.policy.finite)
        if finite != planned.finite:
            raise AssertionError(f"item {item.id} of {step.name} is checked by the rules of {name}")
        if item.metadata is not None and item.metadata.seed is not None and name != step.name:
            raise AssertionError(f"item {item.id} of {step.name} has the seed of {name}")
        program = task.request.program.id
        if opened.streams and self._owner.setdefault(used, program) != program:
            raise AssertionError(f"options {used} of a stream are of programs {self._owner[used]} and {program}")
