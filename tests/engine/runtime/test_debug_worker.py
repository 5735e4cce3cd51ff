"""One step in a thread of this process, for a debugger; the others in workers as ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weftline.engine.request import RequestOptions
from weftline.engine.session import OpenablePipeline, load
from weftline.errors import InputError, ModelError, StepError, traceback_of
from weftline.pipelines.spec.builder import Builder

STEPS = """
import os
import time

def before(x: "float32[N]") -> "float32[N]":
    return x + 1

def here(x: "float32[N]") -> {"sum": "float32[]", "pid": "json"}:
    if len(x) == 2:
        time.sleep(1.5)
    if len(x) == 3:
        raise ValueError("three")
    return {"sum": x.sum(), "pid": os.getpid()}

def after(pid: "json") -> {"pids": "json"}:
    return {"pids": [pid, os.getpid()]}

class Breaks:
    def __init__(self):
        raise OSError("not here")
    def __call__(self, x: "float32[N]") -> "float32[N]":
        return x
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., OpenablePipeline]:
    (tmp_path / "steps.py").write_text(STEPS)

    def pipeline(**options: Any) -> OpenablePipeline:
        made = Builder("test", base_dir=tmp_path, limits={"deadline_ms": 200, "silence_max_ms": 1500})
        x = made.step("before", "function", function="steps.py:before", x=made.input("x", "float32[N]")).output
        step = made.step("here", "function", function="steps.py:here", x=x, **options)
        made.output("sum", step.sum)
        made.output("pids", made.step("after", "function", function="steps.py:after", pid=step.pid).pids)
        return load(made)

    return pipeline


@pytest.mark.slow
def test_it_runs_in_this_process_and_the_others_do_not(pipeline: Callable[..., OpenablePipeline]) -> None:
    before = set(threading.enumerate())
    with pipeline(instances=3, worker=None).open(debug="here") as session:
        large = np.ones(100_000, np.float32)
        result = session.run(x=large)
        assert result["sum"] == 200_000
        here, after = result["pids"]
        assert here == os.getpid() != after
        assert len(session.plan.step("here").workers) == 1
        with pytest.raises(StepError, match="three") as caught:
            session.run(x=np.ones(3, np.float32))
        assert "in here" in traceback_of(caught.value)
        assert session.run(x=np.ones(1, np.float32))["sum"] == 2
    assert set(threading.enumerate()) <= before


@pytest.mark.slow
def test_no_limit_of_time_ends_it(pipeline: Callable[..., OpenablePipeline]) -> None:
    options = {"timeout_ms": 300, "run_max_ms": 400}
    with pipeline(**options).open(debug="here") as session:
        began_s = time.monotonic()
        assert session.run(RequestOptions(deadline_ms=100), x=np.ones(2, np.float32))["sum"] == 4
        assert time.monotonic() - began_s > 1.2
        assert session.stats()["worker_deaths"] == 0


def test_a_step_that_is_none_is_refused_before_anything_starts(pipeline: Callable[..., OpenablePipeline]) -> None:
    with pytest.raises(InputError, match="did you mean here"):
        pipeline().open(debug="her")
    with pytest.raises(InputError, match="steps here: before, here, after"):
        pipeline().open(debug="nothing")


def test_a_node_that_cannot_be_opened_reports_the_error(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    made = Builder("test", base_dir=tmp_path)
    made.output("y", made.step("b", "function", function="steps.py:Breaks", x=made.input("x", "float32[N]")).output)
    with pytest.raises(ModelError, match="not here"):
        load(made).open(debug="b")
