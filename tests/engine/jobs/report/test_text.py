"""How figures are written, and how texts of strangers become harmless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.report.text import as_name, counted, duration, harmless, one_line, percent, rate


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0.0s"), (-1, "0.0s"), (4.24, "4.2s"), (9.96, "10s"), (59.6, "1m00s"), (71, "1m11s"), (3599.9, "1h00m"),
     (7500, "2h05m"), (86400 * 3 + 3600 * 4, "3d04h"), (float("inf"), "?"), (float("nan"), "?")],
)  # fmt: skip
def test_a_time_has_its_two_largest_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("per_s", "said"),
    [(0, "0"), (-3, "0"), (float("nan"), "0"), (0.0123, "0.0123"), (9.94, "9.94"), (12.34, "12.3"), (99.6, "100"),
     (1234.4, "1234")],
)  # fmt: skip
def test_a_rate_has_the_digits_that_matter(per_s: float, said: str) -> None:
    assert rate(per_s) == said


def test_percentages_below_all_are_never_rounded_to_all() -> None:
    assert (percent(0.12), percent(0.99999), percent(1.0), percent(0.29)) == ("12.0 %", "99.9 %", "100.0 %", "29.0 %")
    assert (counted(1, "row"), counted(0, "row")) == ("1 row", "0 rows")


def test_what_cannot_be_seen_is_an_escape_and_what_joins_letters_stays() -> None:
    assert harmless("a\x00b\x1b[2J\u202ec\ud800d\u2028e", 100) == "a\\x00b\\x1b[2J\\u202ec\\ud800d\\u2028e"
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    assert harmless(f"{family}\r\n\tü", 100) == f"{family}\n\tü"


def test_a_long_text_is_truncated_with_its_length() -> None:
    assert harmless("x" * 1000, 5) == "xxxxx … (1000 characters)"
    assert one_line(" a \n\t b ", 100) == "a b"
    assert as_name("a\nb\tc  d", 100) == "a\\nb\\tc  d"


@given(st.text(st.characters(), max_size=60))
def test_any_text_becomes_one_that_can_be_written(text: str) -> None:
    said = as_name(text, 50)
    said.encode()
    assert "\n" not in said
    assert harmless(said, 1000) == said, "what is harmless stays what it is"
