"""One request on its way through a plan, and the life it can have.

               admit            every output is there
    (nothing) ------> open -------------------------------> ok
                       |  \\
                       |   `--- an item failed, a worker died ---> failed
                       |`------ the caller withdrew it ----------> cancelled
                        `------ its deadline passed -------------> expired

Every admitted request ends exactly once; an ended one holds no block and waits in no queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weftline.engine.messages import Value

OPEN, OK, FAILED, CANCELLED, EXPIRED = "open", "ok", "failed", "cancelled", "expired"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (OPEN, "complete"): OK,
    (OPEN, "fail"): FAILED,
    (OPEN, "cancel"): CANCELLED,
    (OPEN, "expire"): EXPIRED,
}
"""(state, event) -> state. What is not here cannot happen."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How long one step of one request took, in milliseconds.

    queued_ms: from having all its inputs to leaving for the worker.
    run_ms:    from leaving to the result being back (messages included).
    batch:     how many items shared the call.
    """

    step: str
    queued_ms: float
    run_ms: float
    batch: int


@dataclass(frozen=True, slots=True)
class Route:
    """What has to happen for a given choice of outputs; worked out once for each choice.

    Values are numbered: pipeline inputs first, then each step's outputs. `steps` are those that somebody needs.
    readers:    for each value, the steps that read it (twice if on two ports).
    outputs_at: for each value, the pipeline outputs it is.
    missing:    for each step, how many wired inputs it waits for.
    """

    steps: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    outputs_at: tuple[tuple[str, ...], ...]
    missing: Mapping[int, int]
    outputs: tuple[str, ...]

    def tickets(self, value: int) -> int:
        """How many readers a value has: step inputs and pipeline outputs."""
        return len(self.readers[value]) + len(self.outputs_at[value])


@dataclass(slots=True)
class Request:
    """A request that was admitted. Owned by the scheduler.

    values:  what has been produced and not yet read by everybody, by value number.
    tickets: how many readers of each value are still to come.
    arrived: for each running or waiting step, when its inputs were complete.
    """

    id: int
    route: Route
    admitted_ms: float
    deadline_ms: float | None
    state: str = OPEN
    values: dict[int, Value] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    timings: list[StepTiming] = field(default_factory=list)

    def move(self, event: str) -> None:
        """Go to the next state; RuntimeError for a move the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"request {self.id} is {self.state} and cannot {event}; allowed: {allowed or 'nothing'}")
        self.state = to
