"""How each step fared."""

import pytest

from tests.engine.jobs.report.made import job
from weftline.engine.jobs.progress import StepTally, Tally
from weftline.engine.jobs.report.summary import rows_per_s, step_figures, tokens_per_s


def one_step(rows: int = 100, batch: int = 10, node_ms: float = 50.0) -> Tally:
    tally = Tally()
    tally.of("see").add(20.0, node_ms, batch, rows)
    return tally


def test_a_step_is_told_by_its_tally() -> None:
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
