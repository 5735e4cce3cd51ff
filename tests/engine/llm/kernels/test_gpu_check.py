"""The check on a GPU says why it does nothing where there is none, and its own parts work without one."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from weftline.engine.llm.kernels import checks, gpu_check


def test_without_a_gpu_it_skips_with_a_reason(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "available", lambda device: "there is none")
    assert gpu_check.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "skipped: there is none"
    assert json.loads(printed[-1]) == {"skipped": "there is none"}


def test_a_wrong_kernel_and_one_that_fails_are_both_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise RuntimeError("does not compile")

    made = [
        checks.Check("right", lambda: 0.5, 1.0),
        checks.Check("wrong", lambda: 2.0, 1.0),
        checks.Check("not a number", lambda: float("nan"), 1.0),
        checks.Check("broken", broken, 1.0),
    ]
    monkeypatch.setattr(checks, "all_checks", lambda device, random_rounds: made)
    monkeypatch.setattr(gpu_check, "graph_error", lambda device: 0.0)
    wrong = gpu_check.run_checks(torch.device("cpu"), 0)
    assert list(wrong) == ["wrong", "not a number", "broken"]
    assert wrong["broken"] == "RuntimeError: does not compile"
