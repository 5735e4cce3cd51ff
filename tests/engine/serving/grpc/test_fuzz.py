"""S1-S3, S6, S16 over the wire: random messages to every method get a valid response or a readable refusal.

No status that says the server is at fault, nothing of the server's inside in any message, and a healthy client goes on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.engine.serving.grpc.requests import METHOD, numbers, request, text_request
from tests.engine.serving.grpc.served import ECHO, TEXT, Served, served_in_thread
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.grpc.protos import INFERENCE_SERVICE
from weftline.engine.serving.grpc.service import request_class

INSIDE = re.compile(
    r"0x[0-9a-f]{6,}|Traceback|File \"|\.py\b|/(?:work|home|usr|tmp|dev|etc|root)/|google\.|<class|memfd"
)
FINE = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,  # a model that is not loaded
}
METHODS = [one for one in INFERENCE_SERVICE.methods if one.name != "ModelStreamInfer"]
WORDS = ["", "echo", "text", "x", "y", "UINT8", "BYTES", "BF16", "../echo", "/dev/shm/a", "a" * 5000, "\0", "1", "-1"]
KEYS = [
    "sequence_id",
    "priority",
    "timeout",
    "triton_x",
    "shared_memory_region",
    "shared_memory_byte_size",
    "trace_rate",
]
Kind = FieldDescriptor


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    logger = logging.getLogger("weftline")  # LogSettings is one of the methods
    level = logger.level
    limits = ServeLimits(message_bytes_max=1 << 20)
    with served_in_thread({"echo": ECHO, "text": TEXT}, limits=limits, shared_memory=True) as one:
        yield one
    logger.setLevel(level)


def value(draw: Any, field: Any, depth: int) -> Any:
    """Draw a value of one element of a field."""
    kind = field.cpp_type
    if kind == Kind.CPPTYPE_MESSAGE:
        return fill(draw, field.message_type._concrete_class(), depth + 1)
    if kind == Kind.CPPTYPE_STRING:
        if field.type == Kind.TYPE_BYTES:
            return draw(st.binary(max_size=100))
        return draw(st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    if kind == Kind.CPPTYPE_BOOL:
        return draw(st.booleans())
    if kind in (Kind.CPPTYPE_FLOAT, Kind.CPPTYPE_DOUBLE):
        return draw(st.floats(width=32))
    bits = 31 if kind in (Kind.CPPTYPE_INT32, Kind.CPPTYPE_UINT32) else 63
    least = 0 if kind in (Kind.CPPTYPE_UINT32, Kind.CPPTYPE_UINT64) else -(1 << bits)
    return draw(st.sampled_from([0, 1, 3, (1 << bits) - 1, least]) | st.integers(least, (1 << bits) - 1))


def fill(draw: Any, message: Any, depth: int = 0) -> Any:
    """Fill random fields of a message."""
    for field in message.DESCRIPTOR.fields:
        if depth > 3 or not draw(st.booleans()):
            continue
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            inner = entry.fields_by_name["value"]
            for _ in range(draw(st.integers(0, 2))):
                key = draw(st.sampled_from(KEYS) | st.text(max_size=10))
                if inner.message_type is None:
                    getattr(message, field.name)[key] = value(draw, inner, depth)
                else:
                    getattr(message, field.name)[key].CopyFrom(value(draw, inner, depth))
        elif field.is_repeated:
            getattr(message, field.name).extend([value(draw, field, depth) for _ in range(draw(st.integers(0, 3)))])
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value(draw, field, depth))
        else:
            setattr(message, field.name, value(draw, field, depth))
    return message


def check(server: Served, method: str, data: bytes) -> None:
    with grpc.insecure_channel(server.address) as channel:
        try:
            answer: bytes = channel.unary_unary(METHOD + method)(data, timeout=20)
        except grpc.RpcError as error:
            assert error.code() in FINE, (method, error.code(), error.details())
            assert not INSIDE.search(error.details()), error.details()
            assert len(error.details()) <= 1000
        else:
            assert method in ("ModelInfer", "LogSettings", "TraceSetting") or b"Traceback" not in answer


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from([one.name for one in METHODS]), data=st.binary(max_size=300))
def test_any_bytes_to_any_method(server: Served, method: str, data: bytes) -> None:
    check(server, method, data)


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(METHODS), draw=st.data())
def test_any_message_to_any_method(server: Served, method: Any, draw: st.DataObject) -> None:
    message = fill(draw.draw, request_class(method)())
    assume(getattr(message, "model_name", "") not in ("echo", "text") or not method.name.startswith("Repository"))
    check(server, method.name, message.SerializeToString())


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    valid=st.sampled_from([request(), text_request("text", "hello", sequence_id=3), text_request("text", "")]),
    at=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
    cut=st.booleans(),
)
def test_a_good_request_with_one_wrong_byte(server: Served, valid: Any, at: float, byte: int, cut: bool) -> None:
    data = bytearray(valid.SerializeToString())
    place = int(at * len(data))
    data[place] = byte
    check(server, "ModelInfer", bytes(data[:place] if cut else data))


def test_a_healthy_client_is_served_as_if_nothing_had_been(server: Served) -> None:
    with triton.InferenceServerClient(server.address) as client:
        assert client.is_server_ready()
        assert client.infer("echo", [numbers([1, 2])]).as_numpy("y").tolist() == [1, 2]
    for model in ("echo", "text"):
        requests = server.backend.stats(model)["requests"]
        assert requests["open"] == 0 and server.backend.stats(model)["arena"]["leased_bytes"] == 0
