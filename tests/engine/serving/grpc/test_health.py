"""grpc.health.v1 and server reflection, through grpcio's own stubs, which the server itself does not use."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.engine.serving.grpc.requests import wait_until
from tests.engine.serving.grpc.served import ECHO, TEXT, Served, served_in_thread

HEALTH: Any = health_pb2
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


@pytest.fixture
def server() -> Iterator[Served]:
    with served_in_thread({"echo": ECHO, "spare": TEXT}, lazy=["spare"]) as one:
        yield one


def watch(channel: grpc.Channel, service: str) -> tuple[Any, queue.Queue[int]]:
    """Watch a service in a thread, and return the call and the queue of statuses."""
    received: queue.Queue[int] = queue.Queue()
    call = health_pb2_grpc.HealthStub(channel).Watch(HEALTH.HealthCheckRequest(service=service))

    def listen() -> None:
        try:
            for one in call:
                received.put(one.status)
        except grpc.RpcError:
            pass
        received.put(-1)

    threading.Thread(target=listen, daemon=True).start()
    return call, received


def test_health_is_checked_and_watched_through_load_unload_and_drain(server: Served) -> None:
    with grpc.insecure_channel(server.address) as channel, triton.InferenceServerClient(server.address) as client:
        stub = health_pb2_grpc.HealthStub(channel)

        def check(service: str) -> int:
            return int(stub.Check(HEALTH.HealthCheckRequest(service=service), timeout=20).status)

        assert (check(""), check("echo"), check("spare")) == (SERVING, SERVING, NOT_SERVING)
        with pytest.raises(grpc.RpcError) as unknown:
            check("nothing")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

        whole, statuses_whole = watch(channel, "")
        _, statuses_spare = watch(channel, "spare")
        _, statuses_nothing = watch(channel, "nothing")
        assert statuses_whole.get(timeout=20) == SERVING
        assert statuses_spare.get(timeout=20) == NOT_SERVING
        assert statuses_nothing.get(timeout=20) == UNKNOWN
        client.load_model("spare")
        assert statuses_spare.get(timeout=20) == SERVING
        client.unload_model("spare")
        assert statuses_spare.get(timeout=20) == NOT_SERVING

        assert server.loop is not None
        server.loop.call_soon_threadsafe(server.server.set_serving, False)
        statuses = list(iter(lambda: statuses_whole.get(timeout=20), -1))  # it may have been busy loading for a moment
        assert statuses[-1] == NOT_SERVING
        assert statuses_nothing.get(timeout=20) == -1
        assert check("") == NOT_SERVING and not client.is_server_ready() and client.is_server_live()
        whole.cancel()


@pytest.mark.slow
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


def test_reflection_answers_every_kind_of_request_as_grpcio_does(server: Served) -> None:
    """Files equal those of the stubs; unknown and malformed requests get error codes."""
    kinds: Any = reflection_pb2
    asked = [
        kinds.ServerReflectionRequest(file_by_filename="grpc/health/v1/health.proto"),
        kinds.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        kinds.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
        kinds.ServerReflectionRequest(all_extension_numbers_of_type="inference.ModelInferRequest"),
        kinds.ServerReflectionRequest(all_extension_numbers_of_type="inference.Nothing"),
        kinds.ServerReflectionRequest(
            file_containing_extension=kinds.ExtensionRequest(
                containing_type="inference.ModelInferRequest", extension_number=7
            )
        ),
        kinds.ServerReflectionRequest(file_by_filename="../../etc/passwd"),
        kinds.ServerReflectionRequest(),
    ]
    with grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = list(stub.ServerReflectionInfo(iter(asked), timeout=20))
    assert [one.original_request for one in answers] == asked
    by_name, by_symbol, inference, extensions, nothing, extension, passwd, empty = answers
    (health,) = by_name.file_descriptor_response.file_descriptor_proto
    assert list(by_symbol.file_descriptor_response.file_descriptor_proto) == [health]
    theirs = FileDescriptorProto()
    HEALTH.DESCRIPTOR.CopyToProto(theirs)
    ours = FileDescriptorProto.FromString(health)
    assert (ours.package, ours.message_type, ours.service) == (theirs.package, theirs.message_type, theirs.service)
    files = [FileDescriptorProto.FromString(one) for one in inference.file_descriptor_response.file_descriptor_proto]
    assert len(files) == 2 and files[1].name == files[0].dependency[0]  # the model configuration is imported
    assert extensions.all_extension_numbers_response.base_type_name == "inference.ModelInferRequest"
    assert list(extensions.all_extension_numbers_response.extension_number) == []
    codes = [one.error_response.error_code for one in (nothing, extension, passwd, empty)]
    assert codes == [5, 5, 5, 3]


@pytest.mark.parametrize("theirs_first", [True, False])
def test_the_servers_messages_stand_beside_those_of_grpcio(theirs_first: bool) -> None:
    """One process may import both, in either order: two files with the same symbols clash within one pool."""
    theirs = "from grpc_health.v1 import health_pb2; from grpc_reflection.v1alpha import reflection_pb2"
    ours = "from weftline.engine.serving.grpc import reflection; reflection.make_reflection()"
    script = [theirs, ours] if theirs_first else [ours, theirs]
    subprocess.run([sys.executable, "-c", "; ".join(script)], check=True, timeout=100)


@pytest.mark.slow
def test_the_server_needs_neither_health_checking_nor_reflection_of_grpcio() -> None:
    hide = "import sys; sys.modules['grpc_health'] = sys.modules['grpc_reflection'] = None"
    script = f"{hide}; import weftline.engine.serving.grpc.server"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


@pytest.mark.slow
def test_a_server_whose_worker_died_is_not_ready_until_another_one_stands(server: Served) -> None:
    with triton.InferenceServerClient(server.address) as client, grpc.insecure_channel(server.address) as channel:
        _, received = watch(channel, "echo")
        assert received.get(timeout=20) == SERVING
        (pid,) = server.repository.get("echo").pids().values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not client.is_server_ready())
        assert not client.is_model_ready("echo")
        assert received.get(timeout=20) == NOT_SERVING
        assert received.get(timeout=20) == SERVING
        wait_until(client.is_server_ready)
