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

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from weftline.engine.messages import Value
from weftline.nodes.urgency import SequencePart
from weftline.shm.block import Key

if TYPE_CHECKING:
    from weftline.engine.scheduling.cohorts import Cohort
    from weftline.engine.scheduling.routes import Route, Unit

OPEN, OK, FAILED, CANCELLED, EXPIRED = "open", "ok", "failed", "cancelled", "expired"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (OPEN, "complete"): OK,
    (OPEN, "fail"): FAILED,
    (OPEN, "cancel"): CANCELLED,
    (OPEN, "expire"): EXPIRED,
}
"""(state, event) -> state. What is not here cannot happen."""


class StepTiming(NamedTuple):
    """How long one step of one request took, in milliseconds.

    queued_ms:     from having all its inputs to leaving for the worker.
    run_ms:        from leaving to the result being back (messages included); inside a chain, the step's own share.
    batch:         how many items shared the call.
    batch_wait_ms: the part of queued_ms in which a worker was free and the item waited for company.
    node_ms:       time the call spent in the node.
    worker:        the process that ran it, by name; '' for a step without one.
    started_ms:    when it left for the worker, on the runtime's clock.
    attempts:      how often it was tried; 1 is usual.
    element:       of a `map:` step, which element of the list; -1 otherwise.
    outcome:       'ok'; 'failed' (the node failed on it); 'lost' (its worker died, or it took too long); 'skipped' (its
                   condition did not hold). After 'failed' and 'lost' it may have been tried again, or its fallback ran.
    """

    step: str
    queued_ms: float
    run_ms: float
    batch: int
    batch_wait_ms: float = 0.0
    node_ms: float = 0.0
    worker: str = ""
    started_ms: float = 0.0
    attempts: int = 1
    element: int = -1
    outcome: str = "ok"


@dataclass(slots=True, eq=False)
class Task:
    """One unit of one request, or one element of it under `map:`; what is queued and what a worker is given.

    id:         as messages name it; never used twice.
    place:      the unit's index in the request's route.
    keys:       the leases its inputs hold until it is answered or dropped.
    arrived_ms: when it had all its inputs.
    due_ms:     when it must be finished for the request to make its deadline.
    worker:     who has it; -1 while it waits.
    started_ms: when it left for the worker.
    attempts:   how often it was started, this time included.
    deaths:     how many workers died while they had it.
    spared:     how many workers that had it were killed for another's sake.
    digest:     what it is made of, once a worker has said so.
    said:       pieces of its answer have reached somebody, or it was given pieces: it can no longer be tried again.
    feed:       where one of its inputs comes from piece by piece; None when all of them were there at once.
    held:       it is paused because a step that takes its pieces has fallen behind.
    kept:       it is in no queue until some of its inputs were fetched; see crew/fetching.
    """

    id: int
    request: Request
    place: int
    unit: Unit
    inputs: tuple[Value, ...]
    keys: Sequence[Key]
    arrived_ms: float
    due_ms: float = math.inf
    element: int = -1
    worker: int = -1
    started_ms: float = 0.0
    attempts: int = 1
    deaths: int = 0
    digest: bytes = b""
    said: bool = False
    feed: Feed | None = None
    held: bool = False
    kept: bool = False
    spared: int = 0


@dataclass(slots=True, eq=False)
class Feed:
    """An input of one unit of a request that comes in pieces.

    source:       the task that gives them.
    task:         the task that is given them; None until its unit begins.
    waiting:      pieces that were not sent yet.
    unread:       bytes of each piece that was sent and that the node has not been given yet.
    unread_bytes: of both together.
    open:         more may come. Closed when the value is whole, when the reader has ended, or when it gets the whole.
    slow:         it has fallen behind.
    whole_ms:     when the value was whole; -1 while it is not.
    """

    source: Task
    task: Task | None = None
    waiting: list[Value] = field(default_factory=list)
    unread: deque[int] = field(default_factory=deque)
    unread_bytes: int = 0
    open: bool = True
    slow: bool = False
    whole_ms: float = -1.0

    @property
    def waits(self) -> bool:
        """Whether its reader has nothing to do: all there was is read, and more is to come."""
        return self.open and not self.unread

    def end(self) -> None:
        """No piece follows."""
        self.open = self.slow = False
        self.waiting.clear()


@dataclass(slots=True, eq=False)
class Gather:
    """A `map:` step of one request: the outputs of its elements as they come, and how many are still to come."""

    outputs: list[tuple[Value, ...]]
    left: int


@dataclass(slots=True)
class Called:
    """A stand-in at work: the unit it stands in for, what that one failed with, and in which of its steps."""

    place: int
    error: str
    message: str
    step: str


@dataclass(slots=True, eq=False)
class Request:
    """A request that was admitted. Owned by the scheduler.

    values:  what has been produced and not yet read by everybody, by slot.
    tickets: how many readers of each value are still to come, by slot.
    missing: for each unit of the route, how many values it waits for; -1 when it is settled: begun, skipped or not
             needed any more.
    tasks:   what waits or runs for it, by task id.
    called:  stand-ins at work, by unit.
    feeds:   inputs that come in pieces, by the unit that takes them.
    stalled: its reader is slow, and its streams are paused.
    reached: of a sequence, the steps with memory that were given a task for it, or lost it.
    lost:    of a sequence, the steps with memory that lost it before they were given a task for it.
    job, seed: as in Submitted.
    cohort:  the rows that it forms batches with, and `row` its place among them; None: whoever waits.
    """

    id: int
    route: Route
    admitted_ms: float
    deadline_ms: float | None
    size_bytes: int
    missing: list[int]
    priority: int = 0
    sequence: SequencePart | None = None
    pieces: bool = True
    state: str = OPEN
    stalled: bool = False
    values: dict[int, Value] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    timings: list[StepTiming] = field(default_factory=list)
    tasks: dict[int, Task] = field(default_factory=dict)
    gathers: dict[int, Gather] = field(default_factory=dict)
    called: dict[int, Called] = field(default_factory=dict)
    feeds: dict[int, Feed] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    job: bool = False
    seed: int | None = None
    cohort: Cohort | None = None
    row: int = 0

    def move(self, event: str) -> None:
        """Go to the next state; RuntimeError for a move the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"request {self.id} is {self.state} and cannot {event}; allowed: {allowed or 'nothing'}")
        self.state = to
