"""Counters of the kernel's out-of-memory killer, from files."""

from __future__ import annotations

from pathlib import Path

from weftline.engine.runtime.oom import OomKills


def test_a_risen_counter_is_reported_once(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\n")
    kills = OomKills([(tmp_path / "absent", "another"), (events, "this memory cgroup")])
    assert kills.new() == ""
    events.write_text("low 0\noom 4\noom_kill 3\n")
    assert kills.new().endswith("has ended a process of this memory cgroup")
    assert kills.new() == ""
    events.write_text("low 0\noom 4\noom_kill 5\n")
    assert "2 processes" in kills.new()


def test_files_that_cannot_be_read_report_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("oom_kill_disable 0\noom_kill many\n")
    assert OomKills([(tmp_path / "other", "x"), (tmp_path, "y")]).new() == ""
    assert OomKills().new() in ("", OomKills().new())
