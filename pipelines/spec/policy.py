"""Step policies as frozen values: batching, retries, sequences and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AUTO_WAIT_MAX_MS = 20.0
"""Longest wait of `wait: auto` when wait_max_ms is not given."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Batching policy of one step.

    items_max:   most items in one call of the node, at least 1.
    wait_max_ms: longest time that an item waits for more items; 0: never (with `wait: auto`: at most 20 ms).
    wait:        `fixed`: wait for wait_max_ms. `auto`: wait only while it lowers the total latency, by measured times.
    sizes:       preferred numbers of items, rising; a batch closes at once when it reaches the largest.
    shapes:      `any`: items of all shapes share a call. `same`: only items whose tensors have equal shapes.
    pad:         named sizes of the step's inputs that are padded up to one of these numbers, and cut back afterwards.
    pad_value:   value of the padding.
    order:       `deadline`: the item with the earliest latest start runs first. `arrival`: the oldest.
    """

    items_max: int = 1
    wait_max_ms: float = 0.0
    wait: Literal["fixed", "auto"] = "fixed"
    sizes: tuple[int, ...] = ()
    shapes: Literal["any", "same"] = "any"
    pad: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pad_value: float = 0.0
    order: Literal["deadline", "arrival"] = "deadline"

    @property
    def wait_ms(self) -> float:
        """Return the longest wait in effect, in milliseconds."""
        return AUTO_WAIT_MAX_MS if self.wait == "auto" and not self.wait_max_ms else self.wait_max_ms


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy of one step. A worker death has one retry of its own, for idempotent steps.

    attempts: most retries of an item.
    wait_ms:  delay before the first retry; it doubles with each.
    on:       failures that are retried: `error` (the node failed on the item), `timeout` (of the step).
    """

    attempts: int = 0
    wait_ms: float = 0.0
    on: tuple[Literal["error", "timeout"], ...] = ("error", "timeout")


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """Sequence policy of a stateful step; all requests of a sequence go to one instance.

    live_max:    most open sequences of the step.
    idle_max_ms: longest time without a request; then the sequence is ended.
    """

    live_max: int = 64
    idle_max_ms: float = 60_000.0


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """Idle policy of one step: release device memory while it has no work.

    after_s: time without work after which the step sleeps.
    keep:    `host`: keep the weights in host memory. `process`: keep only the process, and reopen the node on demand.
             `nothing`: end the worker, once all of its steps have been idle for long enough, and restart it on demand.
    """

    after_s: float
    keep: Literal["host", "process", "nothing"] = "process"


@dataclass(frozen=True, slots=True)
class GpuPolicy:
    """GPU policy of a pipeline.

    ordering:  `host`: a tensor is passed on when it is complete, so that no reader waits for a dead process.
               `event`: as soon as its work is queued on the device, where readers wait for its event. When the
               producer dies, the workers that wait for it die, too.
    processes: `grouped`: of the steps of one GPU, each llm step has a process of its own and the others share one.
               `separate`: each instance of every step has one. A step's own `worker` takes precedence.
    arena_bytes:   device memory of each process for tensors that other processes read there.
    reserve_bytes: device memory that is never allocated.
    context_bytes: device memory of each process's context, where it was not measured.
    mps:       use NVIDIA's multi-process service if it runs: processes compute side by side, and a fatal fault in one
               ends all of them.
    nvtx:      write NVTX ranges for Nsight Systems: each call of a step on a GPU, and each round of an llm step there.
    """

    ordering: Literal["host", "event"] = "host"
    processes: Literal["grouped", "separate"] = "grouped"
    arena_bytes: int = 256 << 20
    reserve_bytes: int = 1 << 30
    context_bytes: int = 512 << 20
    mps: bool = False
    nvtx: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one pipeline; a request over a limit is refused or fails with an error that names it.

    requests_max:      most requests that are open: admitted and not finished.
    deadline_ms:       default deadline of a request, from the call to its last output; a late request fails.
                       None: no deadline.
    refuse_early:      refuse a request that by measured times cannot meet its deadline, before any of its steps runs.
    request_bytes_max: most bytes of one request's inputs.
    open_bytes_max:    most bytes of the inputs of all open requests together.
    pixels_max:        largest image, in pixels of width times height, checked before decoding.
    seconds_max:       longest recording, in seconds, checked before decoding.
    map_items_max:     longest list that a `map:` step takes from one request.
    arena_bytes:       shared memory of each process that writes there, in bytes; reserved when the pipeline opens. For
                       request inputs it holds at least two of the largest images or recordings.
    decode_bytes_max:  most memory that decoding images and recordings may use at a time, beside shared memory; further
                       requests wait in arrival order. None: as much as the largest input needs.
    stream_bytes_max:  most unread bytes of a streamed answer; above it the producer is paused.
    stall_max_ms:      longest time without a read of a streamed answer; then its request fails.
    silence_max_ms:    longest time without a heartbeat of a worker; then it is killed and restarted.
    retry_share:       most retries, as a share of first attempts.
    kv_bytes:          KV memory that llm steps of a device share, in bytes by device; moved to the step that needs it.
    job_batch_ms:      longest run of a batch of job rows, by measured times, and so the longest wait of other requests.
    """

    requests_max: int = 256
    deadline_ms: float | None = None
    refuse_early: bool = True
    request_bytes_max: int = 64 << 20
    open_bytes_max: int = 1 << 30
    pixels_max: int = 16_000_000
    seconds_max: float = 120.0
    map_items_max: int = 1024
    arena_bytes: int = 64 << 20
    decode_bytes_max: int | None = None
    stream_bytes_max: int = 4 << 20
    stall_max_ms: float = 30_000.0
    silence_max_ms: float = 3_000.0
    retry_share: float = 0.1
    kv_bytes: Mapping[str, int] = field(default_factory=dict)
    job_batch_ms: float = 50.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives. They are measured and reported; no request fails because of one.

    latency_p99_ms: 99 % of answers should take at most this long, from the call to the last output; None: no objective.
    """

    latency_p99_ms: float | None = None
