"""Errors arrive as they left: class, words, status and when to try again."""

import pytest

from weftline import errors
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.trouble import error_of, trouble_of

WITH_TIMINGS = errors.StepError("it broke", "see")
WITH_TIMINGS.timings = (StepTiming("see", 1.0, 2.0, 3),)


@pytest.mark.parametrize(
    "error",
    [
        errors.InputError("wrong"),
        errors.UnknownModel("none"),
        errors.AccessDenied("no", known=False),
        errors.AccessDenied("no"),
        errors.LimitReached("full", 2.5),
        errors.DeadlineExceeded("late"),
        errors.SessionClosed("gone"),
        errors.WorkerDied("died"),
        errors.MissingPackage("torch", "torch", "see"),
        errors.PipelineError([errors.Problem("steps.a", "is wrong", fix="do it", line=3, file="a.yaml")]),
        WITH_TIMINGS,
    ],
)
def test_an_error_arrives_as_it_left(error: errors.WeftlineError) -> None:
    sent = msg.decode_to_ingress(msg.encode(msg.RequestFailed(1, trouble_of(error))))
    assert isinstance(sent, msg.RequestFailed)
    found = error_of(sent.trouble)
    assert type(found) is type(error)
    assert (str(found), found.status, found.retry_after_s) == (str(error), error.status, error.retry_after_s)
    assert found.timings == error.timings
    if isinstance(error, errors.StepError):
        assert isinstance(found, errors.StepError)
        assert found.step == error.step


def test_what_nobody_foresaw_travels_without_its_words() -> None:
    trouble = trouble_of(KeyError("/etc/secret at 0x7f00"))
    assert "secret" not in trouble.message
    assert error_of(trouble).status == "INTERNAL"


def test_out_of_memory_is_a_limit() -> None:
    assert error_of(trouble_of(MemoryError())).status == "RESOURCE_EXHAUSTED"


def test_an_unknown_class_is_still_an_error_of_ours() -> None:
    assert type(error_of(msg.Trouble("os.system", "words"))) is errors.WeftlineError
