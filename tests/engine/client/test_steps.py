"""Refusals of a server become the errors of Session.run."""

import pytest

from weftline import errors
from weftline.engine.client.steps import Refusal, Unavailable, error_of, refusal_of


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("INVALID_ARGUMENT", errors.InputError),
        ("NOT_FOUND", errors.UnknownModel),
        ("UNAUTHENTICATED", errors.AccessDenied),
        ("PERMISSION_DENIED", errors.AccessDenied),
        ("FAILED_PRECONDITION", errors.ModelError),
        ("RESOURCE_EXHAUSTED", errors.LimitReached),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceeded),
        ("CANCELLED", errors.RequestCancelled),
        ("UNAVAILABLE", Unavailable),
        ("INTERNAL", errors.WeftlineError),
        ("DATA_LOSS", errors.WeftlineError),
    ],
)
def test_each_status_has_its_class(status: str, kind: type[errors.WeftlineError]) -> None:
    error = error_of(Refusal(status, "why"), "localhost:1")
    assert type(error) is kind and str(error) == "why"
    if kind is not errors.WeftlineError:
        assert error.status == status


def test_a_failed_step_is_named() -> None:
    error = error_of(Refusal("INTERNAL", "step see.eye: it broke"), "localhost:1")
    assert isinstance(error, errors.StepError) and error.step == "see.eye" and str(error) == "step see.eye: it broke"


def test_when_to_come_back_is_kept() -> None:
    found = refusal_of("RESOURCE_EXHAUSTED", "full", (("retry-after-ms", "1500"),))
    assert error_of(found, "localhost:1").retry_after_s == 1.5
    assert refusal_of("UNAVAILABLE", "", (("grpc-retry-pushback-ms", "-1"), ("retry-after-ms", "9"))).pushback_ms == -1


@pytest.mark.parametrize("value", ["soon", "", "1e3", "9" * 40, b"\xff"])
def test_pushback_that_cannot_be_read_means_never(value: str | bytes) -> None:
    assert refusal_of("UNAVAILABLE", "", (("grpc-retry-pushback-ms", value),)).pushback_ms == -1


def test_a_server_that_is_not_there_is_named() -> None:
    error = error_of(Refusal("UNAVAILABLE", "failed to connect to all addresses; last error: ..."), "localhost:7")
    assert str(error) == (
        "cannot reach a server at localhost:7\n    fix: start one with `weftline serve`; check its gRPC address and tls"
    )


def test_an_http_port_is_named_as_one() -> None:
    details = (
        "failed to connect to all addresses; last error: ... (Trying to connect an http1.x server (HTTP status 400))"
    )
    refusal = refusal_of("UNAVAILABLE", details, ())
    assert refusal.pushback_ms == -1, "an attempt at another address would hide it"
    error = error_of(refusal, "localhost:8000")
    assert str(error).startswith("the server at localhost:8000 speaks HTTP/1, not gRPC\n    fix: pass its gRPC address")


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("SERVER: Received message larger than max (5242890 vs. 4194304)", "request"),
        ("Stream removed (CLIENT: Received message larger than max (5242890 vs. 4194304))", "answer"),
        ("SERVER: Sent message larger than max (5242890 vs. 4194304)", "answer"),
    ],
)
def test_a_message_that_is_too_large_is_not_worth_a_retry(text: str, side: str) -> None:
    found = refusal_of("RESOURCE_EXHAUSTED", text, (("grpc-retry-pushback-ms", "5"),))
    assert found.pushback_ms is None
    text = str(error_of(found, "localhost:1"))
    assert text.startswith(f"the {side} is a message of 5242890 bytes; the most is 4194304")
