"""The limits of rounds: one place says them, and buffers, graphs and the schedule are made for what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.llm import tiny
from weftline.engine.llm import startup
from weftline.engine.llm.attention import Span
from weftline.engine.llm.gpu.attention import GpuAttention
from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig, round_limits
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.nodes.contract import OpenContext, StepContext


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cpu", {}, RoundLimits(512, 32)),
        ("fake:0", {}, RoundLimits(512, 32)),
        ("cuda:1", {}, RoundLimits(2048, 256)),
        ("cuda:0", {"round_tokens_max": 16384, "sequences_max": 700}, RoundLimits(16384, 700)),
        ("cpu", {"sequences_max": 1}, RoundLimits(512, 1)),
    ],
)
def test_limits_follow_the_device_and_the_options(device, options, expected):
    assert round_limits(LlmConfig("m", **options), device) == expected


@pytest.mark.parametrize("options", [{}, {"round_tokens_max": 16384, "sequences_max": 700}])
def test_buffers_and_graphs_hold_what_the_schedule_plans(folder, monkeypatch, options):
    """Opened with the form of attention that a GPU has, which has buffers of fixed sizes."""
    made: list[RunnerOptions] = []

    def gpu_form(source: Any, given: RunnerOptions, *more: Any) -> Runner:
        made.append(given)
        return Runner.open(
            source, RunnerOptions(form="gpu", rows_max=given.rows_max, sequences_max=given.sequences_max)
        )

    class Opening(Runner):
        open = staticmethod(gpu_form)  # type: ignore[assignment]

    monkeypatch.setattr(startup, "Runner", Opening)
    config = LlmConfig(str(folder), speculation="draft", draft_model=str(folder), **options)
    engine, _, _ = startup.open_engine(config, OpenContext(base_dir=folder.parent))
    limits = engine._schedule.limits
    assert [(one.rows_max, one.sequences_max) for one in made] == [(limits.tokens_max, limits.sequences_max)] * 2
    form = engine.runner._backend
    assert isinstance(form, GpuAttention)
    assert form.buffers.limits.rows_max == limits.tokens_max
    count = min(limits.sequences_max, limits.tokens_max)
    form.fill([Span(row, 3, 1, PageTable([row % 5])) for row in range(count)])


def test_the_plan_says_the_limits_on_a_gpu():
    limits, not_here = Llm.plan_notes(LlmConfig("m"), StepContext(Path(), devices=("cuda:0", "cuda:1")))
    assert limits == (
        "at most 256 requests generate at a time (sequences_max), in rounds of at most 2048 tokens (round_tokens_max)"
    )
    (not_here,) = Llm.plan_notes(LlmConfig("m"), StepContext(Path(), devices=("cpu", "fake:0")))
    assert not_here.startswith("m is not on this machine: ")
