"""Every kernel agrees with a float64 reference, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from weftline.engine.llm.kernels.checks import all_checks
from weftline.engine.llm.kernels.reference import difference

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
RANDOM_ROUNDS = 4
NAMES = [check.name for check in all_checks(torch.device("cpu"), RANDOM_ROUNDS)]


@pytest.fixture(scope="module")
def found() -> dict[str, list]:
    """Return what each check gave; in a process of its own, since the interpreter stays on for as long as it lives."""
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.llm.kernels.interpreted"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_gives_what_the_reference_gives(found: dict[str, list], name: str) -> None:
    error, allowed, problem = found[name]
    assert not problem, problem
    assert error <= allowed


@pytest.mark.slow
def test_the_interpreter_ran_every_check_there_is(found: dict[str, list]) -> None:
    assert list(found) == NAMES


def test_the_interpreter_is_not_on_in_this_process() -> None:
    from weftline.engine.llm.kernels.attention_kernel import attend_tiles

    assert type(attend_tiles).__name__ == "JITFunction"


def test_a_nan_is_an_infinite_difference() -> None:
    right = torch.zeros(2, dtype=torch.float64)
    assert difference(torch.tensor([0.0, torch.nan]), right) == float("inf")
    assert difference(torch.tensor([0.0, 0.5]), right) == 0.5
