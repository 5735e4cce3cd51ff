"""Policies of steps and pipelines as frozen values, and the types of their keys.

Every key of a file is a field of a dataclass here or in `graph`; `weftline.fields` explains the annotations. Bounds of
numbers catch mistakes such as a negative wait, or seconds for milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from weftline.fields import GRAPH, LOAD, RESOURCE, SCHEDULE, Written, shorthand, worded

AUTO_WAIT_MAX_MS = 20.0
"""Longest wait of `wait: auto` when wait_max_ms is not given."""

NAME_CHARS_MAX = 64
"""Longest name of an input, step or output, in characters."""

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]*$"

REQUESTS_MAX = 1_000_000
"""Largest `requests_max`, also of pipelines of one engine together."""

SIZES_MAX = 64
"""Most preferred sizes of a batch, and most sizes that one dim is padded to."""

_ONE_DEVICE = r"cpu|cuda(:[0-9]{1,3})?|fake(-[a-z]{1,8})?:[0-9]{1,3}"  # fake GPUs are for tests
_DEVICES = "cpu, cuda, or cuda:0 and so on"

Name = Annotated[
    str,
    worded("letters, digits, _ and -, not starting with a digit", pattern=NAME_PATTERN, max_length=NAME_CHARS_MAX),
]
Device = Annotated[str, worded(f"auto, {_DEVICES}", pattern=f"^(auto|{_ONE_DEVICE})$")]
OneDevice = Annotated[str, worded(_DEVICES, pattern=f"^({_ONE_DEVICE})$")]
DurationMs = Annotated[float, Meta(gt=0, le=86_400_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Pixels = Annotated[int, Meta(ge=1, le=1 << 32)]
Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
ArenaBytes = Annotated[int, Meta(ge=1 << 16, le=1 << 40)]
Attempts = Annotated[int, Meta(ge=0, le=10)]
IdleSeconds = Annotated[float, Meta(gt=0, le=2_592_000)]
_Sizes = Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 32)], ...], Meta(min_length=1, max_length=SIZES_MAX)]
Sizes = Annotated[tuple[int, ...], Written(_Sizes, tuple, list)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPolicy:
    """Keys of a step that its worker applies to single calls of the node."""

    finite: Annotated[bool, GRAPH] = False
    """An item fails if its outputs contain NaN or an infinite number, before any reader receives them; default: not
    checked."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Batching policy of one step."""

    items_max: Annotated[int, Meta(ge=1, le=4096), LOAD] = 1
    """Most items in one call of the node, at least 1."""
    wait_max_ms: Annotated[float, Meta(ge=0, le=60_000), RESOURCE] = 0.0
    """Longest time that an item waits for more items; 0: never (with `wait: auto`: at most 20 ms)."""
    wait: Annotated[Literal["fixed", "auto"], RESOURCE] = "fixed"
    """`fixed`: wait for wait_max_ms. `auto`: wait only while it lowers the total latency, by measured times."""
    sizes: Annotated[Sizes, LOAD] = ()
    """Preferred numbers of items, rising; a batch closes at once when it reaches the largest."""
    shapes: Annotated[Literal["any", "same"], LOAD] = "any"
    """`any`: items of all shapes share a call. `same`: only items whose tensors have equal shapes."""
    pad: Annotated[Mapping[Name, Sizes], LOAD] = field(default_factory=dict)
    """Named sizes of the step's inputs that are padded up to one of these numbers, and cut back afterwards."""
    pad_value: Annotated[float, Meta(ge=-1e38, le=1e38), LOAD] = 0.0
    """Value of the padding."""
    order: Annotated[Literal["deadline", "arrival"], RESOURCE] = "deadline"
    """`deadline`: the item with the earliest latest start runs first. `arrival`: the oldest."""

    @property
    def wait_ms(self) -> float:
        """Return the longest wait in effect, in milliseconds."""
        return AUTO_WAIT_MAX_MS if self.wait == "auto" and not self.wait_max_ms else self.wait_max_ms


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy of one step. A worker death has one retry of its own, for idempotent steps."""

    attempts: Annotated[Attempts, SCHEDULE] = 0
    """Most retries of an item."""
    wait_ms: Annotated[float, Meta(ge=0, le=60_000), SCHEDULE] = 0.0
    """Delay before the first retry; it doubles with each."""
    on: Annotated[tuple[Literal["error", "timeout"], ...], Meta(min_length=1), SCHEDULE] = ("error", "timeout")
    """Failures that are retried: `error` (the node failed on the item), `timeout` (of the step)."""


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """Sequence policy of a stateful step; all requests of a sequence go to one instance."""

    live_max: Annotated[int, Meta(ge=1, le=1_000_000), SCHEDULE] = 64
    """Most open sequences of the step."""
    idle_max_ms: Annotated[DurationMs, SCHEDULE] = 60_000.0
    """Longest time without a request; then the sequence is ended."""


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """Idle policy of one step: release device memory while it has no work."""

    after_s: Annotated[IdleSeconds, RESOURCE]
    """Time without work after which the step sleeps."""
    keep: Annotated[Literal["host", "process", "nothing"], RESOURCE] = "process"
    """`host`: keep the weights in host memory. `process`: keep only the process, and reopen the node on demand.
    `nothing`: end the worker, once all of its steps have been idle for long enough, and restart it on demand."""


AnyRetry = Annotated[Retry, shorthand(Retry, "attempts")]
AnyIdle = Annotated[IdlePolicy, shorthand(IdlePolicy, "after_s")]


@dataclass(frozen=True, slots=True)
class GpuPolicy:
    """GPU policy of a pipeline."""

    ordering: Annotated[Literal["host", "event"], SCHEDULE] = "host"
    """`host`: a tensor is passed on when it is complete, so that no reader waits for a dead process. `event`: as soon
    as its work is queued on the device, where readers wait for its event. When the producer dies, the workers that wait
    for it die, too."""
    processes: Annotated[Literal["grouped", "separate"], RESOURCE] = "grouped"
    """`grouped`: of the steps of one GPU, each llm step has a process of its own and the others share one. `separate`:
    each instance of every step has one. A step's own `worker` takes precedence."""
    arena_bytes: Annotated[ArenaBytes, SCHEDULE] = 256 << 20
    """Device memory of each process for tensors that other processes read there."""
    reserve_bytes: Annotated[int, Meta(ge=0, le=1 << 40), SCHEDULE] = 1 << 30
    """Device memory that is never allocated."""
    context_bytes: Annotated[int, Meta(ge=0, le=1 << 36), SCHEDULE] = 512 << 20
    """Device memory of each process's context, where it was not measured."""
    mps: Annotated[bool, RESOURCE] = False
    """Use NVIDIA's multi-process service if it runs: processes compute side by side, and a fatal fault in one ends all
    of them."""
    nvtx: Annotated[bool, SCHEDULE] = False
    """Write NVTX ranges for Nsight Systems: each call of a step on a GPU, and each round of an llm step there."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one pipeline; a request over a limit is refused or fails with an error that names it."""

    requests_max: Annotated[int, Meta(ge=1, le=REQUESTS_MAX), SCHEDULE] = 256
    """Most requests that are open: admitted and not finished."""
    deadline_ms: Annotated[DurationMs | None, SCHEDULE] = None
    """Default deadline of a request, from the call to its last output; a late request fails. None: no deadline."""
    refuse_early: Annotated[bool, SCHEDULE] = True
    """Refuse a request that by measured times cannot meet its deadline, before any of its steps runs."""
    request_bytes_max: Annotated[Bytes, GRAPH] = 80 << 20
    """Most bytes of one request's inputs, decoded: the default is the largest image and the longest recording."""
    open_bytes_max: Annotated[int, Meta(ge=1, le=1 << 42), SCHEDULE] = 1 << 30
    """Most bytes of the inputs of all open requests together."""
    pixels_max: Annotated[Pixels, GRAPH] = 25_000_000
    """Largest image, in pixels of width times height, checked before decoding."""
    seconds_max: Annotated[Seconds, GRAPH] = 120.0
    """Longest recording, in seconds, checked before decoding."""
    map_items_max: Annotated[int, Meta(ge=1, le=1_000_000), GRAPH] = 1024
    """Longest list that a `map:` step takes from one request."""
    arena_bytes: Annotated[ArenaBytes, SCHEDULE] = 72 << 20
    """Shared memory of each process that writes there, in bytes; reserved when the pipeline opens. The default holds
    one of the largest images. For request inputs it holds at least two of the largest images or recordings."""
    decode_bytes_max: Annotated[Annotated[int, Meta(ge=1 << 20, le=1 << 40)] | None, SCHEDULE] = None
    """Most memory that decoding images and recordings may use at a time, beside shared memory; further requests wait in
    arrival order. None: as much as the largest input needs."""
    stream_bytes_max: Annotated[Bytes, SCHEDULE] = 4 << 20
    """Most unread bytes of a streamed answer; above it the producer is paused."""
    stall_max_ms: Annotated[DurationMs, SCHEDULE] = 30_000.0
    """Longest time without a read of a streamed answer; then its request fails."""
    silence_max_ms: Annotated[float, Meta(ge=1500, le=3_600_000), SCHEDULE] = 3_000.0
    """Longest time without a heartbeat of a worker; then it is killed and restarted. Workers send one a second."""
    retry_share: Annotated[float, Meta(ge=0, le=1), SCHEDULE] = 0.1
    """Most retries, as a share of first attempts."""
    kv_bytes: Annotated[Mapping[OneDevice, Annotated[int, Meta(ge=1 << 16, le=1 << 44)]], SCHEDULE] = field(
        default_factory=dict
    )
    """KV memory that llm steps of a device share, in bytes by device; moved to the step that needs it."""
    job_batch_ms: Annotated[float, Meta(gt=0, le=3_600_000), SCHEDULE] = 50.0
    """Longest run of a batch of job rows, by measured times, and so the longest wait of other requests."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives. They are measured and reported; no request fails because of one."""

    latency_p99_ms: Annotated[DurationMs | None, SCHEDULE] = None
    """99 % of answers should take at most this long, from the call to the last output; None: no objective."""
