"""The table that a terminal shows at the end."""

import pytest

from tests.engine.jobs.report.made import HOSTILE, job
from weftline.engine.jobs.progress import ErrorKind, StepTally, Tally
from weftline.engine.jobs.report.summary import next_steps, outcome, rows_per_s, step_figures, summary, tokens_per_s


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


def test_the_summary_of_a_resumed_job_counts_earlier_rows() -> None:
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
        "  run the same command again: it resumes where this run stopped, and writes every row once",
    ]


def test_a_step_without_items_leaves_its_figures_empty() -> None:
    text = summary(job(tally=Tally({"see": StepTally(skipped=3)}), elapsed_s=0.0))
    (see,) = [line.split() for line in text.splitlines() if line.startswith("  see ")]
    assert see == ["see", "0", "0", "3", "0"]


def test_only_the_first_kinds_are_listed_and_the_others_counted() -> None:
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


def test_a_job_without_errors_needs_nothing() -> None:
    assert (outcome(job(errors=0)), next_steps(job(errors=0))) == ("finished", [])


def test_error_rows_can_be_run_again() -> None:
    assert outcome(job(errors=1)) == "finished, 1 row with errors"
    (said,) = next_steps(job(errors=1))
    assert "--retry-errors" in said and "the 1 error row again" in said


def test_a_stopped_job_reports_the_reason_and_how_to_resume() -> None:
    end = job(finished=False, why="no space\x1b[2J\nleft", errors=2)
    assert outcome(end) == "stopped: no space\\x1b[2J left"
    first, second = next_steps(end)
    assert "same command" in first and "--retry-errors" in second
    assert outcome(job(finished=False, why="")) == "stopped: unknown reason"


def one_step(rows: int = 100, batch: int = 10, node_ms: float = 50.0) -> Tally:
    tally = Tally()
    tally.of("see").add(20.0, node_ms, batch, rows)
    return tally


def test_step_statistics_come_from_the_tally() -> None:
    (step,) = step_figures(job(tally=one_step(), rows=100, elapsed_s=2.0, instances={"see": 1}))
    assert (step.items, step.batches, step.batch_mean) == (100, pytest.approx(10), pytest.approx(10))
    assert step.p50_ms == step.p99_ms == pytest.approx(20, rel=0.12)
    assert (step.busy_s, step.busy) == (pytest.approx(0.5), pytest.approx(0.25))


def test_busy_is_of_one_instance() -> None:
    (step,) = step_figures(job(tally=one_step(), rows=100, elapsed_s=2.0, instances={"see": 2}))
    assert step.busy == pytest.approx(0.125)


def test_of_a_resumed_job_busy_is_of_this_run() -> None:
    spent = Tally({"see": StepTally(rows=20, busy_ms=100.0)})
    (step,) = step_figures(job(tally=one_step(), spent=spent, rows=100, resumed=80, elapsed_s=1.0, instances={}))
    assert step.busy == pytest.approx(0.1)
    assert step.busy_s == pytest.approx(0.5)


def test_nothing_is_divided_by_nothing() -> None:
    end = job(tally=Tally({"see": StepTally()}), rows=0, elapsed_s=0.0, figures={"tokens": 3.0})
    (step,) = step_figures(end)
    assert (step.batch_mean, step.p50_ms, step.busy) == (0.0, None, None)
    assert step_figures(job(tally=one_step(), rows=100, resumed=100))[0].busy is None
    assert rows_per_s(end) == tokens_per_s(end) == 0.0
    assert rows_per_s(job(rows=100, resumed=40, elapsed_s=2.0)) == 30.0
