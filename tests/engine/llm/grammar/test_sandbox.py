"""What hangs, crashes or eats memory ends a process that is there for it, and the next trial finds a new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weftline.engine.llm.grammar.sandbox import TrialProcess
from weftline.errors import InputError, LimitReached, SessionClosed

GOOD = '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'
BAD = '{"grammars": [{"lark_grammar": "start: nothing"}]}'
STAND_IN = textwrap.dedent(
    """
    import json, os, sys, time
    from weftline.engine.llm.grammar.sandbox import confine
    confine(int(sys.argv[1]), int(sys.argv[2]))
    print('{"error": ""}', flush=True)
    for line in sys.stdin:
        text = json.loads(line)["grammar"]
        if text == "hang":
            while True: pass
        if text == "eat":
            kept = [bytearray(1 << 24) for _ in range(10_000)]
        if text == "crash":
            os.abort()
        if text == "babble":
            sys.stdout.write("x" * (3 << 20))
        if text == "nonsense":
            print("no JSON", flush=True)
        print(json.dumps({"error": text[:100]}), flush=True)
    """
)


@pytest.fixture
def trials() -> Iterator[TrialProcess]:
    made = TrialProcess()
    yield made
    made.kill()


@pytest.fixture
def stand_in() -> Iterator[TrialProcess]:
    made = TrialProcess(trial_max_ms=30_000.0, memory_bytes=256 << 20, command=("-c", STAND_IN))
    yield made
    made.kill()


@pytest.fixture
def hasty() -> Iterator[TrialProcess]:
    made = TrialProcess(trial_max_ms=1000.0, command=("-c", STAND_IN))
    yield made
    made.kill()


def pid_of(trials: TrialProcess) -> int:
    assert trials._process is not None
    return trials._process.pid


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent to notice its end does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_grammar_is_found_good_or_wrong(trials: TrialProcess) -> None:
    assert trials._process is None  # nothing is started before the first one
    assert trials.wait_trial(GOOD) == ""
    assert 'unknown name: "nothing"' in trials.wait_trial(BAD)
    assert trials.wait_trial(GOOD) == ""


def test_one_that_takes_too_long_is_killed_and_the_next_one_is_tried(hasty: TrialProcess) -> None:
    assert hasty.wait_trial("fine") == "fine"
    first, began = pid_of(hasty), time.monotonic()
    with pytest.raises(InputError, match="not prepared after 1000 ms, the limit"):
        hasty.wait_trial("hang")
    assert 0.9 < time.monotonic() - began < 10
    assert not alive(first)
    assert hasty.wait_trial("fine") == "fine"
    assert pid_of(hasty) != first


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("what", ["eat", "crash", "babble", "nonsense"])
def test_one_that_ends_its_process_is_refused_and_the_next_one_is_tried(stand_in: TrialProcess, what: str) -> None:
    with pytest.raises(InputError, match="it ended the process that prepares them, which may use 256 MiB"):
        stand_in.wait_trial(what)
    assert stand_in.wait_trial("fine") == "fine"


def test_a_process_that_died_between_two_trials_is_replaced(
    stand_in: TrialProcess, caplog: pytest.LogCaptureFixture
) -> None:
    assert stand_in.wait_trial("fine") == "fine"
    os.kill(pid_of(stand_in), signal.SIGKILL)
    with pytest.raises(InputError):
        stand_in.wait_trial("fine")
    assert "the process that tries grammars died: return code -9" in caplog.text
    assert stand_in.wait_trial("fine") == "fine"


@pytest.mark.slow
def test_one_that_does_not_read_is_not_waited_for(hasty: TrialProcess) -> None:
    assert hasty.wait_trial("fine") == "fine"
    os.kill(pid_of(hasty), signal.SIGSTOP)
    with pytest.raises(InputError, match="not prepared after 1000 ms"):
        hasty.wait_trial("x" * 1_000_000)
    assert hasty.wait_trial("x" * 1_000_000) == "x" * 100


def test_without_a_process_the_caller_may_try_again() -> None:
    trials = TrialProcess(command=("-c", "raise SystemExit"))
    with pytest.raises(LimitReached, match="try again") as raised:
        trials.wait_trial(GOOD)
    assert raised.value.retry_after_s > 0


def test_close_ends_the_trial_that_runs(stand_in: TrialProcess) -> None:
    assert stand_in.wait_trial("fine") == "fine"
    pid = pid_of(stand_in)
    closing = threading.Timer(0.2, stand_in.close)
    closing.start()
    with pytest.raises(SessionClosed):
        stand_in.wait_trial("hang")
    assert not alive(pid)
    with pytest.raises(SessionClosed):
        stand_in.wait_trial("fine")
    closing.join()


def test_the_process_ends_with_its_parent_however_that_ends() -> None:
    script = (
        "import os, signal\n"
        "from weftline.engine.llm.grammar.sandbox import TrialProcess\n"
        f"trials = TrialProcess(command=('-c', {STAND_IN!r}))\n"
        "trials.wait_trial('fine')\n"
        "print(trials._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    deadline = time.monotonic() + 10
    while alive(int(ended.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(int(ended.stdout))


def test_no_descriptor_is_left_behind(stand_in: TrialProcess) -> None:
    stand_in.wait_trial("fine")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(InputError):
            stand_in.wait_trial("crash")
        stand_in.wait_trial("fine")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_process_knows_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hush")
    shows = STAND_IN.replace("text[:100]", "os.environ.get('A_SECRET', 'nothing')")
    trials = TrialProcess(command=("-c", shows))
    assert trials.wait_trial("fine") == "nothing"
    trials.kill()


def test_the_process_loads_no_framework() -> None:
    script = (
        "import sys\n"
        "import weftline.engine.llm.grammar.sandbox, weftline.engine.llm.grammar.matcher, llguidance\n"
        "print(*[name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
