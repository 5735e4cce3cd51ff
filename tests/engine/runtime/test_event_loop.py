"""Test the event loop: lock, thread, pauses and exhausted system resources."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from weftline.engine.protocol import messages as msg
from weftline.engine.session import Session, load
from weftline.pipelines.spec.builder import Builder


@pytest.fixture
def one() -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def opened(delay_ms: float = 0.0, **limits: float) -> Session:
        p = Builder("one", limits={"arena_bytes": 1 << 20} | limits)
        p.output("y", p.step("s", "echo", value=p.input("x", "text"), delay_ms=delay_ms).value)
        sessions.append(load(p).open())
        return sessions[-1]

    yield opened
    for session in sessions:
        session.close()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> float:
    """Wait until the condition holds and return how many seconds that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        time.sleep(0.002)
    return time.monotonic() - started


@pytest.mark.slow
def test_a_finalizer_that_runs_inside_the_lock_does_not_wait_for_it(one: Callable[..., Session]) -> None:
    session = one(delay_ms=200)
    stream = session.stream(x="a")
    with session._current.runtime._lock:
        stream.__del__()
    assert session.stats()["requests"]["open"] == 0 or wait_until(lambda: session.stats()["requests"]["open"] == 0) < 5
    assert session.stats()["requests"]["cancelled"] == 1


@pytest.mark.slow
def test_ready_is_true_only_while_every_worker_is(one: Callable[..., Session]) -> None:
    session = one()
    assert session.ready and session.health().steps == {"s": True} and session.health().why == ""
    os.kill(session.pids()["s"], signal.SIGKILL)
    wait_until(lambda: not session.ready, 5)
    assert "step s has no worker" in session.health().why
    wait_until(lambda: session.ready)
    assert session.run(x="a")["y"] == "a"
    session.close()
    assert not session.ready and session.health().why == "the session is not open"


@pytest.mark.slow
def test_the_health_names_the_limit_of_the_plan(one: Callable[..., Session]) -> None:
    session = one(silence_max_ms=2500)
    os.kill(session.pids()["s"], signal.SIGKILL)
    wait_until(lambda: not session.ready, 5)
    assert "2.5 s" in session.health().why


@pytest.mark.slow
def test_a_death_is_seen_within_fifty_milliseconds(one: Callable[..., Session]) -> None:
    session = one()
    seen_ms = []
    for _ in range(5):
        wait_until(lambda: session.ready)
        deaths, pid = session.stats()["worker_deaths"], session.pids()["s"]
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda deaths=deaths: session.stats()["worker_deaths"] > deaths, 5)  # type: ignore[misc]
        seen_ms.append((time.monotonic() - started) * 1000)
    assert sorted(seen_ms)[2] < 50, seen_ms


@pytest.mark.slow
def test_a_silent_worker_is_killed_and_replaced(one: Callable[..., Session]) -> None:
    session = one(silence_max_ms=2500)
    pid = session.pids()["s"]
    os.kill(pid, signal.SIGSTOP)
    try:
        took_s = wait_until(lambda: session.pids().get("s") != pid, 10)
        assert took_s > 1.0
        wait_until(lambda: session.ready)
        assert session.run(x="a")["y"] == "a"
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.slow
def test_a_silence_of_the_event_loop_kills_no_worker(one: Callable[..., Session]) -> None:
    session = one(silence_max_ms=1500)
    pids = session.pids()
    with session._current.runtime._lock:
        time.sleep(4)
    time.sleep(1.5)
    assert session.pids() == pids and session.stats()["worker_deaths"] == 0
    assert session.run(x="a")["y"] == "a" and session.ready


STOPPED = """
import sys, time
from weftline.engine.session import load
from weftline.pipelines.spec.builder import Builder
p = Builder("one", limits={"arena_bytes": 1 << 20, "silence_max_ms": 1500})
p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
with load(p).open() as session:
    pids = session.pids()
    print("open", flush=True)
    sys.stdin.readline()
    time.sleep(1.5)
    print(session.pids() == pids, session.run(x="a")["y"], session.stats()["worker_deaths"], flush=True)
"""


@pytest.mark.slow
def test_a_parent_that_was_stopped_for_a_while_kills_no_worker() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "open\n"
        parent.send_signal(signal.SIGSTOP)
        time.sleep(4)
        parent.send_signal(signal.SIGCONT)
        parent.stdin.write("go on\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "True a 0\n"


FEW = """
import os, resource, signal, time
import weftline
from weftline.engine.session import load
from weftline.errors import LimitReached, WeftlineError
from weftline.pipelines.spec.builder import Builder

def pipeline():
    p = Builder("one", limits={"arena_bytes": 1 << 20})
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    return p

def took():
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return taken

def answer(session):
    try:
        return session.run(weftline.RequestOptions(deadline_ms=5000), x="a")["y"]
    except WeftlineError as error:
        return f"{type(error).__name__} {error}"

session = load(pipeline()).open()
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
taken = took()
print("open ones answer:", answer(session))
try:
    load(pipeline()).open()
except WeftlineError as error:
    print("a new session:", type(error).__name__, error)
pid = session.pids()["s"]
os.kill(pid, signal.SIGKILL)
while session.pids().get("s") in (None, pid) or not session.ready:
    time.sleep(0.01)
print("restarted from the reserve, and answers:", answer(session))
fleet = session._current.runtime.fleet
fleet._lend_reserve()
taken += took()  # another caller is quicker
fleet._started(0)
print("short:", answer(session), session.stats()["requests"]["refused"])
for descriptor in taken:
    os.close(descriptor)
print("with room again:", answer(session))
taken = took()[:-3]
session.close()
for descriptor in taken:
    os.close(descriptor)
print("closed", len(os.listdir("/proc/self/fd")) < 20)
"""


@pytest.mark.slow
def test_without_descriptors_workers_restart_from_the_reserve() -> None:
    done = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "open ones answer: a"
    assert lines[1].startswith("a new session: ModelError") and "it may have 256" in lines[1]
    assert lines[2] == "restarted from the reserve, and answers: a"
    assert lines[3].startswith("short: LimitReached this process has no file descriptors left") and lines[3][-1] == "1"
    assert lines[4:] == ["with room again: a", "closed True"]


def test_a_message_to_a_worker_that_has_just_been_buried_is_dropped(one: Callable[..., Session]) -> None:
    session = one()
    fleet = session._current.runtime.fleet
    before = dict(fleet._workers)
    fleet._workers.clear()
    try:
        fleet.send(0, msg.CancelItems(0, (1,)))  # its death and this were decided in one turn
    finally:
        fleet._workers.update(before)
    assert session.run(x="a")["y"] == "a"
