"""Real deaths of processes, each one line in the log and one in the metric."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.fire import wait_until
from weftline.engine.runtime.oom import OomKills
from weftline.engine.session import load
from weftline.errors import WorkerDied

BREAKS = '''import os, signal


def breaks(x: str) -> str:
    """Kill this process, if the input names it."""
    if x == "kill":
        os.kill(os.getpid(), signal.SIGSEGV)
    if x == "exit":
        os._exit(3)
    return x
'''
PIPELINE = """weftline: 1
name: breaks
inputs: {x: text}
steps:
  s: {node: function, function: "breaks.py:breaks", inputs: {x: x}}
outputs: {y: s.output}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "breaks.py").write_text(BREAKS)
    (tmp_path / "breaks.yaml").write_text(PIPELINE)
    return tmp_path


def deaths(text: str) -> list[str]:
    return [line for line in text.splitlines() if "worker s died" in line]


@pytest.mark.parametrize(("given", "how"), [("kill", "signal 11, SIGSEGV"), ("exit", "exit code 3")])
def test_each_death_of_a_worker_is_one_line_with_its_tasks(
    folder: Path, given: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with load(folder / "breaks.yaml").open() as session:
        assert session.run(x="fine")["y"] == "fine"
        with pytest.raises(WorkerDied):
            session.run(x=given)
        wait_until(lambda: session.health().ready, 20)
        by = session.stats()["worker_deaths_by"]
    lines = [one.getMessage() for one in caplog.records if "died" in one.getMessage()]
    assert len(lines) == 2  # it was alone, so it ran twice
    for line in lines:
        assert f"worker s died: {how}" in line and "; step s; it ran 1 task (requests " in line
    assert "then: 1 task retried; restart in " in lines[0]
    assert "then: 1 task failed; 1 input quarantined; restart in " in lines[1]
    assert by == [("s", "signal" if given == "kill" else "exit", 2)]


@pytest.mark.parametrize("command", ["run", "batch"])
def test_a_death_is_in_the_log_of_each_command(folder: Path, command: str) -> None:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"x": x}) for x in ("a", "kill", "b")))
    words = {
        "run": ["run", "breaks.yaml", "--input", "x=kill"],
        "batch": ["batch", "breaks.yaml", "--data", "rows.jsonl", "--out", "out"],
    }[command]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "weftline", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=90
    )
    lines = deaths(done.stderr)
    assert lines and all("signal 11, SIGSEGV" in line and "step s" in line for line in lines), done.stderr
    assert "quarantined" in lines[-1]


def test_a_worker_that_ends_while_it_opens_is_one_line(folder: Path) -> None:
    (folder / "breaks.py").write_text(BREAKS + "\nprint('about to end', flush=True)\nos._exit(7)\n")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "weftline", "run", "breaks.yaml", "--input", "x=a"],
        cwd=folder, env=env, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    (line,) = deaths(done.stderr)
    assert "died while it started: exit code 7 (exit)" in line and "last line 'about to end'" in line
    assert line.endswith("then: the pipeline is not opened")


def test_a_kill_beside_a_risen_counter_is_out_of_memory(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    counter = folder / "memory.events"
    counter.write_text("oom_kill 0\n")
    with load(folder / "breaks.yaml").open() as session:
        fleet = session._current.runtime.fleet
        fleet._oom_kills = OomKills([(counter, "this memory cgroup")])
        for killed in (1, 1):  # the second time it has not risen
            counter.write_text(f"oom_kill {killed}\n")
            deaths = session.stats()["worker_deaths"]
            os.kill(session.pids()["s"], signal.SIGKILL)
            wait_until(lambda deaths=deaths: session.stats()["worker_deaths"] > deaths, 20)
            wait_until(lambda: session.health().ready, 20)
        assert session.stats()["worker_deaths_by"] == [("s", "out_of_memory", 1), ("s", "signal", 1)]
    first, second = (one.getMessage() for one in caplog.records if "died" in one.getMessage())
    assert "signal 9, SIGKILL; out of memory: the kernel's out-of-memory killer has ended a process of this" in first
    assert "out of memory" not in second and "; it ran no task; then: restart in " in second
