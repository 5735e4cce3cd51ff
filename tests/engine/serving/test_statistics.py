"""Figures of ModelStatistics: sums of records, by model, version and step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.backend import Ask, Record
from weftline.engine.serving.statistics import Batches, ModelFigures, Spent, Statistics

MS = 1_000_000


def record(
    model: str = "ocr", *timings: StepTiming, version: int = 1, status: str = "OK", total_ms: float = 10.0
) -> Record:
    return Record(model, version, status, 5_000 * MS, total_ms, Ask(model, {}), timings)


def timing(step: str, queued_ms: float = 1.0, run_ms: float = 4.0, batch: int = 1, outcome: str = "ok") -> StepTiming:
    return StepTiming(step, queued_ms, run_ms, batch, outcome=outcome)


def figures_of(statistics: Statistics, versions: Mapping[str, int]) -> Mapping[str, ModelFigures]:
    found: Sequence[ModelFigures] = asyncio.run(statistics.tell(versions))
    return {one.name: one for one in found}


def test_requests_are_added_up_for_the_model_and_for_its_steps() -> None:
    statistics = Statistics()
    statistics(record("ocr", timing("find"), timing("read", 2.0, 3.0)))
    statistics(record("ocr", timing("find"), total_ms=6.0, status="INTERNAL"))
    figures = figures_of(statistics, {"ocr": 1})
    assert list(figures) == ["ocr", "ocr.find", "ocr.read"]
    assert figures["ocr"].success == Spent(1, 10 * MS) and figures["ocr"].fail == Spent(1, 6 * MS)
    assert figures["ocr"].queue == Spent(1, 4 * MS) and figures["ocr"].compute_infer == Spent(1, 11 * MS)
    assert figures["ocr.find"].success == Spent(2, 10 * MS) and figures["ocr.find"].last_ms == 5_000
    assert figures["ocr.read"].compute_infer == Spent(1, 3 * MS)


def test_a_call_that_was_shared_counts_once() -> None:
    statistics = Statistics()
    for _ in range(3):
        statistics(record("ocr", timing("find", batch=3, run_ms=6.0)))
    find = figures_of(statistics, {"ocr": 1})["ocr.find"]
    assert (find.inferences, find.executions) == (3, 1)
    assert find.batches == (Batches(3, Spent(1, 6 * MS)),)


def test_what_was_skipped_did_not_run_and_what_failed_failed() -> None:
    statistics = Statistics()
    statistics(record("ocr", timing("a", outcome="skipped"), timing("b", outcome="failed"), timing("b")))
    figures = figures_of(statistics, {"ocr": 1})
    assert list(figures) == ["ocr", "ocr.b"]
    assert (figures["ocr.b"].success.count, figures["ocr.b"].fail.count) == (1, 1)


def test_a_new_version_starts_at_zero_without_requests_of_the_old_one() -> None:
    statistics = Statistics()
    statistics(record("ocr", timing("find")))
    assert figures_of(statistics, {"ocr": 2})["ocr"] == ModelFigures("ocr", 2)
    statistics(record("ocr", timing("find"), version=2))
    statistics(record("ocr", timing("find"), version=1))
    assert figures_of(statistics, {"ocr": 2})["ocr"].success.count == 1


def test_models_without_requests_are_not_kept() -> None:
    statistics = Statistics()
    for place in range(100):
        statistics(record(f"made-up-{place}", version=0, status="NOT_FOUND"))
    assert figures_of(statistics, {"made-up-1": 1})["made-up-1"] == ModelFigures("made-up-1", 1)
    assert not statistics._models


def test_an_exposed_step_appears_once_as_the_model() -> None:
    statistics = Statistics()
    statistics(record("ocr", timing("find")))
    figures = asyncio.run(statistics.tell({"ocr": 1, "ocr.find": 1}))
    assert [one.name for one in figures] == ["ocr", "ocr.find"]
    assert figures[1] == ModelFigures("ocr.find", 1)
