"""Trace context headers, and spans of an ended request: one for the request and one for each run of a step.

Names and attributes follow OpenTelemetry's conventions where it has some (`gen_ai.*` for language models); the rest is
called `weftline.*`. No value of a request is in them, and no more than SPANS_MAX spans come of one request. Headers
follow W3C Trace Context (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.backend import Record

SAMPLED = 1
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place: the trace (128 bits), the span (64 bits), neither 0, and whether it is recorded."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse(traceparent: str) -> TraceContext | None:
    """Parse a `traceparent` header; return None for a missing or malformed one."""
    found = _HEADER.fullmatch(traceparent)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return None
    trace_id, span_id = int(trace, 16), int(span, 16)
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED)) if trace_id and span_id else None


SPANS_MAX = 128
"""Most steps shown of one request: a `map:` step runs once for each element of a list."""

TEXT_MAX = 256
"""Most characters of a text that a client chose, or of an error."""

FAULTS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))
"""Statuses that are the server's failures, as OpenTelemetry's gRPC conventions have it; others are the caller's."""

Attribute = str | bool | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """Contents of a span. start_ns, end_ns: since the epoch. error: reason of the failure, or None."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    error: str | None = None
    children: tuple[SpanFacts, ...] = field(default=())


def spans_of(record: Record) -> SpanFacts:
    """Return the span of a request, with those of its steps as children."""
    steps = record.timings[:SPANS_MAX]
    attributes = _request(record)
    if len(steps) < len(record.timings):
        attributes["weftline.steps_left_out"] = len(record.timings) - len(steps)
    end_ns = record.started_ns + _ns(record.total_ms)
    error = (record.error[:TEXT_MAX] or record.status) if record.status in FAULTS else None
    children = tuple(_step(record, timing) for timing in steps)
    return SpanFacts(f"infer {record.model[:TEXT_MAX]}", record.started_ns, end_ns, attributes, error, children)


def _request(record: Record) -> dict[str, Attribute]:
    ask, usage = record.ask, record.usage
    attributes: dict[str, Attribute] = {
        "weftline.model": record.model[:TEXT_MAX],
        "weftline.version": record.version,
        "weftline.protocol": ask.protocol,
        "weftline.status": record.status,
    }
    if ask.id:
        attributes["weftline.request_id"] = ask.id[:TEXT_MAX]
    if ask.caller:
        attributes["weftline.caller"] = ask.caller
    if ask.size_bytes:
        attributes["weftline.request_bytes"] = ask.size_bytes
    if record.pieces:
        attributes["weftline.pieces"] = record.pieces
    if usage.get("prompt_tokens"):
        attributes["gen_ai.operation.name"] = "generate_content" if "completion_tokens" in usage else "embeddings"
        attributes["gen_ai.provider.name"] = "weftline"
        attributes["gen_ai.request.model"] = record.model[:TEXT_MAX]
        attributes["gen_ai.usage.input_tokens"] = int(usage["prompt_tokens"])
        if usage.get("completion_tokens") is not None:
            attributes["gen_ai.usage.output_tokens"] = int(usage["completion_tokens"])
        if usage.get("finish_reason"):
            attributes["gen_ai.response.finish_reasons"] = (str(usage["finish_reason"]),)
        if record.first_ms is not None:
            attributes["gen_ai.latency.time_to_first_token"] = record.first_ms / 1000
    return attributes


def _step(record: Record, timing: StepTiming) -> SpanFacts:
    start_ns = record.started_ns + _ns(timing.started_ms - record.started_ms)
    attributes: dict[str, Attribute] = {
        "weftline.step": timing.step,
        "weftline.outcome": timing.outcome,
        "weftline.worker": timing.worker,
        "weftline.batch": timing.batch,
        "weftline.attempt": timing.attempts,
        "weftline.queue_seconds": timing.queued_ms / 1000,
        "weftline.batch_wait_seconds": timing.batch_wait_ms / 1000,
        "weftline.node_seconds": timing.node_ms / 1000,
    }
    if timing.element >= 0:
        attributes["weftline.element"] = timing.element
    error = timing.outcome if timing.outcome in ("failed", "lost") else None
    return SpanFacts(timing.step, start_ns, start_ns + _ns(timing.run_ms), attributes, error)


def _ns(ms: float) -> int:
    return round(ms * 1e6)
