"""What happens to the scheduler, and what it asks for in return."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weftline.engine.messages import FromWorker as MessageFromWorker
from weftline.engine.messages import ToWorker, Value
from weftline.engine.scheduling.request import StepTiming
from weftline.nodes.urgency import SequencePart

# events


class Submitted(msgspec.Struct, frozen=True):
    """A caller brings a request. Inputs with a place were reserved before and hold the writer's ticket.

    wanted:      the outputs asked for; None means all of them.
    deadline_ms: on the scheduler's clock; None means no deadline.
    priority:    from -100 to 100, the higher goes first.
    sequence:    where it stands in a sequence of requests; None outside of one.
    pieces:      the caller takes streamed outputs piece by piece; otherwise it is told of whole ones only.
    job:         it is a row of a job, and waits wherever usual requests do.
    seed:        what chance in it is drawn from; None draws anew.
    """

    request: int
    inputs: Mapping[str, Value]
    wanted: tuple[str, ...] | None = None
    deadline_ms: float | None = None
    priority: int = 0
    sequence: SequencePart | None = None
    pieces: bool = True
    job: bool = False
    seed: int | None = None


class Together(msgspec.Struct, frozen=True):
    """A caller brings rows of a job that form their batches by their order; each of them is a request of its own."""

    rows: tuple[Submitted, ...]


class Delivered(msgspec.Struct, frozen=True):
    """The caller has copied a finished request's outputs, or does not want them any more."""

    request: int


class Withdrawn(msgspec.Struct, frozen=True):
    """The caller cancels a request; unknown and ended ones are ignored."""

    request: int


class Stalled(msgspec.Struct, frozen=True):
    """The caller of a streamed request has limits.stream_bytes_max unread; its producers are paused."""

    request: int


class Resumed(msgspec.Struct, frozen=True):
    """The caller of a stalled request has read on."""

    request: int


class FromWorker(msgspec.Struct, frozen=True):
    """A worker said something. `arena` tells its incarnations apart."""

    worker: int
    arena: int
    message: MessageFromWorker


class WorkerDied(msgspec.Struct, frozen=True):
    """A worker's process is gone. `how`: 'exit code 1', 'signal 9 (SIGKILL)'.

    refused: the system, short of something, did not let it start, which says nothing about its models.
    """

    worker: int
    arena: int
    how: str
    refused: bool = False


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class DeviceLeft(msgspec.Struct, frozen=True):
    """Everything that pipelines of this process hold of a device is open, and so many bytes left of it are ours."""

    device: str
    bytes: int


Event = Submitted | Together | Delivered | Withdrawn | Stalled | Resumed | FromWorker | WorkerDied | Tick | DeviceLeft

# commands


class Send(msgspec.Struct, frozen=True):
    """Send a message to a worker."""

    worker: int
    message: ToWorker


class Finish(msgspec.Struct, frozen=True):
    """A request is answered: copy its outputs out, then say Delivered."""

    request: int
    outputs: Mapping[str, Value]
    timings: tuple[StepTiming, ...]


class Fail(msgspec.Struct, frozen=True):
    """A request ended without an answer: the name of its error class, the message, and the step at fault if one is."""

    request: int
    error: str
    message: str
    step: str = ""
    timings: tuple[StepTiming, ...] = ()


class Refuse(msgspec.Struct, frozen=True):
    """A request was not admitted: over a limit, or sure to miss its deadline (`error` is then DeadlineExceeded)."""

    request: int
    message: str
    retry_after_s: float
    error: str = "LimitReached"


class OutputReady(msgspec.Struct, frozen=True):
    """A pipeline output is known before the whole request is finished; its bytes stay leased until Delivered.

    Only of requests whose caller takes pieces.
    """

    request: int
    output: str
    value: Value


class PieceReady(msgspec.Struct, frozen=True):
    """Something new on a streamed output; always inline."""

    request: int
    output: str
    value: Value


class StartWorker(msgspec.Struct, frozen=True):
    """Start a worker's process; its arena will be known by this id."""

    worker: int
    arena: int


class ShareArena(msgspec.Struct, frozen=True):
    """A worker's arena on its device is known by this id from now on: tell it, and the others that use the device."""

    worker: int
    arena: int


class KillWorker(msgspec.Struct, frozen=True):
    """Kill a worker's process; its death comes back as an event."""

    worker: int
    why: str


class ForgetArena(msgspec.Struct, frozen=True):
    """Nobody needs an arena any more: unmap it everywhere."""

    arena: int


class Note(msgspec.Struct, frozen=True):
    """Something that whoever runs the pipeline should know, for the log: one sentence."""

    message: str


ForCaller = Finish | Fail | Refuse | OutputReady | PieceReady
"""What is handed to whoever brought the request."""

Command = (
    Send
    | Finish
    | Fail
    | Refuse
    | OutputReady
    | PieceReady
    | StartWorker
    | ShareArena
    | KillWorker
    | ForgetArena
    | Note
)
