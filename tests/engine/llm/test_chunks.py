"""How many tokens of prompts a round may have, by what it is told of rounds."""

from __future__ import annotations

from weftline.engine.llm.chunks import CALM_ROUNDS, ChunkLimit


def test_want_of_memory_halves_it_in_whole_pages_down_to_one() -> None:
    limit = ChunkLimit(512, 16)
    assert [limit.fell_short(512), limit.tokens] == [True, 256]
    assert [limit.fell_short(100), limit.tokens] == [True, 48]
    assert [limit.fell_short(48), limit.tokens] == [True, 16]
    assert [limit.fell_short(16), limit.tokens] == [False, 16]
    assert [limit.fell_short(0), limit.tokens] == [False, 16], "a round without prompts teaches nothing of them"
    assert limit.short == 5


def test_more_than_it_allows_teaches_what_it_allows() -> None:
    limit = ChunkLimit(64, 16)
    limit.fell_short(64)
    assert [limit.fell_short(500), limit.tokens] == [True, 16]


def test_calm_full_rounds_double_it_up_to_what_the_options_say() -> None:
    limit = ChunkLimit(100, 16)
    limit.fell_short(100)
    assert limit.tokens == 48
    assert not any(limit.went_well(47) for _ in range(2 * CALM_ROUNDS)), "they might not have had memory for one more"
    assert [limit.went_well(48) for _ in range(CALM_ROUNDS)] == [False] * (CALM_ROUNDS - 1) + [True]
    assert limit.tokens == 96
    assert [limit.went_well(96) for _ in range(CALM_ROUNDS)][-1] and limit.tokens == 100
    assert not limit.went_well(100)


def test_a_shortage_ends_the_calm() -> None:
    limit = ChunkLimit(64, 16)
    limit.fell_short(64)
    for _ in range(CALM_ROUNDS - 1):
        limit.went_well(32)
    limit.fell_short(0)
    assert not limit.went_well(32) and limit.tokens == 32


def test_rounds_of_less_than_a_page_stay_as_they_are() -> None:
    limit = ChunkLimit(8, 16)
    assert not limit.fell_short(8)
    assert (limit.tokens, limit.half(17), limit.half(16)) == (8, 16, 0)
