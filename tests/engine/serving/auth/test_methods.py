from collections.abc import Iterator

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2

from weftline.engine.serving.auth.methods import ADMIN, INFER, MEMORY, METHODS, METRICS, OPEN, READ


def methods_of(file: object, service: str) -> Iterator[str]:
    descriptor = file.DESCRIPTOR.services_by_name[service]  # type: ignore[attr-defined]
    yield from (f"/{descriptor.full_name}/{method.name}" for method in descriptor.methods)


def served() -> set[str]:
    return {
        *methods_of(service_pb2, "GRPCInferenceService"),
        *methods_of(health_pb2, "Health"),
        *methods_of(reflection_pb2, "ServerReflection"),
    }


def test_every_grpc_method_of_every_service_is_in_the_table() -> None:
    assert len(served()) >= 23
    assert served() - set(METHODS) == set()


def test_the_table_has_no_other_grpc_method_but_newer_ones_and_our_own() -> None:
    others = {name for name in METHODS if name.startswith("/")} - served()
    newer = {"/grpc.health.v1.Health/List", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"}
    assert others <= {*newer, "/weftline.Server/Deployments"}


def test_every_kind_is_known_and_only_probes_are_open() -> None:
    assert set(METHODS.values()) == {OPEN, READ, INFER, MEMORY, METRICS, ADMIN}
    assert {name for name, kind in METHODS.items() if kind == OPEN} == {
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "HTTP GET /livez",
        "HTTP GET /readyz",
        "HTTP GET /healthz",
        "HTTP GET /health",
        "HTTP GET /ping",
        "HTTP POST /ping",
        "HTTP GET /v2/health/live",
        "HTTP GET /v2/health/ready",
    }


def test_what_changes_the_server_takes_an_admin() -> None:
    for name, kind in METHODS.items():
        if any(word in name.lower() for word in ("load", "logging", "logsettings", "trace")):
            assert kind == ADMIN, name
        if "sharedmemory" in name.lower():
            assert kind == MEMORY, name


def test_the_same_thing_takes_the_same_right_through_either_protocol() -> None:
    grpc = "/inference.GRPCInferenceService/"
    for rpc, route in (
        ("ServerLive", "GET /v2/health/live"),
        ("ServerReady", "GET /v2/health/ready"),
        ("ModelReady", "GET /v2/models/{model}/ready"),
        ("ModelMetadata", "GET /v2/models/{model}"),
        ("ModelConfig", "GET /v2/models/{model}/versions/{version}/config"),
        ("ModelStatistics", "GET /v2/models/stats"),
        ("ModelInfer", "POST /v2/models/{model}/infer"),
        ("RepositoryIndex", "POST /v2/repository/index"),
        ("RepositoryModelLoad", "POST /v2/repository/models/{model}/load"),
        ("SystemSharedMemoryRegister", "POST /v2/systemsharedmemory/region/{region}/register"),
        ("CudaSharedMemoryUnregister", "POST /v2/cudasharedmemory/unregister"),
        ("TraceSetting", "POST /v2/trace/setting"),
        ("LogSettings", "GET /v2/logging"),
    ):
        assert METHODS[grpc + rpc] == METHODS["HTTP " + route], rpc
    assert METHODS["/weftline.Server/Deployments"] == METHODS["HTTP GET /deployments"] == READ


def test_the_table_cannot_be_changed() -> None:
    assert not hasattr(METHODS, "__setitem__")
