"""The system beneath is not to be relied on: its clock jumps, and it starts no more processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

JUMPING = """
import itertools, time
jumps = itertools.cycle((0, 10 * 365 * 86400, -10 * 365 * 86400, 3600, -3600))
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + next(jumps)
time.time_ns = lambda: real_ns() + next(jumps) * 10**9
"""
"""Loaded by every Python process that finds it: its wall clock is wrong by years, another way each time it is read."""

PIPELINE = """weftline: 1
name: timed
limits: {arena_bytes: 1048576}
inputs: {x: text}
steps:
  kept:
    {node: echo, inputs: {value: x}, delay_ms: 2, timeout_ms: 20000, retry: 1, run_max_ms: 20000, worker: all,
     batch: {items_max: 4, wait_max_ms: 5}}
  said: {node: trickle, pieces: 3, delay_ms: 2, inputs: {value: x}, worker: all}
  clock: {node: function, function: "clock.py:jumps", inputs: {x: kept.value}, worker: all}
outputs: {said: said.value, jumps: clock.output}
"""

JUMPS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
exec((folder / "sitecustomize.py").read_text())
import time
import weftline

with weftline.load(folder / "timed.yaml").open() as session, ThreadPoolExecutor(4) as callers:
    pids, until, answers = session.pids(), time.monotonic() + 0.6, []
    while time.monotonic() < until:
        answers += callers.map(lambda at: session.run(weftline.RequestOptions(deadline_ms=20_000), x="abc"), range(4))
    requests = session.stats()["requests"]
    print("the clock jumps:", all(one["jumps"] for one in answers), abs(time.time() - time.time()) > 3000)
    print("answered:", len(answers) == requests["ok"] > 4, {one["said"] for one in answers})
    print("the same workers:", session.pids() == pids, session.ready, session.stats()["worker_deaths"])
"""


@pytest.mark.slow
def test_a_wall_clock_that_jumps_by_years_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    (tmp_path / "timed.yaml").write_text(PIPELINE)
    (tmp_path / "clock.py").write_text(
        "import time\n\n\ndef jumps(x: str) -> bool:\n    return abs(time.time() - time.time()) > 3000\n"
    )
    done = subprocess.run([sys.executable, "-c", JUMPS, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the clock jumps: True True",
        "answered: True {'aaaaaaaabbbbbbbbcccccccc'}",
        "the same workers: True True 0",
    ]


NO_PROCESS = """
import ctypes, os, resource, signal, time
import weftline
from weftline.engine.session import load
from weftline.errors import ModelError
from weftline.pipelines.spec.builder import Builder

if os.geteuid() == 0:  # whom the limit does not bind: the processes are another user's, without CAP_SYS_RESOURCE
    os.setresuid(65534, 0, 0)
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    sets[0] &= ~(1 << 21 | 1 << 24)  # of those in effect, CAP_SYS_ADMIN and CAP_SYS_RESOURCE
    libc.capset(header, sets)

def pipeline():
    p = Builder("one", limits={"arena_bytes": 1 << 20})
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    return p

most = resource.getrlimit(resource.RLIMIT_NPROC)
session = load(pipeline()).open()
resource.setrlimit(resource.RLIMIT_NPROC, (1, most[1]))
print("open ones answer:", session.run(x="a")["y"])
try:
    load(pipeline()).open()
except ModelError as error:
    print("a new session:", error)
os.kill(session.pids()["s"], signal.SIGKILL)
until = time.monotonic() + 30
while session.stats()["worker_deaths"] < 3 and time.monotonic() < until:
    time.sleep(0.01)
print("waits:", session.stats()["worker_deaths"] >= 3, session.ready, session.pids())
resource.setrlimit(resource.RLIMIT_NPROC, most)
print("with room again:", session.run(weftline.RequestOptions(deadline_ms=20_000), x="a")["y"])
session.close()
"""


@pytest.mark.slow
def test_without_new_processes_open_work_continues_and_restarts_wait() -> None:
    done = subprocess.run([sys.executable, "-c", NO_PROCESS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    opened, refused, *after = done.stdout.splitlines()
    assert opened == "open ones answer: a"
    assert "the system starts no more processes for this user; 1 may run at a time" in refused
    assert after == ["waits: True False {}", "with room again: a"]
