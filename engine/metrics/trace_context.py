"""W3C Trace Context headers (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
