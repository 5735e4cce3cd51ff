"""The table that a terminal shows at the end."""

from tests.engine.jobs.report.made import HOSTILE, job
from weftline.engine.jobs.progress import ErrorKind, StepTally, Tally
from weftline.engine.jobs.report.summary import summary


def test_a_summary_has_rows_rates_steps_errors_files_and_the_next_command() -> None:
    text = summary(job())
    lines = text.splitlines()
    assert lines[0] == "picture-questions: finished, 10 rows with errors"
    assert "  rows    2000: 1990 ok, 10 errors" in lines
    assert "  time    1m11s, 28.1 rows/s" in lines
    assert "  tokens  81234, 1141 tokens/s" in lines
    (answer,) = [line.split() for line in lines if line.startswith("  answer ")]
    assert answer == ["answer", "2000", "7", "0", "125", "16.0", "421.7", "1059", "70.2", "%"]
    assert any(line.startswith("  7 x answer StepError: the prompt has N tokens") for line in lines)
    assert "  results  answers/results.parquet" in lines
    assert lines[-1].startswith("  run the same command with --retry-errors")


def test_a_resumed_job_says_so() -> None:
    text = summary(job(resumed=500))
    assert "10 errors; 500 of them from earlier runs" not in text
    assert "2000 (500 of them from earlier runs): 1990 ok, 10 errors" in text


def test_a_job_that_stopped_at_once_has_a_summary() -> None:
    end = job(
        rows=0,
        errors=0,
        elapsed_s=0.0,
        tally=Tally(),
        figures={},
        kinds=(),
        files={},
        finished=False,
        why="interrupted",
    )
    assert summary(end).splitlines() == [
        "picture-questions: stopped: interrupted",
        "  rows    0: 0 ok, 0 errors",
        "  time    0.0s, 0 rows/s",
        "",
        "next",
        "  run the same command again: it goes on where this run stopped, and every row is written once",
    ]


def test_a_step_without_items_leaves_its_figures_empty() -> None:
    text = summary(job(tally=Tally({"see": StepTally(skipped=3)}), elapsed_s=0.0))
    (see,) = [line.split() for line in text.splitlines() if line.startswith("  see ")]
    assert see == ["see", "0", "0", "3", "0"]


def test_only_the_first_kinds_are_told_and_the_others_counted() -> None:
    kinds = [ErrorKind("see", f"E{number}", "r", 10, ()) for number in range(9)]
    lines = summary(job(kinds=kinds)).splitlines()
    assert "  and 40 rows of 4 more kinds" in lines
    assert sum(line.startswith("  10 x see E") for line in lines) == 5


def test_hostile_texts_stay_within_their_lines() -> None:
    names = {f"{HOSTILE}\nfiles\n": f"{HOSTILE}\nx"}
    end = job(
        pipeline=f"{HOSTILE}\n", files=names, why=HOSTILE, finished=False,
        kinds=[ErrorKind(HOSTILE, HOSTILE, f"{HOSTILE}\n" * 1000, 10**12, [f"{HOSTILE}\n"] * 9)],
        tally=Tally({f"[red]{HOSTILE}\n": StepTally(rows=1)}),
    )  # fmt: skip
    text = summary(end)
    text.encode()
    assert not any(char in text for char in "\x00\x1b\u202e")
    assert text.splitlines().count("files") == 1
    assert "[red]" in text, "nothing is taken for markup"
