"""One client that fills a limit of the server keeps no other client out: calls, connections, watches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.ingress_hostile import HEADERS, PREFACE, SETTINGS, frame, headers
from tests.engine.serving.grpc.requests import METHOD, call_bytes, request, text_request, wait_until
from tests.engine.serving.grpc.served import ECHO, ENDLESS, TRANSPORT, Served, served_in_thread
from tests.engine.serving.grpc.test_hostile import connections, is_well
from weftline.engine.protocol import values
from weftline.engine.serving import call_slots
from weftline.engine.serving.auth.tokens import digest
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.grpc import health
from weftline.engine.serving.grpc.http2_transport import SLICE_CALLS, GrpcConnection
from weftline.engine.serving.grpc.nghttp2 import REQUEST

JSON = """weftline: 1
name: same
inputs: {x: json}
steps:
  same: {node: echo, type: json, inputs: {value: x}}
outputs: {y: same.value}
"""
HEALTH = b"/grpc.health.v1.Health/"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    limits = ServeLimits(calls_max=64, connections_max=32)
    with served_in_thread({"echo": ECHO, "endless": ENDLESS}, limits=limits) as one:
        yield one


def begun(path: bytes, count: int) -> bytes:
    """Return the greeting of a connection and the header blocks of calls without a message."""
    return PREFACE + SETTINGS + b"".join(frame(HEADERS, 4, 2 * at + 1, headers(path)) for at in range(count))


def transport(server: Served) -> Any:
    return server.server._transport


@pytest.mark.parametrize("path", [METHOD.encode() + b"ModelInfer", METHOD.encode() + b"ModelStreamInfer",
                                  METHOD.encode() + b"ServerLive", HEALTH + b"Watch", HEALTH + b"Check"])  # fmt: skip
def test_calls_without_a_message_take_no_slot(server: Served, path: bytes) -> None:
    with connections(server, begun(path, 256), 16):
        wait_until(lambda: len(transport(server).opening) >= call_slots.OPENING_MAX)
        for _ in range(5):
            assert is_well(server)
        assert call_slots.OPENING_MAX - 8 <= len(transport(server).opening) <= call_slots.OPENING_MAX
    wait_until(lambda: not transport(server).opening and not transport(server).slots.total)


@pytest.mark.skipif(TRANSPORT != "nghttp2", reason="gRPC's own server has no such turns")
def test_a_connection_begins_and_ends_few_calls_in_a_turn(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_at_once, turns = [], []
    process, end = GrpcConnection._on_events, GrpcConnection._end_streams

    def counted(connection: Any, events: Any) -> None:
        begun_at_once.append(sum(event is REQUEST for event, _ in events))
        process(connection, events)

    def ended(connection: Any, turn_s: float) -> None:
        before = len(connection.calls)
        end(connection, 0.0)
        turns.append(before - len(connection.calls))

    monkeypatch.setattr(GrpcConnection, "_on_events", counted)
    monkeypatch.setattr(GrpcConnection, "_end_streams", ended)
    with connections(server, begun(METHOD.encode() + b"ModelInfer", 200), 1):
        wait_until(lambda: sum(begun_at_once) == 200)
        assert max(begun_at_once) <= SLICE_CALLS + 1
    wait_until(lambda: sum(turns) == 200)
    assert max(turns) == 1 and not transport(server).opening


def test_large_json_is_not_decoded_where_calls_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    value = [{"a": n} for n in range(20_000)]
    element = json.dumps(value, separators=(",", ":")).encode()
    asked = text_request("same", element.decode(), name="x").SerializeToString()
    with served_in_thread({"same": JSON}) as one:
        monkeypatch.setattr(values, "_decode_json", lambda data: pytest.fail("decoded in the server's process"))
        answer = call_bytes(one.address, asked)
    assert answer.endswith(len(element).to_bytes(4, "little") + element)


def test_watches_of_one_client_end_for_those_of_another(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCHERS_MAX", 8)
    monkeypatch.setattr(health, "WATCHES_MAX", 6)
    requested = health_pb2.HealthCheckRequest(service="")
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each channel
    with grpc.insecure_channel(server.address, own) as greedy, grpc.insecure_channel(server.address, own) as other:
        greedy_stub, stub = health_pb2_grpc.HealthStub(greedy), health_pb2_grpc.HealthStub(other)
        held = [greedy_stub.Watch(requested, timeout=30) for _ in range(6)]
        assert all(next(one).status == 1 for one in held)
        with pytest.raises(grpc.RpcError, match="6 calls of this connection watch already"):
            next(greedy_stub.Watch(requested, timeout=10))
        watches = [stub.Watch(requested, timeout=30) for _ in range(4)]
        assert all(next(one).status == 1 for one in watches)
        wait_until(lambda: sum(not one.is_active() for one in held) == 2)
        for one in held:
            if not one.is_active():
                assert "more than 8 calls watch" in one.details()
        for one in (*held, *watches):
            one.cancel()


def test_one_token_leaves_slots_to_another(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"tokens:\n- {{name: a, sha256: {digest('aaa')}}}\n- {{name: b, sha256: {digest('bbb')}}}\n")
    tokens.chmod(0o600)
    limits = ServeLimits(calls_max=16)
    with served_in_thread({"echo": ECHO, "endless": ENDLESS}, limits=limits, tokens=tokens) as one:
        endless = text_request("endless", "x").SerializeToString()
        with grpc.insecure_channel(one.address) as channel:
            infer = channel.unary_unary(METHOD + "ModelInfer")
            held = [infer.future(endless, metadata=[("authorization", "Bearer aaa")]) for _ in range(12)]
            wait_until(lambda: sum(call.done() for call in held) == 4)
            refused = [call for call in held if call.done()]
            assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            answer = call_bytes(one.address, request().SerializeToString(), metadata=[("authorization", "Bearer bbb")])
            assert len(answer) > 3
            for call in held:
                call.cancel()
