"""What is seen while models load, and while a load runs."""

import io
import threading

from weftline.cli.progress import loading_shown, measuring_shown


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_log_has_one_line_for_each_phrase() -> None:
    err = io.StringIO()
    with loading_shown(err) as report:
        report("hear", "reading weights", 0.1)
        report("hear", "reading weights", 0.2)
        report("see", "reading weights", 0.2)
        report("hear", "ready\x1b[2J", 1.0)
    assert err.getvalue().splitlines() == [
        "loading hear: reading weights", "loading see: reading weights", "loading hear: ready\\x1b[2J",
    ]  # fmt: skip


def test_a_terminal_shows_steps_of_all_threads_and_is_cleared_at_the_end() -> None:
    err = Terminal()
    with loading_shown(err) as report:
        for step in ("hear", "see"):
            worker = threading.Thread(target=report, args=(step, "reading [weights]", 7.0))
            worker.start()
            worker.join()
        report("hear", "ready", 1.0)
    shown = err.getvalue()
    assert "hear" in shown and "see" in shown
    assert "reading [weights]" in shown
    assert "\x1b[2K" in shown.rpartition("see")[2], "the lines are erased after the last time they were drawn"


def test_loading_continues_with_standard_error_closed() -> None:
    err = io.StringIO()
    with loading_shown(err) as report:
        err.close()
        report("hear", "ready", 1.0)


def test_a_running_load_is_one_line_in_a_log_and_a_bar_on_a_terminal() -> None:
    log, terminal = io.StringIO(), Terminal()
    with measuring_shown(log, 1.0, 10.0) as report:
        assert report is None
    assert log.getvalue() == "measuring for 10 s after 1 s of warm-up\n"
    with measuring_shown(terminal, 1.0, 10.0) as report:
        assert report is not None
        report(0.5, 1234)
    assert "measuring" in terminal.getvalue() and "1234 requests" in terminal.getvalue()
