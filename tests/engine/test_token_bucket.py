"""A token bucket gives whole tokens only, and saves no more than its capacity."""

from weftline.engine.token_bucket import TokenBucket


def test_each_permit_takes_a_whole_token() -> None:
    bucket = TokenBucket(5.0, 2.5)
    assert [bucket.try_take() for _ in range(3)] == [True, True, False]
    assert bucket.tokens == 0.5, "a refused permit takes nothing"
    bucket.add(0.5)
    assert bucket.try_take() and not bucket.try_take()


def test_what_is_above_the_capacity_is_dropped() -> None:
    bucket = TokenBucket(2.0, 1.0)
    bucket.add(100.0)
    assert [bucket.try_take() for _ in range(3)] == [True, True, False]
