"""What an ingress process is told arrives as it was written."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from weftline.engine.serving.config import GrpcConfig, HttpConfig, Logs, ServeConfig, ServedPipeline, ServeLimits, Tls
from weftline.engine.serving.frontend.spec import GRPC, HTTP, IngressSpec, decode_spec, encode_spec

FULL = ServeConfig(
    {"a": ServedPipeline(Path("/a.yaml"), ("s",), load=False)},
    GrpcConfig("::1", 1, Path("/run/s"), 2, reflection=False),
    HttpConfig("0.0.0.0", 2),
    Tls(Path("/c"), Path("/k"), Path("/ca")),
    Path("/tokens"),
    insecure=True,
    shared_memory=True,
    grace_s=3.5,
    limits=ServeLimits(message_bytes_max=1),
    logs=Logs("json", "debug", requests=True),
    otlp="http://x:1",
)


@pytest.mark.parametrize("config", [FULL, ServeConfig({})])
def test_a_configuration_arrives_as_it_left(config: ServeConfig) -> None:
    spec = IngressSpec("http", (HTTP, GRPC), config)
    assert decode_spec(encode_spec(spec)) == spec


def test_relative_paths_are_those_of_whoever_sends() -> None:
    spec = IngressSpec("grpc", (GRPC,), replace(FULL, tokens=Path("tokens")))
    assert decode_spec(encode_spec(spec)).config.tokens == Path.cwd() / "tokens"


def test_one_that_is_started_again_is_where_it_was() -> None:
    config = IngressSpec("x", (GRPC, HTTP), FULL).at({GRPC: 5, HTTP: 6}).config
    assert config.http is not None
    assert (config.grpc.port, config.http.port) == (5, 6)


def test_nonsense_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_spec(b"\x81\xa4name\x01")
