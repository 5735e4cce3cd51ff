"""The health of a pipeline, and the reason it names."""

import math

from weftline.engine.runtime.health import Health, judge

LIMIT_MS = 3000.0


def test_ready_when_every_step_is() -> None:
    assert judge({"a": True, "b": True}, LIMIT_MS) == Health(True, {"a": True, "b": True}, "")


def test_steps_that_are_not_ready_are_named() -> None:
    assert not judge({"a": True, "b": False}, LIMIT_MS).ready
    found = judge({"a": True, "b": False}, LIMIT_MS).why
    assert found == "step b has no worker that is ready and has sent a message within 3 s"
    assert judge({"a": False, "b": False}, LIMIT_MS).why.startswith("steps a, b have no worker")


def test_the_reason_names_the_limit_of_the_plan() -> None:
    assert judge({"a": False}, 2500.0).why.endswith("has sent a message within 2.5 s")
    assert judge({"a": False}, math.inf).why == "step a has no worker that is ready"


def test_a_step_that_sleeps_is_ready_and_is_named() -> None:
    health = judge({"a": True, "b": True}, LIMIT_MS, asleep=("b",))
    assert (health.ready, health.why, health.summary) == (True, "", "asleep: b")
    worse = judge({"a": False, "b": True}, LIMIT_MS, asleep=("b",))
    assert worse.summary == worse.why != ""


def test_a_worker_that_shares_no_gpu_memory_is_ready_and_is_named() -> None:
    health = judge({"a": True, "b": True}, LIMIT_MS, asleep=("b",), on_host=("w1", "w2"))
    assert (health.ready, health.why, health.summary) == (True, "", "asleep: b; through host memory: w1, w2")


def test_a_closed_pipeline_has_no_step_that_is_ready() -> None:
    closed = judge({"a": True}, LIMIT_MS, closed="the session is not open")
    assert closed == Health(False, {"a": False}, "the session is not open")
