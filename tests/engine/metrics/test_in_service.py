"""Figures and spans of requests that real workers answered, and of those they did not, as a backend tells of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.engine.metrics.test_registry import read
from weftline.engine.metrics.registry import Metrics
from weftline.engine.metrics.traces import Tracing
from weftline.engine.repository import Repository
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.local import LocalBackend
from weftline.errors import StepError, UnknownModel

SHOP = """weftline: 1
name: shop
inputs: {x: text}
steps:
  say: {node: echo, inputs: {value: x}}
  check: {node: fail, equals: poison, inputs: {value: say.value}}
outputs: {y: check.value}
"""
TRICKLE = """weftline: 1
name: words
inputs: {text: text}
steps:
  slow: {node: trickle, pieces: 3, inputs: {value: text}}
outputs: {text: slow.value}
"""
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.slow
def test_what_a_backend_tells_becomes_series_and_spans(tmp_path: Path) -> None:
    sent = InMemorySpanExporter()
    tracing = Tracing(sent)
    served = {}
    for name, text in {"shop": SHOP, "words": TRICKLE}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        served[name] = ServedPipeline(tmp_path / f"{name}.yaml")

    async def serve() -> tuple[dict[tuple[str, ...], float], str]:
        with Repository() as repository:
            metrics = Metrics(lambda: backend.sessions(), callers=("line-3",))
            backend = LocalBackend(
                repository, served, observers=[metrics, tracing], begin=tracing.begin, metrics=metrics.render
            )
            await backend.open()
            asked = Ask("shop", {"x": "a"}, protocol="grpc", caller="line-3", traceparent=f"00-{TRACE}-{SPAN}-01")
            with await backend.ask(asked) as answer:
                own = answer.traceparent
            with pytest.raises(StepError):
                await backend.ask(Ask("shop", {"x": "poison"}, protocol="grpc"))
            with pytest.raises(UnknownModel):
                await backend.ask(Ask("../etc/passwd", {}, protocol="http"))
            async for _ in backend.stream(Ask("words", {"text": "a"}, protocol="grpc-stream")):
                pass
            samples = read(metrics)
            assert await backend.metrics() != b""
            return samples, own

    samples, own = asyncio.run(asyncio.wait_for(serve(), 60))
    tracing.flush()
    assert samples["weftline_requests_total", "shop", "grpc", "OK"] == 1
    assert samples["weftline_requests_total", "shop", "grpc", "INTERNAL"] == 1
    assert samples["weftline_requests_total", "", "http", "NOT_FOUND"] == 1
    assert samples["weftline_requests_total", "words", "grpc-stream", "OK"] == 1
    assert samples["weftline_request_pieces_total", "words"] == 3
    assert samples["weftline_caller_requests_total", "line-3", "OK"] == 1
    assert samples["weftline_step_items_total", "shop", "ok", "say"] == 2
    assert samples["weftline_step_items_total", "shop", "failed", "check"] == 1
    assert samples["weftline_step_workers_ready", "words", "slow"] == 1

    spans = sent.get_finished_spans()
    first = next(one for one in spans if one.context is not None and f"{one.context.span_id:016x}" in own)
    assert first.parent is not None and f"{first.parent.span_id:016x}" == SPAN
    steps = [one for one in spans if one.parent is not None and one.parent.span_id == first.context.span_id]  # type: ignore[union-attr]
    assert [one.name for one in steps] == ["say", "check"]
    for one in steps:
        assert one.start_time is not None and one.end_time is not None
        assert first.start_time is not None and first.end_time is not None
        slack_ns = 50_000_000  # two clocks, and a busy machine
        assert first.start_time - slack_ns <= one.start_time <= one.end_time <= first.end_time + slack_ns
    assert sorted(one.name for one in spans if one.parent is None or one.parent.is_remote) == [
        "infer ../etc/passwd", "infer shop", "infer shop", "infer words",
    ]  # fmt: skip
    tracing.close()
