"""A request as spans: when, what of, and nothing of its values."""

from __future__ import annotations

import pytest

from tests.engine.metrics.made import STARTED_NS, record, timing
from weftline.engine.metrics.reference import REQUEST_SPAN, STEP_SPAN
from weftline.engine.metrics.spans import SPANS_MAX, TEXT_MAX, TraceContext, parse, spans_of

MS = 1_000_000


def test_the_request_lasts_until_its_outputs_and_each_step_while_it_ran() -> None:
    span = spans_of(record(total_ms=20.0, timings=(timing("see"), timing("read"))))
    assert (span.name, span.start_ns, span.end_ns) == ("infer ocr", STARTED_NS, STARTED_NS + 20 * MS)
    assert [child.name for child in span.children] == ["see", "read"]
    assert (span.children[0].start_ns, span.children[0].end_ns) == (STARTED_NS + 3 * MS, STARTED_NS + 13 * MS)


def test_a_span_has_the_attributes_that_the_reference_lists() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "finish_reason": "stop"}
    everything = record(
        id="r-1", caller="line-3", size_bytes=10, first_ms=5.0, pieces=3, usage=usage,
        timings=(timing(element=2),) * (SPANS_MAX + 1),
    )  # fmt: skip
    span = spans_of(everything)
    assert set(span.attributes) == set(REQUEST_SPAN)
    assert set(span.children[0].attributes) == set(STEP_SPAN)


def test_a_request_of_many_elements_shows_some_and_counts_the_others() -> None:
    span = spans_of(record(timings=(timing(),) * 1000))
    assert len(span.children) == SPANS_MAX
    assert span.attributes["weftline.steps_left_out"] == 1000 - SPANS_MAX


def test_server_failures_are_error_spans_and_caller_mistakes_are_not() -> None:
    assert spans_of(record(status="UNAVAILABLE", error="the worker is gone")).error == "the worker is gone"
    assert spans_of(record(status="INTERNAL")).error == "INTERNAL"
    assert spans_of(record(status="INVALID_ARGUMENT", error="no such input")).error is None
    assert spans_of(record()).error is None


def test_failed_and_lost_steps_are_errors_and_skipped_ones_are_not() -> None:
    span = spans_of(record(timings=tuple(timing("s", how) for how in ("ok", "failed", "lost", "skipped"))))
    assert [child.error for child in span.children] == [None, "failed", "lost", None]


def test_a_language_model_says_its_tokens_as_opentelemetry_calls_them() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "finish_reason": "length"}
    span_attributes = spans_of(record("chat", usage=usage, first_ms=250.0, pieces=20)).attributes
    assert (span_attributes["gen_ai.usage.input_tokens"], span_attributes["gen_ai.usage.output_tokens"]) == (100, 20)
    assert (
        span_attributes["gen_ai.response.finish_reasons"] == ("length",)
        and span_attributes["gen_ai.request.model"] == "chat"
    )
    assert span_attributes["gen_ai.latency.time_to_first_token"] == 0.25
    embedding = spans_of(record("embed", usage={"prompt_tokens": 5})).attributes
    assert embedding["gen_ai.operation.name"] == "embeddings" and "gen_ai.usage.output_tokens" not in embedding


def test_a_count_that_an_external_engine_did_not_send_is_left_out() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": None, "finish_reason": "stop"}
    attributes = spans_of(record("chat", usage=usage)).attributes
    assert attributes["gen_ai.usage.input_tokens"] == 100 and "gen_ai.usage.output_tokens" not in attributes
    assert attributes["gen_ai.operation.name"] == "generate_content"
    neither = {"prompt_tokens": None, "completion_tokens": None, "finish_reason": "stop"}
    assert not [name for name in spans_of(record("chat", usage=neither)).attributes if name.startswith("gen_ai.usage")]


def test_texts_that_clients_chose_are_cut() -> None:
    span = spans_of(record("m" * 10_000, "INTERNAL", id="i" * 10_000, error="e" * 10_000))
    assert len(str(span.attributes["weftline.request_id"])) == len(span.error or "") == TEXT_MAX
    assert len(span.name) < 2 * TEXT_MAX


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = TraceContext(int(TRACE, 16), int(SPAN, 16), True)


def test_what_is_written_is_what_was_read() -> None:
    for header in (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"00-{'0' * 31}1-{'0' * 15}1-01"):
        assert str(parse(header)) == header


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("ff", True), ("02", False)])
def test_only_the_lowest_flag_says_whether_it_is_recorded(flags: str, sampled: bool) -> None:
    found = parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert found is not None and found.sampled is sampled


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert parse(f"cc-{TRACE}-{SPAN}-01") == parse(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings") == CONTEXT


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00_{TRACE}_{SPAN}_01",
        "0" * 100_000,
    ],
)
def test_what_is_malformed_is_ignored(header: str) -> None:
    assert parse(header) is None
