"""How much of a long prompt a round reads: a made-up machine, told times."""

from __future__ import annotations

import random

import pytest

from weftline.engine.llm.pace import CHUNK_FIRST, CHUNK_MIN, Pace


def _play(quiet_ms: float, token_ms: float, noise: float, rounds: int = 300, seed: int = 1) -> tuple[Pace, list[float]]:
    """Rounds of a machine on which a prompt's token costs `token_ms`; returns how long mixed ones took."""
    pace, rng, took = Pace(), random.Random(seed), []
    for at in range(rounds):
        chunk = pace.chunk(8) or 0 if at >= 20 else 0
        ms = (quiet_ms + token_ms * chunk) * (1 + noise * rng.random())
        pace.note(8, chunk, ms)
        if chunk:
            took.append(ms)
    return pace, took


@pytest.mark.parametrize("token_ms", [0.01, 0.05, 0.2])
def test_rounds_with_chunks_stay_under_twice_a_quiet_one_and_use_most_of_it(token_ms):
    _, took = _play(10.0, token_ms, 0.2)
    settled = sorted(took[50:])
    assert settled[int(0.99 * len(settled))] <= 2.0 * 10.0 * 1.2
    assert sum(settled) / len(settled) >= 1.4 * 10.0


def test_with_nobody_decoding_there_is_no_bound():
    assert Pace().chunk(0) is None


def test_before_anything_is_measured_chunks_are_small():
    pace = Pace()
    assert pace.chunk(4) == CHUNK_FIRST
    pace.note(4, 0, 10.0)
    assert pace.chunk(4) == CHUNK_FIRST


def test_a_prompt_always_goes_on():
    pace, _ = _play(1.0, 50.0, 0.0)
    assert pace.chunk(8) == CHUNK_MIN


def test_one_round_that_met_something_else_teaches_little():
    pace, _ = _play(10.0, 0.1, 0.0)
    before = pace.chunk(8)
    pace.note(8, 0, 5000.0)
    assert pace.chunk(8) <= 2 * before


def test_the_time_of_so_many_is_taken_from_the_nearest_number_seen():
    pace = Pace()
    for _ in range(20):
        pace.note(2, 0, 5.0)
        pace.note(64, 0, 40.0)
        pace.note(2, 10, 6.0)
    assert pace.chunk(100) > 3 * pace.chunk(1)


@pytest.mark.parametrize("told", [(0, 5, 1.0), (3, 0, 0.0), (3, 0, -5.0)])
def test_what_says_nothing_is_not_taken_in(told):
    pace = Pace()
    pace.note(*told)
    assert pace.chunk(3) == CHUNK_FIRST
