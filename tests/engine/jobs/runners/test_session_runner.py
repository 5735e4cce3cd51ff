"""Rows answered by a session: alike in every run, whatever the pipeline does with each, and beside usual requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from weftline.engine.jobs.rows import RowBlock, RowError, Unusable, row_seed
from weftline.engine.jobs.runners.factory import for_jobs
from weftline.engine.jobs.runners.plans import repeatable
from weftline.engine.jobs.runners.session_runner import SessionRunner
from weftline.engine.session import Session, load
from weftline.errors import InputError, SessionClosed
from weftline.nodes.urgency import seed_of
from weftline.pipelines.spec.policy import Slo

pytest.importorskip("pyarrow")


BRANCHES = """
weftline: 1
name: branches
inputs:
  numbers: list[json]
  mode: {type: text, default: "plain"}
limits: {arena_bytes: 4194304}
steps:
  each:
    node: function
    function: steps.py:double
    inputs: {value: numbers}
    map: value
    batch: {items_max: 4}
  big:
    node: function
    function: steps.py:total
    inputs: {values: each.output}
    when: len(numbers) > 2
  small:
    node: function
    function: steps.py:total
    inputs: {values: each.output}
    when: len(numbers) <= 2
  either:
    node: first
    inputs: {a: big.output, b: small.output}
  seeded:
    node: function
    function: steps.py:seeded
    inputs: {mode: mode}
outputs:
  sum: either.value
  big: big.output
  seed: seeded.output
"""

STEPS = """
import os, weftline

from typing import Any

def double(value: Any) -> Any:
    if value == 13:
        raise ValueError("unlucky")
    if value == 66:
        os.kill(os.getpid(), 9)
    return 2 * value

def total(values: "list[any]") -> Any:
    return sum(values)

def seeded(mode: str) -> list:
    return [mode, weftline.current().seed]
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("branches")
    (folder / "steps.py").write_text(STEPS)
    (folder / "branches.yaml").write_text(BRANCHES)
    opened = Session(for_jobs(load(folder / "branches.yaml").plan, 32))
    opened.open()
    with opened:
        yield opened


def block(numbers: list[Any], place: int = 0, **more: list[Any]) -> RowBlock:
    ids = [f"row-{place + n}" for n in range(len(numbers))]
    return RowBlock(0, place, ids, {"numbers": numbers, **more}, pa.table({"id": ids}))


def runner(session: Session, **more: Any) -> SessionRunner:
    return SessionRunner(session, shared=False, **more)


@pytest.mark.slow
def test_each_row_is_answered_as_it_would_be_alone(session: Session) -> None:
    numbers: list[Any] = [[1, 2], [3, 4, 5], [], [13], [6, 7, 13, 8], [9]]
    answered = (
        runner(session, seed=7).submit(block(numbers, place=100, mode=["a", None, "c", None, "e", "f"])).result(60)
    )
    assert answered.outputs["sum"] == [6, 24, 0, None, None, 18]
    assert answered.outputs["big"] == [None, 24, None, None, None, None]
    assert answered.errors == {row: RowError("each", "StepError", "ValueError: unlucky") for row in (3, 4)}
    seeds = [seed_of(row_seed(7, 100 + row), "seeded") for row in range(6)]
    assert answered.outputs["seed"][0] == ["a", seeds[0]]
    assert answered.outputs["seed"][1] == ["plain", seeds[1]]
    assert len(set(seeds)) == 6
    each = answered.tally.steps["each"]
    assert each.failed >= 2 and each.rows >= 6
    assert answered.tally.steps["big"].skipped >= 3


def test_the_same_block_forms_the_same_batches(session: Session) -> None:
    numbers = [[100 + n] * (n % 4) for n in range(24)]

    def batches(result: Any) -> dict[str, float]:
        return {name: round(one.batches, 6) for name, one in result.tally.steps.items()}

    one = runner(session).submit(block(numbers)).result(60)
    many = runner(session)
    others = [many.submit(block(numbers)) for _ in range(4)]
    assert all(batches(other.result(60)) == batches(one) for other in others)
    assert one.tally.steps["each"].batches == 9  # 36 elements of all rows, in fours


@pytest.mark.slow
def test_a_row_that_kills_its_worker_is_one_error_row(session: Session) -> None:
    answered = runner(session).submit(block([[1], [66], [2], [3, 4]])).result(60)
    assert answered.outputs["sum"] == [2, None, 4, 14]
    assert (answered.errors[1].step, answered.errors[1].error) == ("each", "WorkerDied")
    assert list(answered.errors) == [1]


def test_values_that_cannot_be_had_or_are_refused_are_error_rows(session: Session) -> None:
    answered = runner(session).submit(block([Unusable("column numbers is null"), "text", [1]])).result(60)
    assert answered.errors[0] == RowError("", "InputError", "input numbers: column numbers is null")
    assert answered.errors[1].step == "" and answered.errors[1].error == "InputError"
    assert answered.outputs["sum"] == [None, None, 2]


def test_more_rows_than_memory_are_answered_in_turns(session: Session) -> None:
    """Each row takes half a MiB of the 4 that there are; several blocks want them at the same time."""
    long = "x" * (1 << 19)
    asked = runner(session, outputs=["seed"])
    futures = [asked.submit(block([[]] * 6, mode=[long] * 6)) for _ in range(4)]
    for future in futures:
        answered = future.result(60)
        assert not answered.errors
        assert [len(seed[0]) for seed in answered.outputs["seed"]] == [1 << 19] * 6


def test_a_row_larger_than_all_memory_is_an_error_row(session: Session) -> None:
    answered = runner(session, outputs=["seed"]).submit(block([[], []], mode=["x" * (5 << 20), "b"])).result(60)
    assert answered.errors[0].error == "LimitReached" and "arena_bytes" in answered.errors[0].reason
    assert answered.outputs["seed"][1][0] == "b"


def test_beside_usual_requests_everybody_is_answered(session: Session) -> None:
    asked = SessionRunner(session, shared=True, block_rows=8)
    assert set(asked.repeatable.values()) == {"rounding"}
    futures = [asked.submit(block([[n]] * 8)) for n in range(6)]
    usual = [session.run(numbers=[100 + n])["sum"] for n in range(20)]
    assert usual == [200 + 2 * n for n in range(20)]
    assert [future.result(60).outputs["sum"] for future in futures] == [[2 * n] * 8 for n in range(6)]


def test_unknown_outputs_are_refused(session: Session) -> None:
    with pytest.raises(InputError, match="no output is named total; outputs: sum, big, seed"):
        SessionRunner(session, outputs=["total"])


def test_the_deadline_of_a_pipeline_does_not_apply_to_a_job_of_its_own(session: Session) -> None:
    limits = replace(session.plan.limits, deadline_ms=5.0, refuse_early=False)
    plan = for_jobs(replace(session.plan, limits=limits, slo=Slo(5.0)), 32)
    assert (plan.limits.deadline_ms, plan.limits.refuse_early, plan.slo) == (None, True, Slo())


@pytest.mark.slow
def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("import time\ndef slow(x: str) -> str:\n    time.sleep(0.2)\n    return x\n")
    (tmp_path / "slow.yaml").write_text(
        "weftline: 1\nname: slow\ninputs: {x: text}\n"
        "steps: {a: {node: function, function: 'steps.py:slow', inputs: {x: x}, batch: {items_max: 1}}}\n"
        "outputs: {y: a.output}\n"
    )
    opened = Session(for_jobs(load(tmp_path / "slow.yaml").plan, 32))
    opened.open()
    pids = opened.pids()
    asked = SessionRunner(opened, shared=False, own=True)
    future = asked.submit(RowBlock(0, 0, ["a"] * 100, {"x": ["a"] * 100}, pa.table({"id": ["a"] * 100})))
    closer = threading.Timer(0.5, asked.close)
    closer.start()
    with pytest.raises(SessionClosed):
        future.result(30)
    closer.join(30)
    assert opened.closed and not any(map(psutil.pid_exists, pids.values()))


def test_what_is_exact_and_what_is_not(session: Session) -> None:
    assert repeatable(session.plan, ("sum", "seed"), shared=False) == {"sum": "exact", "seed": "exact"}
    assert repeatable(session.plan, ("sum",), shared=True) == {"sum": "rounding"}


LARGE = """
weftline: 1
name: large
inputs: {n: json}
limits: {arena_bytes: 4194304}
steps:
  grow: {node: function, function: "steps.py:grow", inputs: {n: n}, batch: {items_max: 2}}
  size: {node: function, function: "steps.py:size", inputs: {x: grow.output}, batch: {items_max: 2}}
outputs: {size: size.output}
"""

LARGE_STEPS = """
import numpy as np

def grow(n: int) -> "uint8[N]":
    return np.zeros(500_000 + n, np.uint8)

def size(x: "uint8[N]") -> int:
    return len(x)
"""


@pytest.mark.slow
def test_rows_larger_than_the_arena_run_in_several_portions(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(LARGE_STEPS)
    (tmp_path / "large.yaml").write_text(LARGE)
    with load(tmp_path / "large.yaml").open() as opened:
        block = RowBlock(0, 0, [str(n) for n in range(40)], {"n": list(range(40))}, pa.table({}))
        answered = runner(opened).submit(block).result(60)
    assert answered.errors == {}
    assert answered.outputs["size"] == [500_000 + n for n in range(40)]
