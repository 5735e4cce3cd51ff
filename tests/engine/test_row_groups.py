"""Rows of a job whose inputs do not all fit into shared memory are cut into portions by their sizes alone."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from weftline.engine.result import Result
from weftline.engine.row_groups import InputSpace
from weftline.engine.session import Session, plan_of
from weftline.errors import LimitReached, WeftlineError

PIPELINE = """
weftline: 1
name: sizes
inputs: {x: "uint8[N]"}
limits: {arena_bytes: 4194304}
steps:
  size: {node: function, function: "steps.py:size", inputs: {x: x}, batch: {items_max: 4}}
outputs: {size: size.output, x: x}
"""

STEPS = """
def size(x: "uint8[N]") -> int:
    return len(x)
"""

ROWS = 20
ROW_BYTES = 400_000  # 5 are the most in half of the memory, 10 in all of it


def opened(folder: Path) -> Session:
    (folder / "steps.py").write_text(STEPS)
    (folder / "sizes.yaml").write_text(PIPELINE)
    plan = plan_of(folder / "sizes.yaml")
    session = Session(replace(plan, limits=replace(plan.limits, job_batch_ms=math.inf)))  # no other request is served
    session.open()
    return session


def rows(sizes: Sequence[int]) -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros(size, np.uint8)} for size in sizes]


def batches(ends: Sequence[Result | WeftlineError]) -> list[int]:
    """Return how many shared the batch of each row."""
    assert [end for end in ends if not isinstance(end, Result)] == []
    return [next(one.batch for one in end.timings if one.step == "size") for end in ends if isinstance(end, Result)]


def test_rows_form_equal_batches_alone_and_beside_calls_that_fill_memory(tmp_path: Path) -> None:
    with opened(tmp_path) as session, ThreadPoolExecutor(4) as callers:
        alone = batches(session.run_together(rows([ROW_BYTES] * ROWS), space=InputSpace()))
        assert alone == [4, 4, 4, 4, 1] * 4
        space = InputSpace()
        calls = [
            callers.submit(session.run_together, rows([ROW_BYTES + 1000 * place] * ROWS), space=space)
            for place in range(4)
        ]
        assert [batches(call.result(60)) for call in calls] == [alone] * 4


def test_a_large_row_runs_alone_and_one_larger_than_memory_fails(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        ends = session.run_together(rows([100_000, 3_000_000, 5_000_000, 100_000, 100_000]))
    assert isinstance(ends[2], LimitReached) and "arena_bytes" in str(ends[2])
    assert batches([*ends[:2], *ends[3:]]) == [1, 1, 2, 2]


def test_answers_that_keep_memory_are_taken_while_rows_wait_for_it(tmp_path: Path) -> None:
    """The input is an output too: it stays where it is until its answer has been copied out."""
    with opened(tmp_path) as session:
        ends = session.run_together(rows([ROW_BYTES] * ROWS), outputs=["x"])
    assert [end["x"].size for end in ends if isinstance(end, Result)] == [ROW_BYTES] * ROWS
