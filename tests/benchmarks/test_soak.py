"""The soak for seconds, and what it takes for a right answer. For a minute: in the slow tier."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from benchmarks.soak import STREAMED, is_right, main, run, verdict

NUMBERS = np.arange(10, dtype=np.float32)
REQUEST = {"x": NUMBERS[2:8], "text": "good"}
RIGHT = {"y": np.array([3, 4, 5], np.float32), "said": "GOOD", "streamed": STREAMED}


def test_seconds_of_load_kills_and_cancels_answer_right_and_leak_nothing() -> None:
    seen: set[str] = set()
    for seconds in (1.0, 4.0, 16.0):  # a busy machine ends fewer requests in a second, and may cancel none of them
        soak, left, deaths = run(seconds, callers=8, largest_bytes=1 << 18)
        assert verdict([], soak.ends, left, "") == []
        seen |= {end for end in ("cancelled", "read") if soak.ends[end]} | ({"death"} if deaths else set())
        if len(seen) == 3:
            return
    assert seen == {"cancelled", "read", "death"}


@pytest.mark.slow
def test_two_minutes_with_64_callers_and_8_megabytes_leave_memory_flat() -> None:
    # In a process of its own: every sample collects garbage, which takes too long among all that the tests loaded.
    soak = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--minutes", "2"], capture_output=True, text=True, timeout=500
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr


def test_an_answer_is_right_only_when_every_part_of_it_is() -> None:
    assert is_right(RIGHT, REQUEST, NUMBERS[3:])
    assert is_right(RIGHT | {"said": "sorry", "streamed": None}, REQUEST | {"text": "bad"}, NUMBERS[3:])


@pytest.mark.parametrize(
    "wrong",
    [
        {"y": np.array([3, 4, 6], np.float32)},
        {"y": np.array([4, 5, 6], np.float32)},
        {"y": np.array([3, 4], np.float32)},
        {"said": "sorry"},
        {"streamed": STREAMED[:-1]},
        {"streamed": None},
    ],
)
def test_an_answer_with_a_wrong_part_is_wrong(wrong: dict[str, Any]) -> None:
    assert not is_right(RIGHT | wrong, REQUEST, NUMBERS[3:])


def test_an_answer_without_numbers_is_wrong() -> None:
    assert not is_right({}, REQUEST, NUMBERS[3:])


def test_too_short_a_soak_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--minutes", "0.1"])
