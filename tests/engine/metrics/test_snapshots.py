"""Series of open sessions: what a snapshot holds, under the names of the table."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.metrics.made import install_nvml, record, timing
from weftline.engine.metrics import series
from weftline.engine.metrics.registry import Metrics
from weftline.engine.metrics.snapshots import ProcessUsage, Shown, samples, usage_of
from weftline.engine.runtime.health import Health

LLM = {
    "running": 3, "waiting": 2, "paused": 1, "pages_used": 30, "pages_idle": 50, "pages_free": 20, "page_bytes": 4096,
    "rounds_total": 9, "preemptions_total": 4, "prefix_asked_tokens_total": 100, "prefix_hit_tokens_total": 60,
    "draft_tokens_total": 10, "accepted_tokens_total": 7, "prompt_tokens_total": 500, "completion_tokens_total": 200,
    "finished_stop_total": 5, "finished_length_total": 6, "finished_error_total": 7, "finished_abort_total": 8,
}  # fmt: skip

PIDS = {"see": os.getpid(), "see-2": 2**22 + 1}
"""Pids of an existing process and of one that cannot exist."""


def objective(answers: int, over: int, p99_ms: float | None) -> dict[str, Any]:
    met = None if p99_ms is None else p99_ms <= 250.0
    return {
        "latency_p99_ms": 250.0, "answers": answers, "over": over, "recent": answers, "recent_p99_ms": p99_ms,
        "met": met,
    }  # fmt: skip


class FakeSession:
    """A session that returns the given stats."""

    def __init__(self, figures: Mapping[str, Any] | None = None, **more: Any) -> None:
        self.values = {
            "requests": {"open": 7}, "queued": {"see": 4}, "dispatches": 10, "items": 25, "retried": 1,
            "dropped_late": 2, "stale_messages": 6, "output_dropped_bytes": {"see": 77},
        "worker_deaths_by": [("see", "signal", 3)], "worker_restarts": 2, "quarantined": 1,
            "copied_bytes": {"in": 100, "between": 0, "out": 50},
            "workers": {"see": {"ready": 1, "asleep": 1, "all": 2}},
            "arena": {
                "size_bytes": 1000, "leased_bytes": 300, "quarantined_bytes": 64, "blocks": 5, "stale_total": 0,
            },
            "slo": objective(40, 3, 300.0),
            "unfinished": 2, "batches": {"see": {"items_max": 4, "out_of_memory": 3}},
            "kv": {"cuda:0": {"total_bytes": 90, "unassigned_bytes": 10, "held_bytes": {"answer": 80},
                              "used_bytes": {"answer": 33}}},
            "idle": {"see": {"state": "asleep", "slept": 3, "woken": 2, "freed_bytes": 5, "wake_ms": 250.0}},
            "device_memory": {
                "cuda:0": {"left_bytes": 40, "workers": {"see": 50},
                           "arenas": {"see": 8}, "claims": [("see", "context", 6)],
                           "steps": {"see": {"open_bytes": 20, "peak_bytes": 30}}},
            },
            "figures": figures or {}, "deployments": {"see": "see"}, "version": 4, "draining": False, **more,
        }  # fmt: skip

    def stats(self) -> Mapping[str, Any]:
        return self.values

    def health(self) -> Health:
        return Health(True, {"see": True})

    def pids(self) -> Mapping[str, int]:
        return PIDS


def seen(session: FakeSession, usage: Mapping[int, ProcessUsage] | None = None) -> dict[tuple[str, ...], float]:
    found = samples("ocr", session, (usage or {}).get)
    return {(one.name, *labels): value for one, labels, value in found if isinstance(value, int | float)}


def test_what_several_models_share_is_shown_once() -> None:
    shared = {"engine": 1, "deployments": {"see": "see"}}
    sessions = {name: FakeSession(**shared) for name in ("ocr", "ocr.see")}
    found: list[tuple[str, ...]] = []
    shown, usage = Shown(), dict.fromkeys(PIDS.values(), ProcessUsage(1, 1.0, 1))
    for name, session in sessions.items():
        found += [(one.name, *labels) for one, labels, _ in samples(name, session, usage.get, shown)]
    names = [one[0] for one in found]
    for once in ("weftline_dispatches_total", "weftline_arena_size_bytes", "weftline_step_queue_depth"):
        assert names.count(once) == 1, once
    assert names.count("weftline_worker_resident_memory_bytes") == len(PIDS)
    assert names.count("weftline_model_ready") == 2 and names.count("weftline_requests_in_flight") == 2
    assert ("weftline_step_deployment_info", "ocr.see", "see", "ocr.see") in found, "under the first of them"


def test_a_snapshot_is_shown_under_its_model_and_steps() -> None:
    values = seen(FakeSession())
    assert values["weftline_model_ready", "ocr"] == 1 and values["weftline_model_version", "ocr"] == 4
    assert values["weftline_requests_in_flight", "ocr"] == 7
    assert values["weftline_step_queue_depth", "ocr", "see"] == 4
    assert (values["weftline_step_workers", "ocr", "see"], values["weftline_step_workers_ready", "ocr", "see"]) == (
        2,
        1,
    )
    assert values["weftline_step_workers_asleep", "ocr", "see"] == 1
    assert (values["weftline_step_sleeps_total", "ocr", "see"], values["weftline_step_wakes_total", "ocr", "see"]) == (
        3,
        2,
    )
    assert values["weftline_step_wake_seconds", "ocr", "see"] == 0.25
    assert values["weftline_device_left_bytes", "ocr", "cuda:0"] == 40
    assert values["weftline_device_worker_bytes", "ocr", "cuda:0", "see"] == 50
    assert values["weftline_device_step_bytes", "ocr", "cuda:0", "see", "peak"] == 30
    assert values["weftline_copied_bytes_total", "ocr", "out"] == 50
    assert values["weftline_arena_leased_bytes", "ocr"] == 300
    assert (
        values["weftline_arena_quarantined_bytes", "ocr"] == 64 and values["weftline_dispatches_unfinished", "ocr"] == 2
    )
    assert values["weftline_step_batch_items_max", "ocr", "see"] == 4
    assert values["weftline_step_out_of_memory_total", "ocr", "see"] == 3
    assert values["weftline_step_output_dropped_bytes_total", "ocr", "see"] == 77
    assert values["weftline_worker_deaths_total", "ocr", "see", "signal"] == 3
    assert values["weftline_worker_restarts_total", "ocr"] == 2
    assert values["weftline_stale_messages_total", "ocr"] == 6
    assert values["weftline_kv_unassigned_bytes", "ocr", "cuda:0"] == 10
    assert values["weftline_kv_used_bytes", "ocr", "cuda:0", "answer"] == 33


def test_the_latency_objective_is_shown_where_there_is_one() -> None:
    values = seen(FakeSession())
    assert values["weftline_slo_latency_objective_seconds", "ocr"] == 0.25
    assert values["weftline_slo_latency_recent_seconds", "ocr"] == 0.3
    assert values["weftline_slo_answers_total", "ocr"] == 40 and values["weftline_slo_answers_over_total", "ocr"] == 3
    idle = FakeSession(slo=objective(0, 0, None))
    assert ("weftline_slo_latency_recent_seconds", "ocr") not in seen(idle)
    assert not any(name.startswith("weftline_slo") for name, *_ in seen(FakeSession(slo={})))


def test_an_llm_steps_figures_have_vllms_names_and_its_own_besides() -> None:
    values = seen(FakeSession({"answer": {"answer": LLM, "answer-2": LLM}}))
    assert values["vllm:num_requests_running", "ocr", "answer"] == 3
    assert values["vllm:num_requests_waiting", "ocr", "answer-2"] == 2
    assert values["vllm:kv_cache_usage_perc", "ocr", "answer"] == 0.3, "pages kept for reuse count as free"
    assert values["vllm:prefix_cache_queries_total", "ocr", "answer"] == 100
    assert values["vllm:prefix_cache_hits_total", "ocr", "answer"] == 60
    assert values["vllm:request_success_total", "ocr", "answer", "length"] == 6
    assert values["vllm:spec_decode_num_accepted_tokens_total", "ocr", "answer"] == 7
    own = {labels[-1] for name, *labels in values if name == "weftline_node_figure"}
    assert own == {"paused", "page_bytes", "rounds_total"}


def test_other_nodes_figures_keep_the_names_the_node_gave_them() -> None:
    values = seen(FakeSession({"see": {"see": {"running": 3.0, "frames_total": 9.0}}}))
    assert values["weftline_node_figure", "ocr", "see", "see", "running"] == 3
    assert values["weftline_node_figure", "ocr", "see", "see", "frames_total"] == 9
    assert not any(name.startswith("vllm:") for name, *_ in values)


def test_worker_processes_are_shown_as_far_as_they_can_be_seen() -> None:
    values = seen(
        FakeSession(), {PIDS["see"]: ProcessUsage(5000, 1.5, 9), PIDS["see-2"]: ProcessUsage(6000, 2.5, None)}
    )
    assert values["weftline_worker_resident_memory_bytes", "ocr", "see"] == 5000
    assert values["weftline_worker_cpu_seconds_total", "ocr", "see-2"] == 2.5
    assert values["weftline_worker_open_fds", "ocr", "see"] == 9
    assert ("weftline_worker_open_fds", "ocr", "see-2") not in values


def test_every_series_has_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch)
    metrics = Metrics(
        lambda: {"ocr": FakeSession({"a": {"a": LLM}})},
        callers=("line-3",),
        ingress=lambda: {"http": os.getpid()},
        log_dropped=lambda: {"engine": 0},
    )
    usage = {"prompt_tokens": 9, "completion_tokens": 9}
    metrics(record(caller="line-3", first_ms=1.0, pieces=2, usage=usage, timings=(timing(),)))
    shown = {one.name for one, _, _ in metrics._samples()}
    assert {one.name for one in series.ALL} - shown == set()


def test_a_process_is_seen_with_its_memory_processor_time_and_descriptors() -> None:
    before = usage_of(os.getpid())
    assert before is not None and before.descriptors is not None
    kept = [Path(os.devnull).open() for _ in range(5)]  # noqa: SIM115
    filled = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never the heap's freed pages
    for page in range(0, len(filled), mmap.PAGESIZE):
        filled[page] = 1
    until_s = time.process_time() + 0.1
    while time.process_time() < until_s:
        pass
    after = usage_of(os.getpid())
    for one in kept:
        one.close()
    assert after is not None and after.descriptors == before.descriptors + 5
    assert after.resident_bytes - before.resident_bytes > 32 << 20
    assert 0.05 <= after.cpu_s - before.cpu_s < 5
    filled.close()


def test_nothing_is_said_of_a_process_that_is_not_there() -> None:
    assert usage_of(2**22 + 1) is None
