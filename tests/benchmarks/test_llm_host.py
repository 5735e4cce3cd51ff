"""Host work of a streaming round, counted in calls: a time would depend on the machine and on what else it does."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from benchmarks import llm_host

CALLS_MAX = 55
"""Calls for each stream and round, those of launching left out; 65 while each token was decoded twice."""
ROUNDS = 6


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_host, "PAGES", 512)


def _calls(count: int) -> float:
    """Return how many calls, of functions in Python and in C, a round of `count` streams takes."""
    streams = llm_host.Streams(count, "bytes")
    runner: Any = streams.engine.runner
    launch = runner.launch
    counted = 0
    launching = False

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call") and not launching

    def uncounted(*arguments: Any) -> Any:
        nonlocal launching
        launching = True
        try:
            return launch(*arguments)
        finally:
            launching = False

    runner.launch = uncounted
    try:
        for _ in range(3):
            streams.round()
        sys.setprofile(note)
        sent = sum(streams.round() for _ in range(ROUNDS))
        sys.setprofile(None)
    finally:
        sys.setprofile(None)
        streams.close()
    assert sent > 0.9 * count * ROUNDS, "nearly every token is a piece"
    return counted / ROUNDS


def test_a_streaming_round_takes_few_calls_for_each_stream() -> None:
    few, many = 4, 16
    assert (_calls(many) - _calls(few)) / (many - few) < CALLS_MAX
