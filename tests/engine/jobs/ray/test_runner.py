"""Jobs on a real, small Ray cluster: every row once, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("ray")

from weftline.engine.jobs.ray.cluster import Need
from weftline.engine.jobs.ray.coordinator import LOST
from weftline.engine.jobs.ray.runner import RayRunner
from weftline.engine.jobs.rows import BlockResult, RowBlock, Unusable
from weftline.errors import InputError, ModelError, SessionClosed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

ROWS, WAIT_S = 8, 60.0


@contextmanager
def replicas(
    opener: str = "open_doubler",
    count: int = 2,
    need: Need | None = None,
    **arguments: Any,
) -> Iterator[RayRunner]:
    opened = RayRunner(f"tests.engine.jobs.ray.runners:{opener}", arguments, replicas=count, need=need or Need(1))
    try:
        yield opened
    finally:
        opened.close()


def block_of(number: int) -> RowBlock:
    numbers = list(range(number * ROWS, number * ROWS + ROWS))
    return RowBlock(0, numbers[0], [str(n) for n in numbers], {"n": numbers}, pa.table({"kept": numbers}))


def answers(opened: RayRunner, blocks: range) -> list[BlockResult]:
    asked = [opened.submit(block_of(number)) for number in blocks]
    return [one.result(WAIT_S) for one in asked]


def twice(answered: list[BlockResult]) -> list[Any]:
    return [value for one in answered for value in one.outputs["twice"]]


def expected(blocks: range, lost: frozenset[int] = frozenset()) -> list[int | None]:
    rows = range(blocks.start * ROWS, blocks.stop * ROWS)
    return [None if n % 100 == 13 or n in lost else 2 * n for n in rows]


@pytest.mark.slow
def test_a_job_with_deaths_has_each_row_once_and_fatal_rows_as_errors() -> None:
    with replicas(kills=[21]) as opened:
        assert opened.block_rows == 4 and opened.ahead == 2 * 3
        assert str(opened.inputs["n"]) == "json" and opened.repeatable == {"twice": "exact", "pid": "rounding"}
        found = answers(opened, range(24))
        assert twice(found) == expected(range(24), frozenset({21}))
        assert {(n, row): one for n, each in enumerate(found) for row, one in each.errors.items() if one == LOST} == {
            (2, 5): LOST
        }
        assert [error.reason for error in found[1].errors.values()] == ["13 is bad"]
        assert opened.figures()["restarts"] >= 1
        assert sum(each.tally.steps["double"].rows for each in found) == 24 * ROWS - 1

        # and a replica that is killed from outside, in the middle
        asked = [opened.submit(block_of(number)) for number in range(30, 60)]
        pids = [pid for pid in asked[0].result(WAIT_S).outputs["pid"] if pid]
        os.kill(pids[0], signal.SIGKILL)
        assert twice([one.result(WAIT_S) for one in asked]) == expected(range(30, 60))

        # a value that cannot be had
        block = block_of(70)
        bad = RowBlock(0, 0, block.ids, {"n": [Unusable("no file"), *block.inputs["n"][1:]]}, block.table)
        assert list(opened.submit(bad).result(WAIT_S).errors) == [0]
    with pytest.raises(SessionClosed):
        opened.submit(block_of(0)).result(0)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize(
    ("opener", "arguments", "reason"),
    [
        ("open_nothing", {}, "a replica could not open the pipeline: there is no model"),
        ("open_missing", {}, "cannot be imported on this machine"),
        ("open_and_die", {}, "replicas died while they opened"),
    ],
)
def test_replicas_that_cannot_open_end_the_job_in_words(opener: str, arguments: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason), replicas(opener, 1, **arguments):
        pass


def test_what_no_machine_can_hold_is_refused_at_once() -> None:
    with (
        pytest.raises(InputError, match=r"needs 1 CPUs and 2 GPUs\n    found: 4 CPUs and 0 GPUs"),
        replicas(need=Need(1, 2)),
    ):
        pass


@pytest.mark.slow
def test_blocks_that_wait_when_a_job_is_closed_end_with_an_error() -> None:
    with replicas(count=1) as opened:
        asked = [opened.submit(block_of(number)) for number in range(200)]
        asked[0].result(WAIT_S)
    ends = [one.exception(0) for one in asked]
    assert any(isinstance(one, SessionClosed) for one in ends) and ends[0] is None
