"""S15: every method of every service is denied without a token, and with a token without the right scope."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.engine.serving.grpc.requests import numbers, request, text_request
from tests.engine.serving.grpc.served import ECHO, TEXT, Served, served_in_thread
from weftline.engine.serving.auth.methods import ADMIN, INFER, MEMORY, METHODS, OPEN, READ
from weftline.engine.serving.auth.tokens import digest
from weftline.engine.serving.grpc.protos import HEALTH_SERVICE, INFERENCE_SERVICE, REFLECTION_SERVICE

WEB, OPS, BUSY = "wl_web-" + "w" * 40, "wl_ops-" + "o" * 40, "wl_busy-" + "b" * 40
EVERY: Sequence[tuple[str, MethodDescriptor]] = [
    (f"/{service.full_name}/{method.name}", method)
    for service in (INFERENCE_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE)
    for method in service.methods
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file: Path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    file.write_text(
        "tokens:\n"
        f"  - {{name: web, sha256: {digest(WEB)}, models: [echo]}}\n"
        f"  - {{name: ops, sha256: {digest(OPS)}, admin: true}}\n"
        f"  - {{name: busy, sha256: {digest(BUSY)}, requests_per_s: 1, burst: 2}}\n"
    )
    file.chmod(0o600)
    with served_in_thread({"echo": ECHO, "text": TEXT}, tokens=file) as one:
        yield one


def status(server: Served, method: str, kind: MethodDescriptor, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """Call a method with an empty message, and return how it ended."""
    with grpc.insecure_channel(server.address) as channel:
        call: Any
        if kind.client_streaming:
            call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=20)
        elif kind.server_streaming:
            call = channel.unary_stream(method)(b"", metadata=metadata, timeout=20)
        else:
            call = channel.unary_unary(method)
            try:
                call.with_call(b"", metadata=metadata, timeout=20)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK
        try:
            next(call, None)
        except grpc.RpcError as error:
            return error.code()
        call.cancel()
        return grpc.StatusCode.OK


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


def test_the_table_has_every_method_that_is_served(server: Served) -> None:
    served = set(server.server.methods)
    assert {name for name, _ in EVERY} <= served <= set(METHODS)
    assert len(EVERY) == 20 + 2 + 1


@pytest.mark.parametrize(("method", "kind"), EVERY, ids=[name for name, _ in EVERY])
def test_no_method_is_called_without_a_valid_token(server: Served, method: str, kind: MethodDescriptor) -> None:
    denied = grpc.StatusCode.UNAUTHENTICATED
    for metadata in ((), (bearer("wl_wrong"),), (("authorization", WEB),), (bearer(WEB[:-1]),), (bearer(""),)):
        found = status(server, method, kind, *metadata)
        assert (found is not denied) if METHODS[method] is OPEN else (found is denied)
    assert METHODS[method] is OPEN or status(server, method, kind, bearer(OPS), bearer(OPS)) is denied


@pytest.mark.parametrize(("method", "kind"), EVERY, ids=[name for name, _ in EVERY])
def test_a_token_calls_what_it_has_a_right_to_and_nothing_else(
    server: Served, method: str, kind: MethodDescriptor
) -> None:
    denied = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    asks_model = method.endswith(("ModelReady", "ModelMetadata", "ModelConfig"))
    may = METHODS[method] in (OPEN, READ, INFER) and not asks_model  # the empty name is none of its models
    assert (status(server, method, kind, bearer(WEB)) not in denied) == may
    assert METHODS[method] in (OPEN, READ, INFER, ADMIN, MEMORY)
    assert status(server, method, kind, bearer(OPS)) not in denied


def test_a_token_sees_and_asks_its_own_models_alone(server: Served) -> None:
    headers = {"authorization": f"Bearer {WEB}"}
    with triton.InferenceServerClient(server.address) as client:
        assert client.infer("echo", [numbers([1])], headers=headers).as_numpy("y").tolist() == [1]
        assert [one.name for one in client.get_model_repository_index(headers).models] == ["echo"]
        every = client.get_inference_statistics(headers=headers).model_stats
        assert {one.name for one in every} == {"echo", "echo.same"}
        for ask in (client.get_model_metadata, client.get_model_config, client.is_model_ready):
            denials = []
            for model in ("text", "nothing"):
                with pytest.raises(Exception, match="does not allow this model") as denied:
                    ask(model, headers=headers)
                denials.append(str(denied.value))
            assert denials[0] == denials[1]  # the models' existence is not revealed


def test_a_stream_is_denied_request_by_request_and_counts_each(server: Served) -> None:
    with grpc.insecure_channel(server.address) as channel:
        kinds: Any = triton.service_pb2
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=kinds.ModelInferRequest.SerializeToString,
            response_deserializer=kinds.ModelStreamInferResponse.FromString,
        )
        messages = [text_request("text", "no", "1"), request(id="2")]
        errors = {one.infer_response.id: one.error_message for one in stream(iter(messages), metadata=[bearer(WEB)])}
        assert "does not allow this model" in errors["1"] and errors["2"] == ""
        many = [request(id=str(place)) for place in range(6)]
        refused = [one for one in stream(iter(many), metadata=[bearer(BUSY)]) if one.error_message]
        assert refused and all("requests a second" in one.error_message for one in refused)
        assert all(one.infer_response.parameters["retry_after_ms"].int64_param > 0 for one in refused)


def test_too_many_requests_get_a_retry_delay(server: Served) -> None:
    with grpc.insecure_channel(server.address) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        data = request().SerializeToString()
        with pytest.raises(grpc.RpcError) as refused:
            for _ in range(5):
                ask(data, metadata=[bearer(BUSY)], timeout=20)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(refused.value.trailing_metadata())
    assert int(trailing["retry-after-ms"]) == int(trailing["grpc-retry-pushback-ms"]) > 0


def test_the_name_in_the_token_file_is_in_the_record_and_the_token_is_not(server: Served) -> None:
    with triton.InferenceServerClient(server.address) as client:
        client.infer("echo", [numbers([1])], request_id="who", headers={"authorization": f"Bearer {WEB}"})
    record = next(one for one in reversed(server.records) if one.ask.id == "who")
    assert record.ask.caller == "web" and WEB not in repr(server.records)


def test_probes_without_a_token_see_the_server_and_no_model(server: Served) -> None:
    with grpc.insecure_channel(server.address) as channel:
        kinds: Any = health_pb2
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(kinds.HealthCheckRequest(service=""), timeout=20).status == kinds.HealthCheckResponse.SERVING
        for model in ("echo", "nothing"):
            with pytest.raises(grpc.RpcError) as unknown:
                stub.Check(kinds.HealthCheckRequest(service=model), timeout=20)
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            watched = stub.Watch(kinds.HealthCheckRequest(service=model), timeout=20)
            assert next(watched).status == kinds.HealthCheckResponse.SERVICE_UNKNOWN
            watched.cancel()
    with triton.InferenceServerClient(server.address) as client:
        assert client.is_server_live() and client.is_server_ready()
