"""A manual clock advances only when it is advanced."""

import pytest

from weftline.testing.clock import ManualClock


def test_it_starts_where_it_is_set_and_advances_by_what_it_is_given() -> None:
    clock = ManualClock(100.0)
    assert clock.now_ms() == 100.0
    assert clock.advance(2.5) == clock.now_ms() == 102.5


def test_it_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="not by -1 ms"):
        ManualClock().advance(-1)
