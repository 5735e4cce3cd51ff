"""Requests add up under labels that no client can choose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.metrics.made import record, timing
from weftline.engine.metrics import requests, series
from weftline.engine.metrics.requests import Histogram, RequestMetrics
from weftline.engine.metrics.series import Series


def of(sums: RequestMetrics, one: Series) -> dict[tuple[str, ...], Any]:
    """Return a series' samples by labels; of a histogram its count and its sum."""
    found = {labels: value for listed, labels, value in sums.samples() if listed is one}
    return {
        labels: (value.count, pytest.approx(value.sum)) if isinstance(value, Histogram) else value
        for labels, value in found.items()
    }


def test_requests_count_by_model_protocol_and_status() -> None:
    sums = RequestMetrics()
    for status in ("OK", "OK", "UNAVAILABLE"):
        sums.take(record(status=status, size_bytes=100))
    sums.take(record("answer", protocol="http"))
    assert of(sums, series.REQUESTS) == {
        ("ocr", "grpc", "OK"): 2,
        ("ocr", "grpc", "UNAVAILABLE"): 1,
        ("answer", "http", "OK"): 1,
    }
    assert of(sums, series.DURATION) == {
        ("ocr", "ok"): (2, 0.04), ("ocr", "failed"): (1, 0.02), ("answer", "ok"): (1, 0.02),
    }  # fmt: skip
    assert of(sums, series.RECEIVED)["ocr",] == 300


def test_names_that_clients_make_up_become_no_labels() -> None:
    sums = RequestMetrics()
    for at in range(1000):
        sums.take(record(f"made-up-{at}", "NOT_FOUND", version=0, protocol=f"protocol-{at}", caller=f"caller-{at}"))
    sums.take(record(status="MADE_UP"))
    assert of(sums, series.REQUESTS) == {("", "other", "NOT_FOUND"): 1000, ("ocr", "grpc", "UNKNOWN"): 1}
    assert of(sums, series.CALLERS) == {}


def test_a_model_that_was_served_keeps_its_name_when_unavailable() -> None:
    sums = RequestMetrics()
    sums.take(record())
    sums.take(record(status="UNAVAILABLE", version=0))
    assert of(sums, series.REQUESTS) == {("ocr", "grpc", "OK"): 1, ("ocr", "grpc", "UNAVAILABLE"): 1}


def test_there_is_a_most_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MODELS_MAX", 2)
    sums = RequestMetrics()
    for name in ("a", "b", "c", "d"):
        sums.take(record(name))
    assert sorted(of(sums, series.REQUESTS)) == [("", "grpc", "OK"), ("a", "grpc", "OK"), ("b", "grpc", "OK")]


def test_callers_count_where_the_token_file_names_them() -> None:
    sums = RequestMetrics(callers=("line-3",))
    sums.take(record(caller="line-3"))
    sums.take(record(caller="line-3", status="NOT_FOUND"))
    sums.take(record(caller="unknown"))
    assert of(sums, series.CALLERS) == {("line-3", "OK"): 1, ("line-3", "NOT_FOUND"): 1}


def test_steps_count_by_outcome_and_skipped_ones_have_no_times() -> None:
    sums = RequestMetrics()
    sums.take(record(timings=(timing("see"), timing("read", "lost"), timing("read"), timing("fix", "skipped"))))
    assert of(sums, series.STEP_ITEMS) == {
        ("ocr", "see", "ok"): 1, ("ocr", "read", "lost"): 1, ("ocr", "read", "ok"): 1, ("ocr", "fix", "skipped"): 1,
    }  # fmt: skip
    assert of(sums, series.STEP_QUEUE)["ocr", "see", "ok"] == (1, 0.002)
    assert of(sums, series.STEP_RUN)["ocr", "see", "ok"] == (1, 0.010)
    assert of(sums, series.STEP_NODE)["ocr", "see", "ok"] == (1, 0.008)
    assert ("ocr", "fix", "skipped") not in of(sums, series.STEP_RUN)


def test_the_items_of_a_batch_make_up_one_call() -> None:
    sums = RequestMetrics()
    for _ in range(4):  # a batch of 4
        sums.take(record(timings=(timing(),)))
    sums.take(record(timings=(timing("see", "lost")._replace(batch=0),)))  # its worker died: unknown
    assert of(sums, series.STEP_CALLS) == {("ocr", "see"): 1.0}
    assert of(sums, series.STEP_BATCH) == {("ocr", "see"): (4, 16.0)}


def test_streamed_answers_have_a_first_piece() -> None:
    sums = RequestMetrics()
    sums.take(record(first_ms=5.0, pieces=7))
    sums.take(record())
    assert of(sums, series.FIRST_PIECE) == {("ocr",): (1, 0.005)}
    assert of(sums, series.PIECES) == {("ocr",): 7}


def test_a_language_models_answer_counts_each_gap_between_two_tokens() -> None:
    sums = RequestMetrics()
    usage = {"prompt_tokens": 100, "completion_tokens": 11, "finish_reason": "stop"}
    sums.take(record("chat", total_ms=1100.0, first_ms=100.0, pieces=11, usage=usage))
    sums.take(record("chat", total_ms=500.0, usage=usage))  # without a first token time
    sums.take(record("chat", "INTERNAL", usage=usage))
    assert of(sums, series.LLM_FIRST_TOKEN) == {("chat",): (1, 0.1)}
    assert of(sums, series.LLM_INTER_TOKEN) == of(sums, series.LLM_OUTPUT_TOKEN) == {("chat",): (10, 1.0)}
    assert of(sums, series.LLM_REQUEST_TOKEN) == {("chat",): (1, 0.1)}
    assert of(sums, series.LLM_E2E) == {("chat",): (2, 1.6)}
    assert of(sums, series.LLM_REQUEST_PROMPT) == {("chat",): (2, 200)}
    assert of(sums, series.LLM_REQUEST_GENERATED) == {("chat",): (2, 22)}


@pytest.mark.parametrize("usage", [{"prompt_tokens": "many"}, {"prompt_tokens": -1}, {"tokens": 5}, {"a": None}])
def test_a_usage_that_says_nothing_counts_nothing(usage: dict[str, Any]) -> None:
    sums = RequestMetrics()
    sums.take(record("chat", usage=usage))
    assert of(sums, series.LLM_E2E) == {}


def test_what_was_read_stays_as_it_was() -> None:
    sums = RequestMetrics()
    sums.take(record(timings=(timing(),)))
    before = list(sums.samples())
    sums.take(record(timings=(timing(),)))
    assert next(value for one, _, value in before if one is series.DURATION).count == 1  # type: ignore[union-attr]


def test_a_value_belongs_to_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 7.0):
        histogram.add(value)
    assert histogram.cumulative == [2, 3, 4, 5]
    assert (histogram.count, histogram.sum) == (5, 15.0)


def test_a_value_may_count_many_times() -> None:
    histogram = Histogram((1.0,))
    histogram.add(0.5, times=10)
    assert (histogram.count, histogram.sum) == (10, 5.0)


def test_a_copy_stays_as_it_was() -> None:
    histogram = Histogram((1.0,))
    copy = histogram.copy()
    histogram.add(0.5)
    assert (copy.count, copy.sum) == (0, 0.0)
