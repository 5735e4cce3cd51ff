"""Sleep in the simulation: the steps that may, and the workers' random answers.

After every message it is known which steps of a worker do not stand ready: work for such a step, or a repeated
message, is a bug of the scheduler.
"""

from __future__ import annotations

import random
from dataclasses import replace

from weftline.engine.protocol import messages as msg
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.policy import IdlePolicy

SHARE = 0.3
"""How many worlds have steps that sleep."""


def with_idleness(plan: Plan, seed: int) -> Plan:
    """Return the plan, in some worlds with steps that sleep when nothing comes for a few milliseconds."""
    rng = random.Random(f"idle {seed}")
    if rng.random() > SHARE:
        return plan
    keeps = rng.choice((("host", "process", "nothing"), ("nothing",)))
    steps = tuple(
        replace(step, idle=IdlePolicy(rng.choice((0.002, 0.01, 0.05)), rng.choice(keeps)))
        if step.workers and step.sequence is None and rng.random() < 0.8
        else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)


class IdleWorld:
    """Which steps rest in which worker, as its worker knows it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"naps {seed}")
        self._loads = random.Random(f"loads {seed}")
        self._resting: dict[int, set[int]] = {}
        self.closed: set[int] = set()

    def start(self, worker: int) -> None:
        self._resting[worker] = set()
        self.closed.discard(worker)

    def on_message(self, worker: int, message: msg.Sleep | msg.Wake | msg.Close) -> None:
        """A worker is sent a message; AssertionError when it cannot be meant."""
        rests = self._resting[worker]
        match message:
            case msg.Sleep():
                if message.step in rests:
                    raise AssertionError(f"step {message.step} got Sleep and is not awake")
                rests.add(message.step)
            case msg.Wake():
                if message.step not in rests:
                    raise AssertionError(f"step {message.step} got Wake and is awake")
            case msg.Close():
                self.closed.add(worker)

    def check_work(self, worker: int, steps: tuple[int, ...]) -> None:
        if worker in self.closed:
            raise AssertionError(f"worker {worker} got Close and work")
        for step in steps:
            if step in self._resting[worker]:
                raise AssertionError(f"worker {worker} was given work for step {step}, which sleeps")

    def slept(self, message: msg.Sleep) -> msg.Asleep:
        return msg.Asleep(message.step, self._rng.randrange(1 << 20))

    def load_ms(self) -> float:
        """Return how long a worker is silent while it wakes a step; now and then longer than any other may be."""
        return self._loads.uniform(3_500, 4_500) if self._loads.random() < 0.05 else self._loads.uniform(0.01, 20)

    def hangs(self) -> bool:
        """Whether a worker hangs as it comes to waking a step, before it has said so."""
        return self._loads.random() < 0.05

    def awake(self, worker: int, message: msg.Wake) -> msg.Awake:
        if self._rng.random() < 0.03:
            return msg.Awake(message.step, 1.0, msg.Failure("ModelError", "drawn"))
        self._resting[worker].discard(message.step)
        return msg.Awake(message.step, 1.0)
