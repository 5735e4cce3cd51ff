"""Events and commands of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weftline.engine.protocol.messages import FromWorker as MessageFromWorker
from weftline.engine.protocol.messages import ToWorker, Value
from weftline.engine.scheduler.request import StepTiming
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.placement.plan import Plan

# events


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A caller submits a request. Inputs with a place were reserved before and hold the writer's ticket.

    request:     its id, which no other request of any program has.
    program:     the program that answers it.
    wanted:      the requested outputs; None means all of them.
    deadline_ms: on the scheduler's clock; None means no deadline.
    priority:    from -100 to 100, higher goes first.
    sequence:    its part in a sequence of requests; None outside of one.
    pieces:      streamed outputs are sent chunk by chunk; otherwise only when they are complete.
    job:         it is a row of a job, and yields to usual requests.
    seed:        seed of its random choices; None: a new one.
    caller:      authenticated identity of the caller; '' without one.
    called_ms:   time of the call on the scheduler's clock, from which latency counts; None: now.
    """

    request: int
    inputs: Mapping[str, Value]
    program: int = 0
    wanted: tuple[str, ...] | None = None
    deadline_ms: float | None = None
    priority: int = 0
    sequence: SequencePart | None = None
    pieces: bool = True
    job: bool = False
    seed: int | None = None
    caller: str = ""
    called_ms: float | None = None


class GroupSubmitted(msgspec.Struct, frozen=True):
    """A caller submits an ordered group: rows of a job, each a request, that form batches by row order.

    All of them are of one program.
    """

    rows: tuple[Submitted, ...]


class Delivered(msgspec.Struct, frozen=True):
    """The caller has copied a finished request's outputs, or does not need them any more."""

    request: int


class Withdrawn(msgspec.Struct, frozen=True):
    """The caller cancels a request; an unknown or ended one is ignored."""

    request: int


class Stalled(msgspec.Struct, frozen=True):
    """The caller of a streamed request has limits.stream_bytes_max unread; its producers are paused."""

    request: int


class Resumed(msgspec.Struct, frozen=True):
    """The caller of a stalled request has read on."""

    request: int


class FromWorker(msgspec.Struct, frozen=True):
    """A worker sent a message. `arena` identifies its incarnation."""

    worker: int
    arena: int
    message: MessageFromWorker


EXIT, SIGNAL, OUT_OF_MEMORY, NOT_STARTED = "exit", "signal", "out_of_memory", "not_started"
INVALID_MESSAGE, TIMEOUT, DEPENDENT = "invalid_message", "timeout", "dependent"
OPEN_FAILED, DEVICE_LOST = "open_failed", "device_lost"
CAUSES = (
    EXIT, SIGNAL, OUT_OF_MEMORY, NOT_STARTED, INVALID_MESSAGE, TIMEOUT, DEPENDENT, OPEN_FAILED, DEVICE_LOST,
)  # fmt: skip
"""Causes of a worker's death. DEPENDENT: killed, because it waited on the device for a worker that died."""


class WorkerDied(msgspec.Struct, frozen=True):
    """A worker's process has ended. `how`: 'exit code 1', 'signal 9 (SIGKILL)'.

    refused: the system could not start it, for want of a resource; its models are not the cause.
    cause:   one of CAUSES, as far as the system knows it.
    last:    the last line that it printed; '' if there is none.
    """

    worker: int
    arena: int
    how: str
    refused: bool = False
    cause: str = EXIT
    last: str = ""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class DeviceLeft(msgspec.Struct, frozen=True):
    """Every pipeline of this process is open on a device; `bytes` of what is left belong to this plan."""

    device: str
    bytes: int


class OpenProgram(msgspec.Struct, frozen=True):
    """Open a program over deployments that exist; OpenIngress follows.

    program:     its id; ids rise, and none is used twice.
    deployments: the number of the deployment of each step of the plan; -1 for a control.
    """

    program: int
    plan: Plan
    deployments: tuple[int, ...]


class RetireProgram(msgspec.Struct, frozen=True):
    """A program takes no more requests. ProgramEnded follows when the last of its requests has ended."""

    program: int


Event = (
    Submitted
    | GroupSubmitted
    | Delivered
    | Withdrawn
    | Stalled
    | Resumed
    | FromWorker
    | WorkerDied
    | Tick
    | DeviceLeft
    | OpenProgram
    | RetireProgram
)

# commands


class Send(msgspec.Struct, frozen=True):
    """Send a message to a worker."""

    worker: int
    message: ToWorker


class Finish(msgspec.Struct, frozen=True):
    """A request has its outputs: copy them out, then send Delivered."""

    request: int
    outputs: Mapping[str, Value]
    timings: tuple[StepTiming, ...]


class Fail(msgspec.Struct, frozen=True):
    """A request failed: error class, message, and the step at fault if there is one.

    traceback: of the exception that the step's code raised; '' where there is none.
    param:     as in InputError.
    """

    request: int
    error: str
    message: str
    step: str = ""
    timings: tuple[StepTiming, ...] = ()
    traceback: str = ""
    param: str = ""


class Refuse(msgspec.Struct, frozen=True):
    """A request was not admitted: over a limit, or certain to miss its deadline (`error`: DeadlineExceeded)."""

    request: int
    message: str
    retry_after_s: float
    error: str = "LimitReached"


class OutputReady(msgspec.Struct, frozen=True):
    """A pipeline output is ready before the whole request is; its bytes stay leased until Delivered.

    Only for requests with `pieces`.
    """

    request: int
    output: str
    value: Value


class ChunkReady(msgspec.Struct, frozen=True):
    """A chunk of a streamed output; always inline."""

    request: int
    output: str
    value: Value


class StartWorker(msgspec.Struct, frozen=True):
    """Start a worker's process; this is the id of its arena."""

    worker: int
    arena: int


class ShareArena(msgspec.Struct, frozen=True):
    """Share a worker's device arena under this id: send it to the worker, and to the others on the device."""

    worker: int
    arena: int


class KillWorker(msgspec.Struct, frozen=True):
    """Kill a worker's process; WorkerDied follows."""

    worker: int
    why: str


class ForgetArena(msgspec.Struct, frozen=True):
    """Unmap an arena everywhere: nothing in it is leased any more."""

    arena: int


class OpenIngress(msgspec.Struct, frozen=True):
    """Create the arena for a program's inputs under this id; ForgetArena ends it.

    workers: those that run its steps: they attach this arena, and those of each other.
    """

    program: int
    arena: int
    size_bytes: int
    workers: tuple[int, ...]


class ProgramEnded(msgspec.Struct, frozen=True):
    """A retired program has ended: none of its requests is open, and no worker runs anything of it."""

    program: int


class ReturnMemory(msgspec.Struct, frozen=True):
    """Release the reserved GPU memory of workers that have ended for good.

    workers:     all that have, so far.
    taken_bytes: by device, the measured use of the others.
    kv_bytes:    by device, KV memory that the ones that ended now leave to the llm steps that go on.
    """

    workers: tuple[int, ...]
    taken_bytes: Mapping[str, int]
    kv_bytes: Mapping[str, int]


class LogWarning(msgspec.Struct, frozen=True):
    """Log a warning for the operator: one sentence."""

    message: str


class LogDeath(msgspec.Struct, frozen=True):
    """Log the death of a worker: one line. then: what happens next."""

    worker: int
    message: str
    then: str


ForCaller = Finish | Fail | Refuse | OutputReady | ChunkReady
"""Commands for the caller of a request."""

Command = (
    Send
    | Finish
    | Fail
    | Refuse
    | OutputReady
    | ChunkReady
    | StartWorker
    | ShareArena
    | KillWorker
    | ForgetArena
    | OpenIngress
    | ProgramEnded
    | ReturnMemory
    | LogWarning
    | LogDeath
)
