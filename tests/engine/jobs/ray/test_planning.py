"""A real pipeline on a small Ray cluster: decided there, and answered as it is here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

pytest.importorskip("ray")

from tests.engine.jobs.ray.conftest import BODY, ENGINE, family
from weftline.engine.jobs.ray.runner import ray_runner_factory
from weftline.engine.jobs.rows import RowBlock, Unusable
from weftline.engine.jobs.runners.factory import local_runner_factory
from weftline.errors import ModelError, PipelineError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def block_of(number: int) -> RowBlock:
    texts = [f"{number} {row}" for row in range(16)]
    return RowBlock(0, number * 16, texts, {"text": [*texts[:-1], Unusable("no file")]}, pa.table({}))


@pytest.mark.slow
def test_a_pipeline_is_decided_and_answered_on_the_cluster_as_here(greet: Callable[..., Path]) -> None:
    path = greet()
    here, there = local_runner_factory(path), ray_runner_factory(path)
    decided = [(one.mode, one.why, one.block_rows, one.part_rows, one.repeatable) for one in (here, there)]
    assert decided[0] == decided[1]
    found = []
    for factory in (here, there):
        runner = factory()
        try:
            asked = [runner.submit(block_of(number)) for number in range(5)]
            answered = [one.result(60.0) for one in asked]
            found.append([(one.outputs, one.errors, one.tally.steps["hello"].rows) for one in answered])
            assert {name: str(type) for name, type in runner.outputs.items()} == {"said": "text"}
        finally:
            runner.close()
    assert found[0] == found[1]
    assert found[1][2][0]["said"][:2] == ["hello 2 0", "hello 2 1"] and list(found[1][2][1]) == [15]
    assert not psutil.wait_procs(family(ENGINE), timeout=10)[1]


def test_file_errors_are_local_and_plan_errors_come_from_the_cluster(greet: Callable[..., Path]) -> None:
    with pytest.raises(PipelineError, match="did you mean steps"):
        ray_runner_factory(greet("inputs: {text: text}\nstepz: {}\noutputs: {}\n"))
    with pytest.raises(ModelError, match=r"on the Ray cluster: (?s:.*)cannot run in blocks"):
        ray_runner_factory(greet(BODY.replace("node: template,", "node: template, timeout_ms: 60000,")), mode="blocks")
