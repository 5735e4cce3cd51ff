"""A load's figures as text: the latency objective."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from tests.engine.loads import joined, one_request
from weftline.cli.report import print_report
from weftline.engine.bench.report import report
from weftline.pipelines.spec.policy import Slo


def printed(latency_p99_ms: float | None) -> str:
    out = io.StringIO()
    plan = replace(joined(), slo=Slo(latency_p99_ms))
    print_report(report([one_request()], plan, "closed, 1 caller"), (), out)
    return out.getvalue()


@pytest.mark.parametrize(("objective_ms", "found"), [(20.0, "met"), (19.5, "missed")])
def test_it_says_whether_the_latency_objective_was_met(objective_ms: float, found: str) -> None:
    assert f"\nobjective   p99 within {objective_ms:g} ms (slo.latency_p99_ms): {found}\n" in printed(objective_ms)


def test_without_an_objective_there_is_no_line_about_it() -> None:
    assert "objective" not in printed(None)
