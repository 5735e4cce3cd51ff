"""Progress on a terminal and in a log, with a clock that the tests turn."""

import io
import threading

import pytest

from weftline.engine.jobs.progress import Progress
from weftline.engine.jobs.report.progress_display import ProgressDisplay


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def at(rows: int, elapsed_s: float, **figures: float) -> Progress:
    return Progress(rows, 0, 1000, 2, rows // 100 * 100, elapsed_s, figures)


def test_a_log_has_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    err, clock = io.StringIO(), Clock()
    with ProgressDisplay(err, clock) as teller:
        for second in range(26):
            clock.now_s = 100.0 + second
            teller.update(at(second * 10, float(second)))
    lines = err.getvalue().splitlines()
    assert lines == [
        "rows 100/1000 (10.0 %)  10.0 rows/s  errors 2  committed 100  ETA 1m30s",
        "rows 200/1000 (20.0 %)  10.0 rows/s  errors 2  committed 200  ETA 1m20s",
        "rows 250/1000 (25.0 %)  10.0 rows/s  errors 2  committed 200  ETA 1m15s",
    ]


def test_the_end_is_printed_once_and_last() -> None:
    err, clock = io.StringIO(), Clock()
    teller = ProgressDisplay(err, clock)
    teller.update(at(0, 0.0))
    clock.now_s += 10
    teller.update(at(1000, 10.0))
    teller.close()
    teller.close()
    clock.now_s += 20
    teller.update(at(1000, 30.0))
    assert err.getvalue().count("rows 1000/1000 (100.0 %)") == 1
    assert err.getvalue().count("\n") == 1


def test_a_job_without_progress_prints_nothing() -> None:
    err = io.StringIO()
    ProgressDisplay(err, Clock()).close()
    assert err.getvalue() == ""


def test_a_terminal_shows_a_bar_that_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    err, clock = Terminal(), Clock()
    teller = ProgressDisplay(err, clock)
    teller.update(at(0, 0.0))
    clock.now_s += 0.05
    teller.update(at(7, 0.05))
    assert "0/1000" in err.getvalue() and "7/1000" not in err.getvalue(), "too soon to draw again"
    clock.now_s += 9.95
    teller.update(at(500, 10.0, **{"tokens": 10.0, "busy:see": 0.5}))
    shown = err.getvalue()
    assert "500/1000 (50.0 %)" in shown and "ETA 10s" in shown and "busy see 50 %" in shown and "━" in shown
    teller.note("a note\x1b[2J")
    assert "a note\\x1b[2J" in err.getvalue()
    teller.close()
    assert "\x1b[2K" in err.getvalue().rpartition("━")[2], "the bar is erased after it was drawn for the last time"
    assert err.getvalue().endswith("ETA 10s  busy see 50 %\n"), "the last word stays, as a plain line"


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_a_drawing_has_two_lines_however_narrow_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    err = Terminal()
    ProgressDisplay(err, Clock()).update(at(500, 10.0, **{f"busy:step{number}": 0.5 for number in range(30)}))
    assert err.getvalue().count("\n") == 1


def test_without_colour_nothing_is_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLORTERM", raising=False)
    coloured, plain = Terminal(), Terminal()
    ProgressDisplay(coloured, Clock()).update(at(500, 10.0))
    monkeypatch.setenv("NO_COLOR", "1")
    ProgressDisplay(plain, Clock()).update(at(500, 10.0))
    assert "\x1b[36m" in coloured.getvalue()
    assert "\x1b[36m" not in plain.getvalue() and "500/1000" in plain.getvalue()


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    err = Terminal()
    clock = Clock()
    with ProgressDisplay(err, clock) as teller:
        teller.update(at(400, 8.0))
        clock.now_s += 10
        teller.update(at(900, 18.0))
        teller.note("hello")
        assert "hello" in err.getvalue() and "\x1b" not in err.getvalue()
        clock.now_s += 1
        teller.update(at(1000, 19.0))
    assert [line.partition("  ")[0] for line in err.getvalue().splitlines()] == [
        "rows 900/1000 (90.0 %)", "hello", "rows 1000/1000 (100.0 %)",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_the_job_continues_with_standard_error_closed(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err, clock = kind(), Clock()
    teller = ProgressDisplay(err, clock)
    teller.update(at(1, 1.0))
    err.close()
    clock.now_s += 20
    teller.update(at(2, 21.0))
    teller.note("anybody?")
    teller.close()
    ProgressDisplay(err, clock).close()


def test_any_thread_may_tell() -> None:
    err, clock = io.StringIO(), Clock()
    teller = ProgressDisplay(err, clock)
    threads = [threading.Thread(target=teller.update, args=(at(n, 10.0),)) for n in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    teller.close()
    assert err.getvalue().count("\n") == 1
