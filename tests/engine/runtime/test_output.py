"""Test printed output of steps: lines carry the step's name, are escaped and bounded, and never block."""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weftline.engine.request import RequestOptions
from weftline.engine.runtime import output
from weftline.engine.runtime.output import LINES_BURST, LINES_PER_S, Output, OutputPipe, StepOutput, show
from weftline.engine.session import Session, load
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.spec.builder import Builder

STEPS = """
import logging
import os
import subprocess
import sys

def says(text: str) -> str:
    print("says", text)
    return text

def logs(text: str) -> str:
    for level in ("debug", "info", "warning"):
        getattr(logging.getLogger("mine"), level)("at %s", level)
    return text

def outside(text: str) -> str:
    os.write(1, b"by descriptor\\n")
    subprocess.run(["echo", "by a child"], check=True)
    return text

def floods(text: str) -> str:
    for line in range(int(text)):
        print("x" * 60, line)
    return text

def quiet(text: str) -> str:
    return text

class Keeps:
    def __call__(self, text: str) -> str:
        return text
    def end_sequence(self, id):
        raise KeyError("cannot forget")
"""


class Lines:
    """A pipe without processes: what was fed to it comes out as lines. Time stands still unless it is moved."""

    def __init__(self) -> None:
        self.step, self.shown, self.now_s = StepOutput("see"), [], 0.0
        read, self._write = os.pipe()
        self.pipe = OutputPipe(read, deque(maxlen=3))

    def feed(self, *parts: bytes) -> list[str]:
        for part in parts:
            self.pipe.feed(part, self.step, lambda step, text: self.shown.append(text), self.now_s)
        return self.shown

    def close(self) -> None:
        os.close(self.pipe.fd)
        os.close(self._write)


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines()
    yield made
    made.close()


def test_lines_are_cut_at_their_ends_and_escaped(lines: Lines) -> None:
    reported = lines.feed(
        b"50%\rdone\nsaid \x1b[2Jhere\x00\xff \xe2\x80\xae caf\xc3\xa9\n\n\r\n  \nERR", b"OR whole\n\tin\n"
    )
    assert reported == [
        "50%", "done", "said \\x1b[2Jhere\\x00\\xff \\u202e caf\u00e9", "ERROR whole", "        in",
    ]  # fmt: skip


def test_a_line_without_an_end_is_cut_and_the_rest_counted(lines: Lines) -> None:
    reported = lines.feed(*[b"x" * 100_000] * 20, b"x\nnext\n")
    assert [len(one) for one in reported] == [output.LINE_BYTES_MAX, 4]
    assert lines.step.dropped_bytes == 2_000_001 - output.LINE_BYTES_MAX
    assert len(lines.pipe._partial) <= output.LINE_BYTES_MAX


def test_a_flood_is_dropped_counted_and_reported_once_a_second(lines: Lines) -> None:
    for _ in range(100):
        lines.feed(b"a line\n" * 10_000)
    assert len(lines.shown) == LINES_BURST
    assert lines.step.dropped_lines == 1_000_000 - LINES_BURST
    assert lines.step.dropped_bytes == 7 * lines.step.dropped_lines
    assert not lines.step.owes(0.5) and lines.step.owes(1.0)
    reported = lines.step.dropped(1.0)
    assert f"({lines.step.dropped_lines} lines, {lines.step.dropped_bytes} bytes" in reported
    lines.now_s = 1.0
    lines.feed(b"more\n" * 10_000)
    assert len(lines.shown) == LINES_BURST + LINES_PER_S
    assert not lines.step.owes(1.5) and lines.step.owes(2.1)


def test_blank_lines_and_few_long_ones_are_bounded_too(lines: Lines) -> None:
    lines.feed(b" \n" * 100_000)
    assert lines.shown == [] and lines.step.dropped_lines == 100_000 - LINES_BURST
    lines.now_s = 1000.0
    lines.feed(*[b"y" * 8000 + b"\n"] * 1000)
    assert len(lines.shown) <= output.BYTES_BURST / 8000 + 1


def test_what_is_dropped_costs_next_to_nothing(lines: Lines) -> None:
    lines.feed(b"a line\n" * 10_000)
    data = b"a line\n" * 37_000
    began_s = time.thread_time()
    for _ in range(40):
        lines.feed(data)
    assert time.thread_time() - began_s < 0.4, "a million and a half lines"


def test_a_reader_that_takes_nothing_stops_no_printing() -> None:
    stuck = threading.Event()
    reading = Output(lambda step, text: stuck.wait(60) and None)
    read, write = os.pipe()
    reading.add("see", OutputPipe(read, deque()))
    try:
        done = threading.Event()

        def prints() -> None:
            for _ in range(200):
                os.write(write, b"z" * 99 + b"\n" + b"w" * 9_900 + b"\n")
            done.set()

        threading.Thread(target=prints, daemon=True).start()
        assert done.wait(30), "2 MB were written though nothing was shown"
    finally:
        stuck.set()
        reading.close()
        os.close(read)
        os.close(write)


def test_closing_writes_what_was_read_and_ends_both_threads() -> None:
    reported: list[str] = []
    reading = Output(lambda step, text: reported.append(f"{step}: {text}"))
    read, write = os.pipe()
    pipe = OutputPipe(read, deque())
    reading.add("see", pipe)
    os.write(write, b"last words")
    os.close(write)
    reading.remove(pipe, 4)
    reading.close()
    reading.close()
    os.close(read)
    assert reported == ["see: last words"]
    assert not [one for one in threading.enumerate() if one in reading._threads]


def test_output_goes_to_standard_error_unless_logging_takes_it(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("weftline", "weftline.worker"):
        monkeypatch.setattr(logging.getLogger(name), "level", 0)
    monkeypatch.setattr(logging.getLogger("weftline"), "propagate", True)
    caplog.set_level(logging.WARNING)
    show("see", "a line")
    assert capsys.readouterr().err == "see: a line\n" and caplog.records == []
    caplog.set_level(logging.INFO)
    show("see", "another")
    assert capsys.readouterr().err == "" and caplog.messages == ["see: another"]


# in service


@pytest.fixture
def opened(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Session]]:
    """Open a pipeline with one step per function, each with input x; `process` runs them in one worker."""
    (tmp_path / "steps.py").write_text(STEPS)
    sessions: list[Session] = []

    def opened(*names: str, **options: object) -> Session:
        made = Builder("test", base_dir=tmp_path)
        x = made.input("x", "text")
        for name in names:
            made.output(
                f"{name}_out", made.step(name, "function", function=f"steps.py:{name}", text=x, **options).output
            )
        sessions.append(load(made).open())
        return sessions[-1]

    yield opened
    for session in sessions:
        session.close()


@pytest.mark.slow
def test_print_and_warnings_are_on_standard_error_by_default(
    opened: Callable[..., Session], capfd: pytest.CaptureFixture[str]
) -> None:
    with opened("says", "logs", "outside") as session:
        session.run(x="hello")
    err = capfd.readouterr().err.splitlines()
    assert "says: says hello" in err and "logs: WARNING mine: at warning" in err
    assert "outside: by descriptor" in err and "outside: by a child" in err
    assert not [line for line in err if "at info" in line or "at debug" in line]


@pytest.mark.slow
def test_log_records_follow_the_level_of_the_root_logger(
    opened: Callable[..., Session], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weftline"), "propagate", True)
    caplog.set_level(logging.INFO)
    with opened("logs") as session:
        session.run(x="hello")
    assert "logs: INFO mine: at info" in caplog.messages and not [one for one in caplog.messages if "at debug" in one]


def test_steps_that_share_a_process_have_their_own_names(
    opened: Callable[..., Session], capfd: pytest.CaptureFixture[str]
) -> None:
    with opened("says", "outside", "logs", worker="one") as session:
        assert len(session.pids()) == 1
        for _ in range(3):
            session.run(x="hello")
    err = capfd.readouterr().err.splitlines()
    assert err.count("says: says hello") == 3 and err.count("outside: by a child") == 3
    assert err.count("logs: WARNING mine: at warning") == 3


@pytest.mark.slow
def test_what_is_raised_at_the_end_of_a_sequence_is_printed(
    opened: Callable[..., Session], capfd: pytest.CaptureFixture[str]
) -> None:
    with opened("Keeps", sequence={}) as session:
        session.run(RequestOptions(sequence=SequencePart("one", start=True)), x="a")
        session.run(RequestOptions(sequence=SequencePart("one", end=True)), x="a")
        time.sleep(0.5)
    err = capfd.readouterr().err
    assert "Keeps: KeyError: 'cannot forget'" in err and "in end_sequence" in err


def test_a_step_that_floods_is_counted_and_answers(
    opened: Callable[..., Session], capfd: pytest.CaptureFixture[str]
) -> None:
    with opened("floods") as session:
        assert session.run(x="20000")["floods_out"] == "20000"
        until = time.monotonic() + 30
        while not session.stats()["output_dropped_bytes"]["floods"] and time.monotonic() < until:
            time.sleep(0.05)
        assert session.stats()["worker_deaths"] == 0
    err = capfd.readouterr().err.splitlines()
    assert LINES_BURST <= len(err) < 10_000
    assert "of its output were dropped" in err[-1]


@pytest.mark.slow
def test_a_million_printed_lines_leave_another_models_latency_alone(
    opened: Callable[..., Session], capfd: pytest.CaptureFixture[str]
) -> None:
    """Compare with the same load without printed lines, so that the CPU use of the flood itself is excluded."""
    with opened("floods") as noisy, opened("quiet") as calm:

        def p99_ms(work: str) -> float:
            busy = threading.Thread(target=lambda: noisy.run(x=work))
            busy.start()
            taken: list[float] = []
            until = time.monotonic() + 5
            while time.monotonic() < until or busy.is_alive():
                began_s = time.perf_counter()
                calm.run(x="a")
                taken.append((time.perf_counter() - began_s) * 1e3)
            busy.join()
            return statistics.quantiles(taken, n=100)[-1]

        quiet_ms = min(p99_ms("0") for _ in range(2))
        flooded_ms = p99_ms("1000000")
        assert noisy.stats()["worker_deaths"] == calm.stats()["worker_deaths"] == 0
    assert flooded_ms < 2 * quiet_ms + 20, f"quiet {quiet_ms:.1f} ms, flooded {flooded_ms:.1f} ms"
    assert len(capfd.readouterr().err) < 4 << 20
