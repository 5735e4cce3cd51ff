"""What became of a job, and what to do next."""

from tests.engine.jobs.report.made import job
from weftline.engine.jobs.report.summary import next_steps, outcome


def test_a_job_without_errors_needs_nothing() -> None:
    assert (outcome(job(errors=0)), next_steps(job(errors=0))) == ("finished", [])


def test_error_rows_can_be_run_again() -> None:
    assert outcome(job(errors=1)) == "finished, 1 row with errors"
    (said,) = next_steps(job(errors=1))
    assert "--retry-errors" in said and "the 1 error row again" in said


def test_a_job_that_stopped_says_why_and_that_it_goes_on() -> None:
    end = job(finished=False, why="no space\x1b[2J\nleft", errors=2)
    assert outcome(end) == "stopped: no space\\x1b[2J left"
    first, second = next_steps(end)
    assert "same command" in first and "--retry-errors" in second
    assert outcome(job(finished=False, why="")) == "stopped: no reason was given"
