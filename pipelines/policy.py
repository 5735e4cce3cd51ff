"""Small frozen values that say how a step behaves; each YAML key, Python argument and docs row shares one name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How a step groups items.

    items_max:   most items in one call of the node, at least 1.
    wait_max_ms: longest an item waits for company; 0 means it never waits.
    """

    items_max: int = 1
    wait_max_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one pipeline accepts; over a limit the answer is an immediate refusal that names it.

    requests_max:      most requests admitted and not yet finished.
    request_bytes_max: most bytes of one request's inputs.
    pixels_max:        largest picture, in pixels of width times height, checked before decoding.
    seconds_max:       longest recording, in seconds, checked before decoding.
    arena_bytes:       shared memory of each writing process, in bytes; reserved when the pipeline opens.
    """

    requests_max: int = 256
    request_bytes_max: int = 64 << 20
    pixels_max: int = 16_000_000
    seconds_max: float = 120.0
    arena_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Slo:
    """What the pipeline aims for.

    latency_p99_ms: deadline of a request that brings none of its own; None means no deadline.
    """

    latency_p99_ms: float | None = None
