"""Outcomes, bars, spreads, and processes that are ended in time with all they started."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from weftline.gpu_check import outcomes
from weftline.gpu_check.outcomes import CheckOutcome, describe, judged, outcome_of, run_apart, run_limited, spread


@pytest.mark.parametrize(
    ("found", "wanted", "at_least", "judge", "said"),
    [
        (0.1, 0.15, False, True, "at most 0.15 wanted: met"),
        (0.3, 0.15, False, True, "at most 0.15 wanted: missed by 100%"),
        (0.9, 0.85, True, True, "at least 0.85 wanted: met"),
        (0.68, 0.85, True, True, "at least 0.85 wanted: missed by 20%"),
        (0.1, 0.85, True, False, "at least 0.85 wanted: not judged"),
    ],
)
def test_a_bar_says_by_how_much_it_was_missed(
    found: float, wanted: float, at_least: bool, judge: bool, said: str
) -> None:
    assert str(judged("hop", found, wanted, "ms", at_least=at_least, judge=judge)).endswith(said)


def test_a_spread_is_a_median_and_a_tail_by_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert spread(values, "ms") == {"p50": 50.0, "p99": 99.0, "count": 100, "unit": "ms"}
    assert outcomes.quantile([3.0], 0.99) == 3.0
    assert math.isnan(outcomes.quantile([], 0.5))


def test_the_table_shows_figures_and_bars() -> None:
    bar = judged("hop", 0.1, 0.15, "ms")
    outcome = CheckOutcome(
        "hops", "right", figures={"pass": spread([0.1], "ms"), "rate": 1.23456}, bars=[bar], seconds=2
    )
    head, first, second, last = describe(outcome).splitlines()
    assert head.split() == ["hops", "right", "2.0", "s"]
    assert first.split(None, 1)[1] == "0.1 ms (p99 0.1; 1 times)"
    assert second.split() == ["rate", "1.235"]
    assert last.strip() == "bar  hop: 0.1 ms, at most 0.15 wanted: met"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("into an arena_gb_per_s", 35.25, "into an arena 35.25 GB/s"), ("leases_per_s", 1767, "leases 1767 a second"),
        ("between_gb_per_s", "2.35 and 11.16", "between 2.35 and 11.16 GB/s"), ("left_mib", 12, "left 12 MiB"),
        ("wait_s", 0.4553, "wait 0.4553 s"), ("tokens", 1_000_000.0, "tokens 1000000"), ("ring", "whole", "ring whole"),
        ("_s", 1, "_s 1"),
    ],
)  # fmt: skip
def test_a_figures_unit_comes_after_its_value(name: str, value: object, shown: str) -> None:
    (_, line) = describe(CheckOutcome("x", "right", figures={name: value})).splitlines()
    assert " ".join(line.split()) == shown


def test_bars_of_large_numbers_are_written_out() -> None:
    assert str(judged("leases", 352, 1e6, "leases", at_least=True, judge=False)) == (
        "leases: 352 leases, at least 1000000 wanted: not judged"
    )


def test_a_part_in_a_process_of_its_own_brings_its_outcome_back() -> None:
    bar = dataclasses.asdict(judged("b", 1, 2, "ms"))
    made = {"name": "x", "state": "right", "figures": {"a": 1}, "bars": [bar]}
    command = [sys.executable, "-c", "import sys, pathlib; pathlib.Path(sys.argv[3]).write_text(sys.argv[1])"]
    found = run_apart("mine", [*command, json.dumps(made)], 20)
    assert (found.name, found.state, found.figures) == ("mine", "right", {"a": 1})
    assert found.bars == [judged("b", 1, 2, "ms")]


def test_a_process_that_writes_nothing_is_wrong_with_its_last_words() -> None:
    found = run_apart("mine", [sys.executable, "-c", "raise SystemExit('no such card')"], 20)
    assert (found.state, found.why) == ("wrong", "its process ended with 1: no such card")


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    outcome = run_apart("slow", [sys.executable, "-c", script], 2.0)
    assert (outcome.state, outcome.why) == ("wrong", "took more than 2 s")
    pid = int(file.read_text())
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z" and time.monotonic() < until:
        os.sched_yield()
    assert not Path(f"/proc/{pid}").exists() or _state(pid) == "Z"


SERVES = """
import json, os, sys, time
reply = int(sys.argv[sys.argv.index("--serve") + 1])
for line in sys.stdin:
    asked = json.loads(line)["name"]
    if asked == "dies":
        sys.exit("no such card")
    if asked == "hangs":
        time.sleep(60)
    state = "wrong" if asked == "wrong" else "right"
    made = {"name": asked, "state": state, "figures": {"pid": os.getpid()}, "bars": []}
    os.write(reply, json.dumps(made).encode() + b"\\n")
"""


def test_parts_share_a_process_until_one_is_wrong_or_dies_or_hangs() -> None:
    with contextlib.closing(outcomes.PartsProcess([sys.executable, "-c", SERVES])) as process:
        first, second, wrong, third, dead, late, last = (
            process.run(f"llm: {name}", {"name": name}, 2.0 if name == "hangs" else 30.0)
            for name in ("a", "b", "wrong", "c", "dies", "hangs", "d")
        )
    assert first.figures == second.figures == wrong.figures
    assert first.figures["pid"] != third.figures["pid"] != last.figures["pid"]
    assert (first.name, first.state, wrong.state, last.state) == ("llm: a", "right", "wrong", "right")
    assert (dead.state, dead.why) == ("wrong", "its process ended with 1: no such card")
    assert (late.state, late.why) == ("wrong", "took more than 2 s")


def test_a_process_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(outcomes, "KILLED_MAX_S", 0.1)
        patch.setattr(os, "killpg", lambda pid, signal: killed.append(pid))
        with pytest.raises(TimeoutError):
            run_limited([sys.executable, "-c", "import time; time.sleep(30)"], 0.1)
    os.killpg(killed[0], signal.SIGKILL)


def test_what_a_part_raises_belongs_to_it_alone() -> None:
    def broken() -> CheckOutcome:
        raise OSError("the card fell out")

    assert outcome_of("x", broken).why == "OSError: the card fell out"
    assert run_limited([sys.executable, "-c", "print(3)"], 20) == (0, "3\n")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
