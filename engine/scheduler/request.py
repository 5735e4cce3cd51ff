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

from weftline.engine.protocol.messages import StepRun, Value
from weftline.nodes.urgency import SequencePart
from weftline.shm.block import Key

if TYPE_CHECKING:
    from weftline.engine.scheduler.groups import OrderedGroup
    from weftline.engine.scheduler.programs import Program
    from weftline.engine.scheduler.routes import Route, Unit
    from weftline.engine.scheduler.state import SchedulerState

OPEN, OK, FAILED, CANCELLED, EXPIRED = "open", "ok", "failed", "cancelled", "expired"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (OPEN, "complete"): OK,
    (OPEN, "fail"): FAILED,
    (OPEN, "cancel"): CANCELLED,
    (OPEN, "expire"): EXPIRED,
}
"""(state, event) -> state. What is not here cannot happen."""


class StepTiming(NamedTuple):
    """Timing of one step of one request, in milliseconds.

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
    """One unit of one request, or one element of it under `map:`: what is queued and sent to a worker.

    id:             as in messages; never used twice.
    place:          the unit's index in the request's route.
    keys:           leases of its inputs, held until its result is handled or it is dropped.
    arrived_ms:     when all its inputs were there.
    due_ms:         when it must be finished for the request to meet its deadline.
    worker:         the worker that has it; -1 while it waits.
    started_ms:     when it was sent to the worker.
    attempts:       how often it was started, this time included.
    deaths:         how many workers died while they had it.
    expires_ms:     when the timeout of its step ends.
    spared:         how many workers that had it were killed because they depended on another one.
    digest:         hash of its inputs, once a worker has sent it.
    streamed:       output chunks were read, or it received chunks: it cannot be retried.
    stream_input:   source of an input that comes in chunks; None when all inputs were complete.
    held:           it is paused because a reader of its chunks has fallen behind.
    waits_for_copy: it is in no queue until some of its inputs were copied; see host_copies.py.
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
    streamed: bool = False
    stream_input: StreamInput | None = None
    held: bool = False
    waits_for_copy: bool = False
    spared: int = 0
    expires_ms: float = math.inf


@dataclass(slots=True, eq=False)
class StreamInput:
    """An input of one unit that comes in chunks.

    source:       the task that produces them.
    task:         the task that receives them; None until its unit starts.
    waiting:      chunks that were not sent yet.
    unread:       size in bytes of each chunk that was sent and that the node has not read yet.
    unread_bytes: bytes of both together.
    open:         more may come. Closed when the value is complete, or when the reader has ended.
    slow:         the reader has fallen behind.
    whole_ms:     when the value was complete; -1 before that.
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
        """Return True if the reader has read every chunk and the input is still open."""
        return self.open and not self.unread

    def end(self) -> None:
        """Close it: no chunk follows."""
        self.open = self.slow = False
        self.waiting.clear()


@dataclass(slots=True, eq=False)
class Gather:
    """A `map:` step of one request: the outputs of its elements so far, and how many are still missing."""

    outputs: list[tuple[Value, ...]]
    left: int


@dataclass(slots=True)
class ActiveFallback:
    """A fallback that was called: the unit that it replaces, and the error, message and step of that unit's failure."""

    place: int
    error: str
    message: str
    step: str
    traceback: str = ""
    param: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """An admitted request of a program.

    values:           values that were produced and still have readers, by slot.
    tickets:          number of readers of each value that are still to come, by slot.
    missing:          by unit of the route, how many values it waits for; -1 when it has started, was skipped or is not
                      needed any more.
    tasks:            its live tasks, by id.
    active_fallbacks: fallbacks that were called, by unit.
    stream_inputs:    inputs that come in chunks, by the unit that receives them.
    stalled:          its caller reads slowly, and its streams are paused.
    reached:          of a sequence, the deployments with memory that got a task for it, or lost the sequence.
    lost:             of a sequence, the deployments with memory that lost it before they got a task for it.
    job, seed, caller: as in Submitted.
    group:            the ordered group that it belongs to, and `row` its position there; None: its batches form freely.
    called_ms:        time of the call; latency counts from it.
    path:             the units that it is known to run, see known_path.py; None without a deadline.
    """

    id: int
    program: Program
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
    active_fallbacks: dict[int, ActiveFallback] = field(default_factory=dict)
    stream_inputs: dict[int, StreamInput] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    job: bool = False
    seed: int | None = None
    caller: str = ""
    group: OrderedGroup | None = None
    row: int = 0
    called_ms: float = 0.0
    path: bytes | None = None

    def move(self, event: str) -> None:
        """Go to the next state; RuntimeError for a move the table does not have."""
        to = TRANSITIONS.get((self.state, event))
        if to is None:
            allowed = [name for state, name in TRANSITIONS if state == self.state]
            raise RuntimeError(f"request {self.id} is {self.state} and cannot {event}; allowed: {allowed or 'nothing'}")
        self.state = to


def passed_before(ms: float) -> str:
    """Return the message of a deadline that passed before the request reached the scheduler."""
    limit = "deadline_ms of the request, else limits.deadline_ms, counts from the call and covers decoding its inputs"
    return f"its deadline had passed {ms_text(ms)} ms before its inputs were ready ({limit}); it was not started"


def ms_text(ms: float) -> str:
    """Return a time in ms for people: whole from 10 on, two digits below."""
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.2g}"


def record_timings(state: SchedulerState, task: Task, outcome: str, ran: Sequence[StepRun] = ()) -> None:
    """Write down how long a task's steps took: one StepTiming for each stage that ran.

    The first stage is charged with all messages; the time that an item waited although its worker was free counts as
    waiting for company.
    """
    now_ms, stages = state.now_ms, task.unit.stages
    timings, first = task.request.timings, stages[0].name
    if task.worker < 0 or not ran:
        worker_id = state.workers[task.worker].name if task.worker >= 0 else ""
        started = task.started_ms if task.worker >= 0 else now_ms
        timings.append(
            StepTiming(
                first, started - task.arrived_ms, now_ms - started, 0, 0.0, 0.0, worker_id, started, task.attempts,
                task.element, outcome,
            )
        )  # fmt: skip
        return
    worker, one, later, started = state.workers[task.worker], ran[0], ran[1:], task.started_ms
    free = worker.free_ms if worker.free_ms > task.arrived_ms else task.arrived_ms
    run_ms = now_ms - started
    for stage_ran in later:
        run_ms -= stage_ran.run_ms
    run_ms = max(run_ms, 0.0)
    batch = one.items if one.batches <= 1 else _batch(one)
    timings.append(
        tuple.__new__(  # equal to StepTiming(...) at half the cost, on the hot path
            StepTiming,
            (
                first, started - task.arrived_ms, run_ms, batch, max(started - free, 0.0), one.run_ms,
                worker.name, started, task.attempts, task.element, "ok" if later else outcome,
            ),
        )
    )  # fmt: skip
    for stage, one in enumerate(later, 1):
        started += run_ms
        run_ms = one.run_ms
        timings.append(
            StepTiming(
                stages[stage].name, 0.0, run_ms, _batch(one), 0.0, run_ms, worker.name, started,
                task.attempts, task.element, outcome if stage == len(ran) - 1 else "ok",
            )
        )  # fmt: skip


def _batch(ran: StepRun) -> int:
    """Return how many items shared a call."""
    return ran.items if ran.batches <= 1 else -(-ran.items // ran.batches)
