"""OpenTelemetry span export, after a request has ended.

    tracing = Tracing(to_collector("http://127.0.0.1:4317"))
    backend = LocalBackend(repository, served, observers=[tracing], begin=tracing.begin)
    ...
    tracing.close()

`begin` needs no package: it writes the context that the answer carries. Sending needs `weftline[trace]`; it happens in
a thread of OpenTelemetry's, and spans that it cannot get rid of are dropped, never waited for. Nothing global is set,
and no environment variable decides what is sent; headers and certificates for the collector come from the usual ones.
"""

from __future__ import annotations

import os
import random
import threading
from typing import TYPE_CHECKING, Any

from weftline.engine.metrics.spans import SpanFacts, TraceContext, parse, spans_of
from weftline.engine.serving.backend import Ask, Record
from weftline.errors import MissingPackage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

QUEUE_MAX, BATCH_MAX = 8192, 512
"""Most spans that wait to be sent, and in one message: about 8 MiB, and half a MiB."""

SEND_EVERY_S, SEND_MAX_S = 2.0, 5.0
"""Interval of sending spans, and timeout of one message."""

FLAG_SAMPLED, FLAG_OFF = 1, 0


def to_collector(endpoint: str) -> SpanExporter:
    """Return an exporter that sends OTLP over gRPC to 'http://host:4317', with TLS to 'https://...'."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise MissingPackage(error.name or "opentelemetry", "trace") from error
    return OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https:"), timeout=SEND_MAX_S)


class Tracing:
    """An Observer that turns requests into spans. Safe to use from several threads.

    exporter: where spans go; None: nowhere, and contexts are still given out.
    service:  `service.name` of all spans; `version` its version.
    share:    part of the requests without a context of their own that are recorded, from 0 to 1. For the others their
              caller has decided: what it records is recorded here.
    """

    def __init__(
        self, exporter: SpanExporter | None, *, service: str = "weftline", version: str = "", share: float = 1.0
    ) -> None:
        self._share = share
        self._random = random.Random(os.urandom(32))
        self._sender = _Sender(exporter, service, version) if exporter is not None else None

    def begin(self, ask: Ask) -> str:
        """Return the `traceparent` of the span that a request will have."""
        parent = parse(ask.traceparent) if ask.traceparent else None
        if parent is None:
            sampled = self._share >= 1 or self._random.random() < self._share
            return str(TraceContext(self._id(128), self._id(64), sampled))
        return str(TraceContext(parent.trace_id, self._id(64), parent.sampled))

    def __call__(self, record: Record) -> None:
        """Send the spans of a request that ended, if it is recorded."""
        own = parse(record.traceparent)
        if self._sender is None or own is None or not own.sampled:
            return
        parent = parse(record.ask.traceparent)
        facts = spans_of(record)
        is_child = parent is not None and parent.trace_id == own.trace_id
        self._sender.send(facts, own, parent if is_child else None, remote=True)
        for child in facts.children:
            self._sender.send(child, TraceContext(own.trace_id, self._id(64), True), own, remote=False)

    def flush(self) -> None:
        """Send what waits, now and in this thread."""
        if self._sender is not None:
            self._sender.processor.force_flush()

    def close(self, timeout_s: float = SEND_MAX_S) -> None:
        """Send what waits, for at most `timeout_s`, and end the thread that sends. Safe to call twice."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close(timeout_s)

    def _id(self, bits: int) -> int:
        return self._random.getrandbits(bits) or 1


class _Sender:
    """Spans with ids of ours, through OpenTelemetry's batching to an exporter."""

    def __init__(self, exporter: SpanExporter, service: str, version: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk import resources
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ModuleNotFoundError as error:
            raise MissingPackage(error.name or "opentelemetry", "trace") from error
        self._exporter = exporter
        self._trace: Any = trace
        self._span: type[ReadableSpan] = sdk.ReadableSpan
        service_attributes = {"service.name": service, "service.version": version, "telemetry.sdk.language": "python"}
        self._resource = resources.Resource({key: value for key, value in service_attributes.items() if value})
        self._scope = InstrumentationScope("weftline", version or None)
        self.processor: SpanProcessor = BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_MAX,
            schedule_delay_millis=SEND_EVERY_S * 1000,
            max_export_batch_size=BATCH_MAX,
            export_timeout_millis=SEND_MAX_S * 1000,
        )

    def send(self, facts: SpanFacts, own: TraceContext, parent: TraceContext | None, *, remote: bool) -> None:
        """Queue one span; `remote`: it answers a caller, and its parent is the caller's."""
        trace = self._trace
        status = trace.Status(trace.StatusCode.ERROR, facts.error) if facts.error is not None else trace.Status()
        self.processor.on_end(
            self._span(
                facts.name,
                context=self._context(own, False),
                parent=None if parent is None else self._context(parent, remote),
                resource=self._resource,
                attributes=facts.attributes,
                kind=trace.SpanKind.SERVER if remote else trace.SpanKind.INTERNAL,
                status=status,
                start_time=facts.start_ns,
                end_time=facts.end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def close(self, timeout_s: float) -> None:
        """End; an exporter that is still trying after `timeout_s` is ended first, which alone ends its trying."""
        impatience = threading.Timer(timeout_s, self._exporter.shutdown)
        impatience.daemon = True
        impatience.start()
        try:
            self.processor.shutdown()
        finally:
            impatience.cancel()

    def _context(self, place: TraceContext, remote: bool) -> Any:
        flags = self._trace.TraceFlags(FLAG_SAMPLED if place.sampled else FLAG_OFF)
        return self._trace.SpanContext(place.trace_id, place.span_id, remote, flags)
