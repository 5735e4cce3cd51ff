"""What a health says, and why."""

from weftline.engine.health import Health, judge


def test_ready_when_every_step_is() -> None:
    assert judge({"a": True, "b": True}) == Health(True, {"a": True, "b": True}, "")


def test_steps_that_are_not_ready_are_named() -> None:
    assert not judge({"a": True, "b": False}).ready
    assert judge({"a": True, "b": False}).why == "step b has no worker that is ready and was heard of within 3 s"
    assert judge({"a": False, "b": False}).why.startswith("steps a, b have no worker")


def test_a_step_that_sleeps_is_ready_and_it_is_told_that_it_sleeps() -> None:
    health = judge({"a": True, "b": True}, asleep=("b",))
    assert (health.ready, health.why, health.told) == (True, "", "asleep: b")
    worse = judge({"a": False, "b": True}, asleep=("b",))
    assert worse.told == worse.why != ""


def test_a_worker_that_shares_no_gpu_memory_is_ready_and_it_is_told() -> None:
    health = judge({"a": True, "b": True}, asleep=("b",), on_host=("w1", "w2"))
    assert (health.ready, health.why, health.told) == (True, "", "asleep: b; through host memory: w1, w2")


def test_a_closed_pipeline_has_no_step_that_is_ready() -> None:
    assert judge({"a": True}, closed="the session is not open") == Health(
        False, {"a": False}, "the session is not open"
    )
