"""Pages are found again by what they hold, and only by who may."""

from __future__ import annotations

from weftline.engine.llm.kv_cache import PrefixCache
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.sequence import Sequence


def _sequence(id: int, tokens: list[int], salt: bytes = b"") -> Sequence:
    return Sequence(id, list(tokens), len(tokens), len(tokens) + 4, SamplingParams(), id, salt=salt)


def _compute(cache: PrefixCache, sequence: Sequence) -> None:
    """Give the sequence pages for all it knows and publish them, as a round does."""
    before = sequence.computed
    missing = cache.pool.pages_for(len(sequence.tokens)) - len(sequence.table.pages)
    assert cache.pool.try_grow(sequence.table, missing)
    sequence.computed = len(sequence.tokens)
    cache.publish(sequence, before, sequence.computed)


def test_full_pages_are_shared_and_the_last_token_is_left_to_compute():
    cache = PrefixCache(16, 4)
    first, second = _sequence(1, list(range(12))), _sequence(2, list(range(12)))
    _compute(cache, first)
    cache.join(second)
    assert second.table.pages == first.table.pages[:2]
    assert second.computed == 8


def test_a_page_is_found_only_when_everything_before_it_is_equal_too():
    cache = PrefixCache(16, 4)
    _compute(cache, _sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    other = _sequence(2, [0, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.join(other)
    assert other.computed == 0


def test_tenants_do_not_share():
    cache = PrefixCache(16, 4)
    _compute(cache, _sequence(1, list(range(9)), b"one"))
    other, same = _sequence(2, list(range(9)), b"two"), _sequence(3, list(range(9)), b"one")
    cache.join(other)
    cache.join(same)
    assert (other.computed, same.computed) == (0, 8)


def _own(id: int, tokens: list[int], owner: bytes, shared: int, salt: bytes = b"") -> Sequence:
    sequence = _sequence(id, tokens, salt)
    sequence.own_salt, sequence.shared = owner, shared
    return sequence


def test_callers_share_only_whole_pages_of_the_operators_tokens():
    cache = PrefixCache(64, 4)
    tokens = list(range(21))
    _compute(cache, _own(1, tokens, b"one", 10))
    for owner, shared, found in (
        (b"one", 10, 20),
        (b"one", 8, 20),  # the same whole pages
        (b"two", 10, 8),
        (b"", 10, 8),
        (b"two", 3, 0),  # no whole page
        (b"one", 0, 0),
        (b"one", 12, 8),  # a longer operator's text: its third page is another one
    ):
        other = _own(2, tokens, owner, shared)
        cache.join(other)
        assert other.computed == found, (owner, shared)
        cache.pool.drop(other.table)


def test_an_adapters_pages_are_its_own_from_the_first_one_on():
    cache = PrefixCache(64, 4)
    tokens = list(range(21))
    _compute(cache, _own(1, tokens, b"one", 10, b"adapter"))
    for salt, owner, found in ((b"", b"one", 0), (b"adapter", b"two", 8), (b"adapter", b"one", 20)):
        other = _own(2, tokens, owner, 10, salt)
        cache.join(other)
        assert other.computed == found
        cache.pool.drop(other.table)


def test_what_was_evicted_is_not_found():
    cache = PrefixCache(3, 4)
    first = _sequence(1, list(range(12)))
    _compute(cache, first)
    cache.pool.drop(first.table)
    assert cache.pool.counts().idle == 3
    filler = _sequence(2, [50 + i for i in range(8)])
    _compute(cache, filler)  # evicts two of three: the tail first
    again = _sequence(3, list(range(12)))
    cache.join(again)
    assert again.computed == 4


def test_a_cache_that_is_off_finds_nothing_and_keeps_nothing():
    cache = PrefixCache(8, 4, enabled=False)
    first = _sequence(1, list(range(9)))
    _compute(cache, first)
    cache.pool.drop(first.table)
    assert cache.pool.counts().free == 8
