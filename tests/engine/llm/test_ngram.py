"""Guesses from a text's own past."""

from __future__ import annotations

import random

from weftline.engine.llm.speculation import DraftLength, NgramIndex


def test_what_followed_the_same_ending_last_is_offered():
    assert NgramIndex().propose([1, 2, 3, 9, 9, 1, 2], 2) == (3, 9)
    assert NgramIndex().propose([1, 2, 3, 1, 2, 4, 1, 2], 3) == (4, 1, 2)


def test_a_longer_ending_counts_more_than_a_later_one():
    assert NgramIndex().propose([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1) == (7,)


def test_nothing_is_offered_where_nothing_repeats():
    assert NgramIndex().propose(list(range(50)), 4) == ()
    assert NgramIndex().propose([1], 4) == ()
    assert NgramIndex().propose([], 4) == ()


def test_an_index_that_grows_finds_what_a_new_one_finds():
    rng = random.Random(4)
    grown, tokens = NgramIndex(), []
    for _ in range(400):
        tokens += [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        offered = grown.propose(tokens, 5)
        assert offered == NgramIndex().propose(tokens, 5)
        if offered:
            assert any(tokens[at : at + len(offered)] == list(offered) for at in range(len(tokens)))


def test_the_draft_grows_after_success_and_shrinks_after_failure():
    length = DraftLength(8)
    for _ in range(5):
        length.record(length.next(), length.next())
    assert length.next() == 8
    length.record(8, 3)
    assert length.next() == 4
    for _ in range(4):
        length.record(length.now, 0)
    assert [length.next() for _ in range(9)] == [0] * 8 + [1]
