"""What /metrics answers for real sessions, in both formats, and that one bad session leaves the others alone."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.fire import wait_until
from tests.engine.metrics.made import install_nvml, record, timing
from tests.engine.metrics.test_snapshots import LLM, PIDS, FakeSession
from weftline.engine.metrics import series
from weftline.engine.metrics.registry import Metrics, exposition
from weftline.engine.metrics.requests import Histogram, Sample
from weftline.engine.session import Session, load
from weftline.errors import SessionClosed
from weftline.pipelines.spec.builder import Builder

ROOT = Path(__file__).parents[3]


def read(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return every sample by name and label values in alphabetical order of the labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


@pytest.fixture(scope="module")
def session() -> Any:
    p = Builder("shout", limits={"arena_bytes": 4 << 20})
    p.output("y", p.step("say", "echo", value=p.input("x", "text"), instances=2).value)
    with load(p).open() as session:
        yield session


def test_a_running_pipeline_is_shown(session: Session) -> None:
    metrics = Metrics(lambda: {"shout": session}, version="1.2.3")
    session.run(x="a" * 100_000)
    scraped = read(metrics)
    assert scraped["weftline_model_ready", "shout"] == 1
    assert scraped["weftline_requests_in_flight", "shout"] == 0
    assert (
        scraped["weftline_step_workers_ready", "shout", "say"] == scraped["weftline_step_workers", "shout", "say"] == 2
    )
    assert scraped["weftline_dispatches_total", "shout"] >= 1
    assert scraped["weftline_copied_bytes_total", "shout", "in"] >= 100_000
    assert scraped["weftline_arena_size_bytes", "shout"] >= 4 << 20
    for worker in ("say", "say-2"):
        assert scraped["weftline_worker_resident_memory_bytes", "shout", worker] > 1 << 20
        assert scraped["weftline_worker_cpu_seconds_total", "shout", worker] > 0
    assert scraped["process_resident_memory_bytes",] > 1 << 20
    assert any(key[0] == "weftline_build_info" and "1.2.3" in key for key in scraped)


def test_a_session_that_cannot_be_read_does_not_hide_the_others() -> None:
    class Gone(FakeSession):
        def stats(self) -> Mapping[str, Any]:
            raise SessionClosed("it ended this very moment")

    scraped = read(Metrics(lambda: {"gone": Gone(), "ocr": FakeSession()}))
    assert scraped["weftline_model_ready", "ocr"] == 1
    assert ("weftline_model_ready", "gone") not in scraped


def test_ingress_processes_are_shown_by_name_as_long_as_they_are_there() -> None:
    scraped = read(Metrics(dict, ingress=lambda: {"http": os.getpid(), "grpc-0": 2**22 + 1}))
    assert scraped["weftline_ingress_resident_memory_bytes", "http"] > 1 << 20
    assert scraped["weftline_ingress_cpu_seconds_total", "http"] > 0
    assert scraped["weftline_ingress_open_fds", "http"] > 3
    assert ("weftline_ingress_cpu_seconds_total", "grpc-0") not in scraped


def test_nothing_of_ours_is_in_the_registry_that_everybody_shares() -> None:
    metrics = Metrics(dict)
    metrics(record())
    assert b"weftline" not in prometheus_client.generate_latest()
    assert b"weftline_requests_total" not in Metrics(dict).render(), "and servers in one process do not meet"


def test_requests_that_end_during_a_scrape_are_all_counted() -> None:
    metrics = Metrics(dict)

    def ask(name: str) -> None:
        for at in range(100):
            metrics(record(f"{name}-{at}", timings=(timing("a"), timing("b"))))

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            metrics._samples()
    finally:
        sys.setswitchinterval(usual_s)
    assert sum(value for key, value in read(metrics).items() if key[0] == "weftline_requests_total") == 300


def test_series_stay_few_whatever_clients_ask_for() -> None:
    metrics = Metrics(lambda: {"ocr": FakeSession()})
    metrics(record(timings=(timing(),)))
    metrics(record("../etc/passwd", "NOT_FOUND", version=0, protocol="x", caller="unknown"))
    few = len(read(metrics))
    for at in range(500):
        metrics(record(f"n{at}", "NOT_FOUND", version=0, protocol=f"p{at}", caller=f"c{at}", id=f"i{at}"))
    assert len(read(metrics)) == few


@pytest.mark.slow
def test_a_language_model_is_shown_in_vllms_series(warm: None) -> None:
    pytest.importorskip("torch")
    p = Builder("chat", base_dir=ROOT, limits={"arena_bytes": 4 << 20})
    sampling = {"tokens_max": 8, "ignore_eos": True}
    step = p.step(
        "answer", "llm", model="examples/models/shapes-chat", prompt=p.input("question", "text"), sampling=sampling
    )
    p.output("text", step.text)
    p.output("usage", step.usage)
    with load(p).open() as session:
        metrics = Metrics(lambda: {"chat": session})
        usage = session.run(question="The photo shows: 1 red circle. How many circles are there?")["usage"]
        metrics(record("chat", first_ms=2.0, pieces=8, usage=usage))

        def scraped(name: str, *labels: str) -> float:
            return read(metrics).get((name, *sorted(["chat", *labels])), -1)

        wait_until(lambda: scraped("vllm:generation_tokens_total", "answer") == 8, 20)
        shown = read(metrics)
    assert shown["vllm:prompt_tokens_total", "answer", "chat"] == usage["prompt_tokens"]
    assert shown["vllm:request_success_total", "answer", "length", "chat"] == 1
    assert shown["vllm:num_requests_running", "answer", "chat"] == 0
    assert 0 <= shown["vllm:kv_cache_usage_perc", "answer", "chat"] < 1
    assert shown["vllm:request_generation_tokens_sum", "chat"] == 8
    assert shown["vllm:time_to_first_token_seconds_count", "chat"] == 1
    assert ("weftline_node_figure", "rounds_total", "chat", "answer", "answer") in shown


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


def test_every_series_is_written_with_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch)
    session = FakeSession({"answer": {"answer": LLM}})
    metrics = Metrics(
        lambda: {"ocr": session}, callers=("line-3",), ingress=lambda: PIDS, log_dropped=lambda: {"http": 1}
    )
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    for at in range(20):
        metrics(record(f"m{at % 3}", caller="line-3", timings=(timing(), timing("read", "failed"))))
        metrics(record("chat", first_ms=5.0, pieces=3, usage=usage))
    samples = metrics._samples()
    text = exposition(series.ALL, samples)
    families = list(text_string_to_metric_families(text))
    assert len(parsed(text)) > 300 and not any(math.isnan(value) for value in parsed(text).values())
    kinds = {one.name.removesuffix("_total") if one.kind == "counter" else one.name: one.kind for one in series.ALL}
    assert {family.name: family.type for family in families} == kinds
