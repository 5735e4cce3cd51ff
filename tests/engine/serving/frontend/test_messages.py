"""Start parameters and errors in messages arrive as they were sent."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from weftline import errors
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.config import GrpcConfig, HttpConfig, Logs, ServeConfig, ServedPipeline, ServeLimits, Tls
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.messages import (
    GRPC,
    HTTP,
    IngressSpec,
    decode_spec,
    encode_spec,
    from_wire_error,
    to_wire_error,
)

FULL = ServeConfig(
    {"a": ServedPipeline(Path("/a.yaml"), ("s",), load=False)},
    GrpcConfig("::1", 1, Path("/run/s"), 2, reflection=False),
    HttpConfig("0.0.0.0", 2),
    Tls(Path("/c"), Path("/k"), Path("/ca")),
    Path("/tokens"),
    insecure=True,
    shared_memory=True,
    grace_s=3.5,
    limits=ServeLimits(message_bytes_max=1024),
    logs=Logs("json", "debug", requests=True),
    otlp="http://x:1",
)


@pytest.mark.parametrize("config", [FULL, ServeConfig({})])
def test_a_configuration_arrives_as_it_left(config: ServeConfig) -> None:
    spec = IngressSpec("http", (HTTP, GRPC), config)
    assert decode_spec(encode_spec(spec)) == spec


def test_relative_paths_are_those_of_the_sender() -> None:
    spec = IngressSpec("grpc", (GRPC,), replace(FULL, tokens=Path("tokens")))
    assert decode_spec(encode_spec(spec)).config.tokens == Path.cwd() / "tokens"


def test_one_that_is_started_again_is_where_it_was() -> None:
    config = IngressSpec("x", (GRPC, HTTP), FULL).at({GRPC: 5, HTTP: 6}).config
    assert config.http is not None
    assert (config.grpc.port, config.http.port) == (5, 6)


def test_nonsense_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_spec(b"\x81\xa4name\x01")


WITH_TIMINGS = errors.StepError("it broke", "see")
WITH_TIMINGS.timings = (StepTiming("see", 1.0, 2.0, 3),)


@pytest.mark.parametrize(
    "error",
    [
        errors.InputError("wrong", param="temperature"),
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
    sent = msg.decode_to_ingress(msg.encode(msg.RequestFailed(1, to_wire_error(error))))
    assert isinstance(sent, msg.RequestFailed)
    found = from_wire_error(sent.error)
    assert type(found) is type(error)
    assert (str(found), found.status, found.retry_after_s) == (str(error), error.status, error.retry_after_s)
    assert found.timings == error.timings
    if isinstance(error, errors.StepError):
        assert isinstance(found, errors.StepError)
        assert found.step == error.step
    if isinstance(error, errors.InputError):
        assert isinstance(found, errors.InputError)
        assert found.param == error.param


def test_an_unexpected_exception_is_sent_without_its_text() -> None:
    wire = to_wire_error(KeyError("/etc/secret at 0x7f00"))
    assert "secret" not in wire.message
    assert from_wire_error(wire).status == "INTERNAL"


def test_out_of_memory_is_a_limit() -> None:
    assert from_wire_error(to_wire_error(MemoryError())).status == "RESOURCE_EXHAUSTED"


def test_an_unknown_class_is_still_an_error_of_ours() -> None:
    assert type(from_wire_error(msg.WireError("os.system", "words"))) is errors.WeftlineError
