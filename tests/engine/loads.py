"""Made-up loads for tests: a plan with two branches that join, and timings that say where the time went."""

from pathlib import Path
from typing import Any

from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.scheduler.request import StepTiming
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_yaml

JOINED = """
weftline: 1
name: joined
inputs: {x: text}
steps:
  hear: {node: echo, inputs: {value: x}, batch: {items_max: 4}}
  see: {node: echo, inputs: {value: x}, batch: {items_max: 8}}
  say: {node: template, template: "{{ hear.value }} {{ see.value }}"}
outputs: {y: say.text, z: see.value}
"""


def joined(cores: int = 8) -> Plan:
    """hear and see read the input, say reads both."""
    return make_plan(load_yaml(JOINED, "joined.yaml", Path()), Machine(cores, 8 << 30))


def ran(step: str, ready_ms: float, started_ms: float, ended_ms: float, **more: Any) -> StepTiming:
    """Return the timing of a step that had its inputs at ready_ms, left at started_ms and was back at ended_ms."""
    more = {"batch": 1, "node_ms": 0.0, "worker": step, **more}
    return StepTiming(step, started_ms - ready_ms, ended_ms - started_ms, started_ms=started_ms, **more)


def one_request(at_ms: float = 1000.0) -> RequestOutcome:
    """A request of 20 ms: see ends last of the two branches, say waits a millisecond for company."""
    return RequestOutcome(
        at_ms,
        at_ms + 20,
        timings=(
            ran("hear", at_ms + 1, at_ms + 2, at_ms + 6, node_ms=3.0),
            ran("see", at_ms + 1, at_ms + 4, at_ms + 12, node_ms=7.0, batch_wait_ms=1.0, batch=2),
            ran("say", at_ms + 12, at_ms + 14, at_ms + 19, node_ms=4.0, batch_wait_ms=1.5),
        ),
        late_ms=0.25,
    )
