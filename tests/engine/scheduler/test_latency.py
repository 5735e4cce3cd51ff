"""Run times are learned by size of batch: read between sizes, hard to poison, quick to follow a lasting change."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.scheduler.latency import FRESH_MS, SAMPLES_MIN, Latency


def taught(times: dict[int, float], rounds: int = 5) -> Latency:
    latency = Latency()
    for _ in range(rounds):
        for items, run_ms in times.items():
            latency.learn(items, run_ms, 0.0)
    return latency


def test_nothing_is_known_at_first() -> None:
    latency = Latency()
    assert latency.run_ms(1) == latency.recent_ms == latency.fixed_ms == latency.item_ms == 0.0
    assert not latency.fresh(0.0)


def test_sizes_seen_are_answered_by_their_own_average() -> None:
    latency = taught({1: 3.0, 4: 5.0, 16: 30.0})
    assert [latency.run_ms(items) for items in (1, 4, 16)] == pytest.approx([3.0, 5.0, 30.0])


def test_sizes_between_and_beyond_follow_the_line() -> None:
    latency = taught({1: 1.5, 9: 5.5})
    assert (latency.fixed_ms, latency.item_ms) == pytest.approx((1.0, 0.5))
    assert [latency.run_ms(items) for items in (5, 17)] == pytest.approx([3.5, 9.5])


def test_one_measured_size_predicts_no_cost_for_more_items() -> None:
    latency = taught({4: 8.0})
    assert latency.run_ms(8) == latency.run_ms(4) == 8.0


def test_the_line_has_no_negative_part() -> None:
    falling, steep = taught({1: 9.0, 8: 5.0}), taught({4: 1.0, 8: 100.0})
    assert falling.item_ms == 0.0 and falling.fixed_ms > 0
    assert steep.fixed_ms == 0.0 and steep.item_ms > 0
    assert steep.run_ms(1) == 0.0


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 1e6, allow_nan=False)), max_size=40),
    st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 1e6, allow_nan=False)), max_size=3),
)
def test_more_items_never_take_less_time(calls: list[tuple[int, float]], seeds: list[tuple[int, float]]) -> None:
    latency = Latency()
    for items, run_ms in seeds:
        latency.seed(items, run_ms)
    for items, run_ms in calls:
        latency.learn(items, run_ms, 0.0)
    times = [latency.run_ms(items) for items in range(1, 260)]
    assert all(later >= before - 1e-9 * before for before, later in pairwise(times))
    assert times[0] >= 0.0 and latency.fixed_ms >= 0.0 and latency.item_ms >= 0.0


def test_a_first_slow_call_is_forgotten_by_the_second() -> None:
    latency = Latency()
    latency.learn(1, 4000.0, 0.0)
    latency.learn(1, 5.0, 0.0)
    assert latency.run_ms(1) == 5.0
    latency.learn(1, 4000.0, 0.0)
    assert latency.run_ms(1) == 5.0


def test_the_first_slow_call_of_a_new_size_does_not_count_in_full() -> None:
    latency = taught({1: 5.0})
    latency.learn(8, 4000.0, 0.0)
    assert latency.run_ms(8) <= 4 * 8 * 5.0
    latency.learn(8, 12.0, 0.0)
    assert latency.run_ms(8) == 12.0


def test_one_hiccup_barely_moves_it() -> None:
    latency = taught({1: 10.0})
    latency.learn(1, 2000.0, 0.0)
    assert latency.run_ms(1) <= 12.0
    assert latency.recent_ms <= 12.0


@pytest.mark.parametrize("now_takes_ms", [100.0, 1.0])
def test_a_lasting_change_is_followed_within_ten_calls(now_takes_ms: float) -> None:
    latency = taught({1: 10.0})
    for _ in range(10):
        latency.learn(1, now_takes_ms, 0.0)
    assert latency.run_ms(1) == pytest.approx(now_takes_ms, rel=0.5)


def test_a_lasting_change_at_one_size_outweighs_old_averages() -> None:
    latency = taught({1: 10.0, 4: 11.0, 16: 12.0})
    for _ in range(12):
        latency.learn(1, 30.0, 0.0)
    assert latency.run_ms(1) > 20.0
    assert latency.run_ms(16) >= latency.run_ms(1)


def test_it_is_fresh_after_three_calls_and_for_ten_seconds() -> None:
    latency = Latency()
    for call in range(SAMPLES_MIN):
        assert not latency.fresh(100.0)
        latency.learn(1, 1.0, 100.0 + call)
    assert latency.fresh(102.0 + FRESH_MS)
    assert not latency.fresh(102.1 + FRESH_MS)


def test_a_seed_is_an_answer_and_never_fresh() -> None:
    latency = Latency()
    for _ in range(5):
        latency.seed(1, 7.0)
    assert latency.run_ms(1) == 7.0
    assert not latency.fresh(0.0) and latency.samples == 0 and latency.recent_ms == 0.0


def test_the_first_call_replaces_the_seed_of_its_size() -> None:
    latency = Latency()
    latency.seed(1, 7.0)
    latency.learn(1, 2.0, 0.0)
    latency.seed(1, 7.0)
    assert latency.run_ms(1) == 2.0


def test_a_seed_is_replaced_where_it_contradicts_measurements() -> None:
    slow_warm_up = Latency()
    slow_warm_up.seed(1, 4000.0)
    slow_warm_up.seed(16, 4000.0)
    slow_warm_up.learn(2, 5.0, 0.0)
    assert slow_warm_up.run_ms(1) == pytest.approx(5.0, rel=0.01)
    assert slow_warm_up.run_ms(16) == pytest.approx(8 * 5.0)  # no dearer than calls of the size that is known


def test_times_that_cannot_be_are_ignored() -> None:
    latency = Latency()
    for items, run_ms in ((0, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))):
        latency.learn(items, run_ms, 0.0)
        latency.seed(items, run_ms)
    assert latency.samples == 0 and latency.run_ms(1) == 0.0


def test_what_was_seen_recently_is_averaged_over_all_sizes() -> None:
    latency = taught({1: 1.0, 8: 9.0}, rounds=20)
    assert 3.0 < latency.recent_ms < 7.0


def test_memory_and_cost_do_not_grow_with_the_sizes_seen() -> None:
    latency = taught({items: 1.0 + items for items in range(1, 1025)}, rounds=1)
    assert len(latency._seen) <= 2 * 11


def test_after_a_quiet_time_old_averages_are_only_seeds() -> None:
    latency = taught({1: 1000.0}, rounds=20)
    later = FRESH_MS + 1
    for call in range(SAMPLES_MIN):
        assert not latency.fresh(later + call)
        latency.learn(1, 100.0, later + call)
    assert latency.fresh(later + SAMPLES_MIN) and latency.run_ms(1) == pytest.approx(100.0)


def test_a_likely_time_covers_the_spread_and_a_shortest_time_does_not() -> None:
    latency = Latency()
    for call in range(40):
        took_ms = 110.0 if call % 2 else 100.0
        latency.learn_spread(1, took_ms, call)
        latency.learn(1, took_ms, call)
    assert 110.0 <= latency.likely_ms(1) <= 140.0
    assert 100.0 <= latency.shortest_ms(1) <= 102.0
