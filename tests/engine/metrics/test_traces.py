"""Spans have the ids of the responses, are children of the caller's span, and are sent only when enabled."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.engine.metrics.made import STARTED_NS, record, timing
from weftline.engine.metrics.spans import parse
from weftline.engine.metrics.traces import Tracing, to_collector

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture
def sent() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(sent: InMemorySpanExporter) -> Iterator[Tracing]:
    tracing = Tracing(sent, service="shop", version="1.2.3")
    yield tracing
    tracing.close()


def spans(tracing: Tracing, sent: InMemorySpanExporter) -> list[ReadableSpan]:
    tracing.flush()
    return list(sent.get_finished_spans())


def test_a_request_is_a_span_under_the_ids_that_were_given_out(tracing: Tracing, sent: InMemorySpanExporter) -> None:
    own = tracing.begin(record().ask)
    tracing(record(own=own, timings=(timing("see"), timing("read")), id="r-1"))
    request, see, read = spans(tracing, sent)
    context = parse(own)
    assert context is not None and request.context is not None
    assert (request.context.trace_id, request.context.span_id) == (context.trace_id, context.span_id)
    assert (request.name, request.kind, request.parent) == ("infer ocr", SpanKind.SERVER, None)
    assert (request.start_time, request.end_time) == (STARTED_NS, STARTED_NS + 20_000_000)
    assert request.attributes is not None and request.attributes["weftline.request_id"] == "r-1"
    assert dict(request.resource.attributes)["service.name"] == "shop"
    for step in (see, read):
        assert step.parent is not None and step.parent.span_id == context.span_id and not step.parent.is_remote
        assert step.context is not None and step.context.trace_id == context.trace_id
        assert step.kind is SpanKind.INTERNAL and step.start_time == STARTED_NS + 3_000_000
    assert len({span.context.span_id for span in (request, see, read) if span.context}) == 3


def test_a_callers_context_makes_the_span_its_child(tracing: Tracing, sent: InMemorySpanExporter) -> None:
    asked = record(traceparent=SAMPLED)
    own = tracing.begin(asked.ask)
    assert own.startswith(f"00-{TRACE}-") and own.endswith("-01") and SPAN not in own
    tracing(record(traceparent=SAMPLED, own=own))
    [span] = spans(tracing, sent)
    assert span.parent is not None and f"{span.parent.span_id:016x}" == SPAN and span.parent.is_remote


def test_an_unsampled_trace_is_not_recorded_and_its_context_continues(
    tracing: Tracing, sent: InMemorySpanExporter
) -> None:
    own = tracing.begin(record(traceparent=NOT_SAMPLED).ask)
    assert own.startswith(f"00-{TRACE}-") and own.endswith("-00")
    tracing(record(traceparent=NOT_SAMPLED, own=own, timings=(timing(),)))
    assert spans(tracing, sent) == []


@pytest.mark.parametrize("header", ["nonsense", f"00-{'0' * 32}-{SPAN}-01", SAMPLED + "x", "\r\nx: y", SAMPLED.upper()])
def test_a_malformed_context_is_ignored(tracing: Tracing, sent: InMemorySpanExporter, header: str) -> None:
    own = tracing.begin(record(traceparent=header).ask)
    context = parse(own)
    assert context is not None and context.sampled and TRACE not in own
    tracing(record(traceparent=header, own=own))
    [span] = spans(tracing, sent)
    assert span.parent is None


def test_two_requests_share_no_id(tracing: Tracing) -> None:
    begun = [tracing.begin(record().ask) for _ in range(1000)]
    assert len({own.split("-")[1] for own in begun}) == len({own.split("-")[2] for own in begun}) == 1000


def test_a_share_of_the_requests_is_recorded(sent: InMemorySpanExporter) -> None:
    tracing = Tracing(sent, share=0.25)
    recorded = sum(tracing.begin(record().ask).endswith("-01") for _ in range(4000))
    assert 700 < recorded < 1300
    assert tracing.begin(record(traceparent=SAMPLED).ask).endswith("-01"), "its caller has decided"
    tracing.close()
    nothing = Tracing(None, share=0.0)
    assert nothing.begin(record().ask).endswith("-00")


def test_failures_are_marked(tracing: Tracing, sent: InMemorySpanExporter) -> None:
    own = tracing.begin(record().ask)
    tracing(record(status="UNAVAILABLE", error="a worker died", own=own, timings=(timing("see", "lost"),)))
    request, step = spans(tracing, sent)
    assert (request.status.status_code, request.status.description) == (StatusCode.ERROR, "a worker died")
    assert (step.status.status_code, step.status.description) == (StatusCode.ERROR, "lost")


def test_a_record_without_a_context_of_ours_sends_nothing(tracing: Tracing, sent: InMemorySpanExporter) -> None:
    tracing(record())
    tracing(record(own="nonsense"))
    assert spans(tracing, sent) == []


def test_after_close_nothing_is_sent_and_nothing_fails(sent: InMemorySpanExporter) -> None:
    tracing = Tracing(sent)
    own = tracing.begin(record().ask)
    tracing.close()
    tracing.close()
    tracing(record(own=own))
    assert parse(tracing.begin(record().ask)) is not None
    assert sent.get_finished_spans() == ()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.kept: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.kept.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_a_real_collector_gets_them_over_otlp() -> None:
    collector = Collector()
    tracing = Tracing(to_collector(f"http://127.0.0.1:{collector.port}"), version="1.2.3")
    own = tracing.begin(record(traceparent=SAMPLED).ask)
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "finish_reason": "stop"}
    tracing(record("chat", traceparent=SAMPLED, own=own, usage=usage, timings=(timing("answer"),)))
    tracing.close()
    collector.server.stop(0)
    [request] = collector.kept
    [of_resource] = request.resource_spans
    assert {one.key: one.value.string_value for one in of_resource.resource.attributes}["service.version"] == "1.2.3"
    infer, answer = of_resource.scope_spans[0].spans
    assert infer.trace_id.hex() == TRACE and infer.parent_span_id.hex() == SPAN
    assert answer.parent_span_id == infer.span_id and answer.name == "answer"
    attributes = {one.key: one.value for one in infer.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 20
    assert [v.string_value for v in attributes["gen_ai.response.finish_reasons"].array_value.values] == ["stop"]
    assert (infer.start_time_unix_nano, answer.end_time_unix_nano) == (STARTED_NS, STARTED_NS + 13_000_000)


def test_a_collector_that_is_not_there_is_not_waited_for() -> None:
    tracing = Tracing(to_collector("http://127.0.0.1:1"))
    own = tracing.begin(record().ask)
    began = time.perf_counter()
    for _ in range(3000):
        tracing(record(own=own, timings=(timing(),) * 3))
    assert time.perf_counter() - began < 10
    began = time.perf_counter()
    tracing.close(timeout_s=0.2)
    assert time.perf_counter() - began < 10


def test_contexts_work_without_opentelemetry_and_sending_names_the_package() -> None:
    script = """
import sys
for name in ("opentelemetry", "grpc"):
    sys.modules[name] = None
from weftline.engine.serving.backend import Ask
from weftline.engine.metrics.traces import Tracing, to_collector
from weftline.errors import MissingPackage
tracing = Tracing(None)
print(len(tracing.begin(Ask("ocr", {}))))
try:
    to_collector("http://127.0.0.1:4317")
except MissingPackage as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.splitlines()[0] == "55", ended.stderr
    assert "weftline[trace]" in ended.stdout
