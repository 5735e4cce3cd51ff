"""grpc.health.v1 and server reflection, through grpcio's own stubs."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.engine.ingress.grpc_door.asking import wait_until
from tests.engine.ingress.grpc_door.served import ECHO, TEXT, Served, served_in_thread

HEALTH: Any = health_pb2
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


@pytest.fixture
def server() -> Iterator[Served]:
    with served_in_thread({"echo": ECHO, "spare": TEXT}, lazy=["spare"]) as one:
        yield one


def watch(channel: grpc.Channel, service: str) -> tuple[Any, queue.Queue[int]]:
    """Watch a service in a thread, and return the call and what it hears."""
    heard: queue.Queue[int] = queue.Queue()
    call = health_pb2_grpc.HealthStub(channel).Watch(HEALTH.HealthCheckRequest(service=service))

    def listen() -> None:
        try:
            for one in call:
                heard.put(one.status)
        except grpc.RpcError:
            pass
        heard.put(-1)

    threading.Thread(target=listen, daemon=True).start()
    return call, heard


def test_health_is_told_checked_and_watched_through_load_unload_and_drain(server: Served) -> None:
    with grpc.insecure_channel(server.address) as channel, triton.InferenceServerClient(server.address) as client:
        stub = health_pb2_grpc.HealthStub(channel)

        def check(service: str) -> int:
            return int(stub.Check(HEALTH.HealthCheckRequest(service=service), timeout=20).status)

        assert (check(""), check("echo"), check("spare")) == (SERVING, SERVING, NOT_SERVING)
        with pytest.raises(grpc.RpcError) as unknown:
            check("nothing")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

        whole, heard_whole = watch(channel, "")
        _, heard_spare = watch(channel, "spare")
        _, heard_nothing = watch(channel, "nothing")
        assert heard_whole.get(timeout=20) == SERVING
        assert heard_spare.get(timeout=20) == NOT_SERVING
        assert heard_nothing.get(timeout=20) == UNKNOWN
        client.load_model("spare")
        assert heard_spare.get(timeout=20) == SERVING
        client.unload_model("spare")
        assert heard_spare.get(timeout=20) == NOT_SERVING

        assert server.loop is not None
        server.loop.call_soon_threadsafe(server.server.set_serving, False)
        assert [heard_whole.get(timeout=20), heard_whole.get(timeout=20)] == [NOT_SERVING, -1]
        assert heard_nothing.get(timeout=20) == -1
        assert check("") == NOT_SERVING and not client.is_server_ready() and client.is_server_live()
        whole.cancel()


def test_reflection_shows_what_is_served_under_both_of_its_names(server: Served) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        names = set(database.get_services())
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
        file = database.FindFileContainingSymbol("inference.ModelInferRequest")
        assert "ModelInferRequest" in [one.name for one in file.message_type]
        with pytest.raises(KeyError):
            database.FindFileContainingSymbol("google.protobuf.FileDescriptorProto")
        kinds: Any = reflection_pb2
        newer = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=kinds.ServerReflectionRequest.SerializeToString,
            response_deserializer=kinds.ServerReflectionResponse.FromString,
        )
        (answer,) = newer(iter([kinds.ServerReflectionRequest(list_services="")]), timeout=20)
        assert "inference.GRPCInferenceService" in [one.name for one in answer.list_services_response.service]


def test_a_server_whose_worker_died_is_not_ready_until_another_one_stands(server: Served) -> None:
    with triton.InferenceServerClient(server.address) as client, grpc.insecure_channel(server.address) as channel:
        _, heard = watch(channel, "echo")
        assert heard.get(timeout=20) == SERVING
        (pid,) = server.repository.get("echo").pids().values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not client.is_server_ready())
        assert not client.is_model_ready("echo")
        assert heard.get(timeout=20) == NOT_SERVING
        assert heard.get(timeout=20) == SERVING
        wait_until(client.is_server_ready)
