"""Small frozen values that say how a step behaves; each YAML key, Python argument and docs row shares one name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AUTO_WAIT_MAX_MS = 20.0
"""Longest wait of `wait: auto` when wait_max_ms is not given."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How a step groups items.

    items_max:   most items in one call of the node, at least 1.
    wait_max_ms: longest an item waits for company; 0 means it never waits (with `wait: auto`: at most 20 ms).
    wait:        `fixed` waits for wait_max_ms; `auto` waits only while waiting pays, by the step's measured latency.
    sizes:       preferred numbers of items, rising; a batch leaves at once when the largest that can be had is reached.
    shapes:      `any` lets items of all shapes share a call; `same` only items whose tensors have equal shapes.
    pad:         named sizes of the step's inputs that are padded up to one of these numbers, and cut back afterwards.
    pad_value:   what padding is filled with.
    order:       `deadline` lets the most urgent item go first; `arrival` the oldest.
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
        """The longest wait that is meant, in milliseconds."""
        return AUTO_WAIT_MAX_MS if self.wait == "auto" and not self.wait_max_ms else self.wait_max_ms


@dataclass(frozen=True, slots=True)
class Retry:
    """What is tried again, beside the one attempt that an idempotent step gets when its worker dies.

    attempts: how many further attempts an item gets.
    wait_ms:  pause before the first of them; it doubles with each.
    on:       which ends are tried again: `error` (the node failed on the item), `timeout` (of the step).
    """

    attempts: int = 0
    wait_ms: float = 0.0
    on: tuple[Literal["error", "timeout"], ...] = ("error", "timeout")


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """How a step with memory treats sequences of requests; one sequence stays with one instance.

    live_max:    most sequences of the step that live at a time.
    idle_max_ms: a sequence that brings nothing for so long is ended.
    """

    live_max: int = 64
    idle_max_ms: float = 60_000.0


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """What a step does with its device's memory while nobody asks for it.

    after_s: it has had no work for so long.
    keep:    what it keeps: `host`, its weights in host memory; `process`, nothing but its process, and it is opened
             again; `nothing`, not even that: its worker ends and is started again on demand, when every step of that
             worker has been idle for long enough.
    """

    after_s: float
    keep: Literal["host", "process", "nothing"] = "process"


@dataclass(frozen=True, slots=True)
class GpuPolicy:
    """How a pipeline uses GPUs.

    ordering:  `host`: a tensor is told of when it is whole, so that nobody ever waits for a process that has died.
               `event`: as soon as its work is on the device; readers wait there. A producer that dies takes
               those that wait for it along.
    processes: `grouped`: of the steps of one GPU, each llm step has a process of its own and the others share one.
               `separate`: each instance of every step has one. A step's own `worker` goes before both.
    arena_bytes:   device memory of each process for tensors that others read there.
    reserve_bytes: device memory that is never planned with.
    context_bytes: what each process takes of a device before it holds anything, where that was not measured.
    mps:       use NVIDIA's multi-process service if it runs: processes compute side by side, and a fatal fault in one
               ends all of them.
    """

    ordering: Literal["host", "event"] = "host"
    processes: Literal["grouped", "separate"] = "grouped"
    arena_bytes: int = 256 << 20
    reserve_bytes: int = 1 << 30
    context_bytes: int = 512 << 20
    mps: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What one pipeline accepts; over a limit the answer is an immediate refusal that names it.

    requests_max:      most requests admitted and not yet finished.
    request_bytes_max: most bytes of one request's inputs.
    open_bytes_max:    most bytes of the inputs of all open requests together.
    pixels_max:        largest picture, in pixels of width times height, checked before decoding.
    seconds_max:       longest recording, in seconds, checked before decoding.
    map_items_max:     longest list that a `map:` step takes from one request.
    arena_bytes:       shared memory of each writing process, in bytes; reserved when the pipeline opens.
    stream_bytes_max:  most bytes of a streamed answer that wait for a slow reader before its producer is paused.
    stall_max_ms:      a stream whose reader takes nothing for so long is cut.
    silence_max_ms:    a worker that gives no sign of life for so long is killed and started again.
    retry_share:       most further attempts, as a share of first ones.
    kv_bytes:          KV memory of a device that its llm steps share, in bytes by device; moved to where it is needed.
    job_batch_ms:      longest that a batch of job rows may take, by measured times; what a usual request waits for at
                       most.
    """

    requests_max: int = 256
    request_bytes_max: int = 64 << 20
    open_bytes_max: int = 1 << 30
    pixels_max: int = 16_000_000
    seconds_max: float = 120.0
    map_items_max: int = 1024
    arena_bytes: int = 64 << 20
    stream_bytes_max: int = 4 << 20
    stall_max_ms: float = 30_000.0
    silence_max_ms: float = 3_000.0
    retry_share: float = 0.1
    kv_bytes: Mapping[str, int] = field(default_factory=dict)
    job_batch_ms: float = 50.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What the pipeline aims for.

    latency_p99_ms: deadline of a request that brings none of its own; None means no deadline.
    refuse_early:   work that by the measured times cannot make its deadline is refused before it is begun.
    """

    latency_p99_ms: float | None = None
    refuse_early: bool = True
