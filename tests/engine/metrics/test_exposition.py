"""The text that Prometheus reads, judged by prometheus_client's own readers."""

from __future__ import annotations

import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.metrics.made import install_nvml, record, timing
from tests.engine.metrics.test_snapshots import LLM, PIDS, FakeSession
from weftline.engine.metrics import series
from weftline.engine.metrics.exposition import exposition
from weftline.engine.metrics.histogram import Histogram
from weftline.engine.metrics.registry import Metrics
from weftline.engine.metrics.requests import Sample


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def test_labels_hold_any_text() -> None:
    label = 'a "quoted" \\ back\nline, {braces} \u00e9'
    samples: list[Sample] = [(series.MODEL_READY, (label,), 1.0)]
    assert parsed(exposition(series.ALL, samples)) == {("weftline_model_ready", frozenset({("model", label)})): 1.0}


def test_a_histogram_has_its_buckets_their_sum_and_their_count() -> None:
    histogram = Histogram(series.STEP_BATCH.bounds)
    for value in (1, 4, 4, 1000):
        histogram.add(value)
    text = exposition(series.ALL, [(series.STEP_BATCH, ("ocr", "see"), histogram)])
    of = {"model": "ocr", "step": "see"}
    read = parsed(text)

    def at(name: str, **more: str) -> float:
        return read[name, frozenset({**of, **more}.items())]

    assert [at("weftline_step_batch_items_bucket", le=le) for le in ("1.0", "2.0", "4.0", "256.0", "+Inf")] == [
        1,
        1,
        3,
        3,
        4,
    ]
    assert (at("weftline_step_batch_items_sum"), at("weftline_step_batch_items_count")) == (1009, 4)


def test_both_formats_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch)
    session = FakeSession({"answer": {"answer": LLM}})
    metrics = Metrics(lambda: {"ocr": session}, callers=("line-3",), ingress=lambda: PIDS)
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    for at in range(20):
        metrics(record(f"m{at % 3}", caller="line-3", timings=(timing(), timing("read", "failed"))))
        metrics(record("chat", first_ms=5.0, pieces=3, usage=usage))
    samples = metrics._samples()
    plain = parsed(exposition(series.ALL, samples))
    families = list(read_openmetrics(exposition(series.ALL, samples, openmetrics=True) + "# EOF\n"))
    assert len(plain) > 300 and not any(math.isnan(value) for value in plain.values())
    assert plain == {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
    kinds = {one.name.removesuffix("_total") if one.kind == "counter" else one.name: one.kind for one in series.ALL}
    assert {family.name: family.type for family in families} == kinds
