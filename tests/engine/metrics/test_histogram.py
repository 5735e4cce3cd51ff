"""Values fall at or below their bound, and nothing is lost above the last."""

from weftline.engine.metrics.histogram import Histogram


def test_a_value_belongs_to_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 7.0):
        histogram.add(value)
    assert histogram.cumulative == [2, 3, 4, 5]
    assert (histogram.count, histogram.sum) == (5, 15.0)


def test_a_value_may_count_many_times() -> None:
    histogram = Histogram((1.0,))
    histogram.add(0.5, times=10)
    assert (histogram.count, histogram.sum) == (10, 5.0)


def test_a_copy_stays_as_it_was() -> None:
    histogram = Histogram((1.0,))
    copy = histogram.copy()
    histogram.add(0.5)
    assert (copy.count, copy.sum) == (0, 0.0)
