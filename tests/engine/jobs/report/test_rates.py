"""How fast a job goes and when it is reported, on manual clocks."""

from itertools import pairwise

import pytest

from weftline.engine.jobs.progress import Progress
from weftline.engine.jobs.report.progress_display import (
    RATE_POINTS_MAX,
    Interval,
    MovingRate,
    ProgressRate,
    ProgressSnapshot,
    RateHistory,
    eta_s,
    line,
)


def at(rows: int, elapsed_s: float, expected: int | None = 100_000, resumed: int = 0, **figures: float) -> Progress:
    return Progress(rows, resumed, expected, 3, max(rows - 2000, 0), elapsed_s, figures)


def test_a_line_has_all_figures_in_a_fixed_order() -> None:
    standing = ProgressSnapshot(at(12_000, 10.0), 1234.0, None, 71.3)
    assert line(standing) == "rows 12000/100000 (12.0 %)  1234 rows/s  errors 3  committed 10000  ETA 1m11s"


def test_a_line_has_tokens_and_busy_steps_where_there_are_any() -> None:
    progress = at(12_000, 10.0, **{"tokens": 5.0, "busy:see": 0.874, "busy:answer": 1.0})
    assert line(ProgressSnapshot(progress, 12.34, 456.0, None)) == (
        "rows 12000/100000 (12.0 %)  12.3 rows/s  456 tokens/s  errors 3  committed 10000  busy see 87 %, answer 100 %"
    )


def test_without_an_expected_number_there_is_no_share_and_no_time_left() -> None:
    pace = ProgressRate()
    pace.see(at(0, 0.0, None), 50.0)
    assert line(pace.see(at(500, 5.0, None), 55.0)) == "rows 500  100 rows/s  errors 3  committed 0"
    assert (
        line(ProgressSnapshot(at(0, 1.0, 0), 0.0, None, 0.0)) == "rows 0/0  0 rows/s  errors 3  committed 0  ETA 0.0s"
    )


def test_rows_of_earlier_runs_are_done_and_not_fast() -> None:
    pace = ProgressRate()
    pace.see(at(60_000, 0.0, resumed=60_000), 7.0)
    standing = pace.see(at(60_400, 4.0, resumed=60_000), 11.0)
    assert standing.rows_per_s == pytest.approx(100.0)
    assert standing.eta_s == pytest.approx(39_600 / 100)
    assert "rows 60400/100000 (60.4 %)" in line(standing)


def test_the_rate_is_of_the_last_seconds() -> None:
    moving = MovingRate(5.0)
    for second in range(11):
        moving.add(float(second), 10.0 * second)
    for second in range(11, 21):
        moving.add(float(second), 100.0 + 200.0 * (second - 10))
    assert moving.per_s(20.0) == pytest.approx(200.0)


def test_a_job_that_answers_a_block_a_minute_has_a_rate_all_the_time() -> None:
    moving = MovingRate(5.0)
    for minute in range(4):
        moving.add(60.0 * minute, 600.0 * minute)
    assert moving.per_s(180.0) == pytest.approx(10.0)
    assert moving.per_s(210.0) == pytest.approx(600 / 90), "it falls while nothing comes"
    assert moving.per_s(210.0) > moving.per_s(1000.0) > 0


def test_a_window_keeps_few_points_for_any_update_rate() -> None:
    moving = MovingRate(5.0)
    for tick in range(100_000):
        moving.add(tick * 0.0001, float(tick))
    assert len(moving._points) < 50
    assert moving.per_s(10.0) == pytest.approx(10_000, rel=0.05)


def test_nothing_is_divided_by_nothing() -> None:
    assert MovingRate(5.0).per_s(1.0) == 0.0
    assert ProgressRate().see(at(0, 0.0), 3.0).rows_per_s == 0.0
    moving = MovingRate(5.0)
    moving.add(1.0, 10.0)
    moving.add(2.0, 4.0)
    assert moving.per_s(2.0) == 0.0, "a total that begins anew is no negative rate"


def test_the_time_left_is_known_when_rest_and_rate_are() -> None:
    assert eta_s(at(90_000, 1.0), 100.0) == 100.0
    assert eta_s(at(90_000, 1.0), 0.0) is None
    assert eta_s(at(90_000, 1.0, None), 100.0) is None
    assert eta_s(at(100_001, 1.0), 0.0) == 0.0


def test_the_time_left_does_not_jump_with_one_slow_second() -> None:
    pace, standing = ProgressRate(), None
    for second in range(61):
        standing = pace.see(at(100 * second, float(second)), float(second))
    before = standing.eta_s if standing else None
    standing = pace.see(at(6001, 66.0), 66.0)
    assert before == pytest.approx(940.0)
    assert standing.rows_per_s < 20 and standing.eta_s == pytest.approx(940 * 1.1, rel=0.05)


def test_lines_are_due_after_a_span_and_drawings_at_once() -> None:
    lines, drawings = Interval(10.0), Interval(0.2, at_once=True)
    assert [second for second in range(0, 41, 4) if lines.due(float(second))] == [12, 24, 36]
    assert [tick for tick in range(10) if drawings.due(tick * 0.07)] == [0, 3, 6, 9]


def test_throughput_over_time_keeps_its_sum_in_few_points() -> None:
    rates = RateHistory()
    for tick in range(1, 40_001):
        rates.see(at(5000 + 10 * tick, tick * 0.5, resumed=5000))
    points = rates.points()
    assert RATE_POINTS_MAX / 2 - 1 <= len(points) <= RATE_POINTS_MAX + 1
    assert all(one.rows_per_s == pytest.approx(20.0) for one in points)
    assert [one.elapsed_s for one in points] == sorted(one.elapsed_s for one in points)
    gaps = [after.elapsed_s - one.elapsed_s for one, after in pairwise(points)]
    assert max(gaps) < 3 * min(gaps[:-1]), "early and late stretches are about as long"
    assert RateHistory().points() == []
