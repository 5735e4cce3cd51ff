"""The cache of image features keeps within its bytes."""

from __future__ import annotations

import numpy as np

from weftline.engine.llm.vision.features import FeatureCache


def test_the_least_recently_used_features_are_evicted():
    cache, one = FeatureCache(100), np.zeros(40, np.uint8)
    cache.put((b"", b"a"), one)
    cache.put((b"", b"b"), one)
    assert cache.take((b"", b"a")) is one
    assert cache.bytes_used == 40
    cache.put((b"", b"a"), one)
    cache.put((b"", b"c"), one)
    assert [(b"", name) in cache for name in (b"a", b"b", b"c")] == [True, False, True]
    assert cache.bytes_used == 80


def test_features_beyond_the_limit_are_not_kept():
    cache = FeatureCache(100)
    cache.put((b"", b"a"), np.zeros(60, np.uint8))
    cache.put((b"", b"b"), np.zeros(101, np.uint8))
    assert (b"", b"a") in cache
    assert (b"", b"b") not in cache


def test_callers_share_no_features():
    cache = FeatureCache(100)
    cache.put((b"one", b"a"), np.zeros(10, np.uint8))
    assert cache.take((b"two", b"a")) is None
    assert cache.take((b"one", b"a")) is not None
    assert (cache.hits, cache.misses) == (1, 1)
    cache.clear()
    assert cache.bytes_used == 0
    assert (b"one", b"a") not in cache


def test_features_that_are_put_twice_count_once():
    cache = FeatureCache(100)
    for _ in range(2):
        cache.put((b"", b"a"), np.zeros(40, np.uint8))
    assert cache.bytes_used == 40
