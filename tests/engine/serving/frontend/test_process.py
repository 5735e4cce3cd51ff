"""gRPC and HTTP servers in ingress processes, with stock clients: responses, statistics, kill -9 in mid-stream."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from tests.engine.fire import builder as base
from tests.engine.fire import settled, wait_until
from weftline.engine.repository import Repository
from weftline.engine.serving.config import GrpcConfig, HttpConfig, ServeConfig
from weftline.engine.serving.frontend.messages import GRPC, HTTP, IngressSpec
from weftline.engine.serving.frontend.supervisor import FrontendManager
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.statistics import Statistics
from weftline.errors import WeftlineError

LARGE = np.arange(2_000_000, dtype=np.float32)


@pytest.fixture(scope="module")
def repository() -> Iterator[Repository]:
    with Repository() as repository:
        for name, node, kind, options in (
            ("array", "echo", "float32[N]", {"type": "float32[N]"}),
            ("flood", "trickle", "text", {"pieces": 4000, "piece_bytes": 8192}),
        ):
            p = base(name, arena_bytes=64 << 20)
            p.output("y", p.step("s", node, value=p.input("x", kind), **options).value)
            repository.load(name, p)
        yield repository


@asynccontextmanager
async def served(
    repository: Repository, *servers: str, **config: Any
) -> AsyncIterator[tuple[FrontendManager, dict[str, int]]]:
    statistics = Statistics()
    backend = LocalBackend(repository, {}, observers=[statistics], metrics=lambda: b"up 1\n")
    manager = FrontendManager(backend, 64 << 20, statistics=statistics)
    full = ServeConfig({}, grpc=GrpcConfig(port=0), http=HttpConfig(port=0), **config)
    try:
        yield manager, await manager.start_ingress(IngressSpec("servers", servers, full))
    finally:
        await manager.stop()


def run(script: Any) -> Any:
    return asyncio.run(asyncio.wait_for(script, 60))


def array_input(value: np.ndarray) -> list[triton.InferInput]:
    given = triton.InferInput("x", list(value.shape), "FP32")
    given.set_data_from_numpy(value)
    return [given]


def test_tritonclient_is_answered_through_a_grpc_ingress(repository: Repository) -> None:
    async def script() -> None:
        async with served(repository, GRPC) as (_, ports):

            def client() -> None:
                with triton.InferenceServerClient(f"127.0.0.1:{ports[GRPC]}") as client:
                    assert client.is_server_ready() and client.is_model_ready("array")
                    for value in (np.arange(6, dtype=np.float32), LARGE):
                        found = client.infer("array", array_input(value)).as_numpy("y")
                        assert found.tobytes() == value.tobytes()
                    stats = client.get_inference_statistics("array", as_json=True)["model_stats"][0]
                    assert stats["inference_stats"]["success"]["count"] == "2"

            await asyncio.to_thread(client)

    run(script())


@pytest.mark.slow
def test_tritonclient_is_answered_through_an_http_ingress(repository: Repository) -> None:
    async def script() -> None:
        async with served(repository, HTTP) as (_, ports):

            def client() -> None:
                with triton_http.InferenceServerClient(f"127.0.0.1:{ports[HTTP]}") as client:
                    given = triton_http.InferInput("x", [len(LARGE)], "FP32")
                    given.set_data_from_numpy(LARGE)
                    found = client.infer("array", [given]).as_numpy("y")
                    assert found.tobytes() == LARGE.tobytes()
                    stats = client.get_inference_statistics("array")["model_stats"][0]
                    assert stats["inference_stats"]["success"]["count"] == 1
                at = f"http://127.0.0.1:{ports[HTTP]}"
                assert httpx.get(f"{at}/readyz").status_code == 200
                assert httpx.get(f"{at}/metrics").text == "up 1\n"

            await asyncio.to_thread(client)

    run(script())


@pytest.mark.slow
def test_a_killed_ingress_is_unavailable_and_its_successor_serves(repository: Repository) -> None:
    """R5, with the gRPC server: a stream and a stuck client on it, kill -9, and the same address again."""
    session = repository.get("flood")

    def client(port: int, kill: Callable[[], None]) -> float:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            received: queue.Queue[tuple[Any, Any]] = queue.Queue()
            client.start_stream(lambda result, error: received.put((result, error)))
            given = triton.InferInput("x", [1], "BYTES")
            given.set_data_from_numpy(np.array([b"a"], dtype=np.object_))
            client.async_stream_infer("flood", [given])
            assert received.get(timeout=10)[1] is None
            assert session.stats()["requests"]["open"] == 1
            since = time.monotonic()
            kill()
            wait_until(lambda: session.stats()["requests"]["open"] == 0, 3)
            took_s = time.monotonic() - since
            while (end := received.get(timeout=10))[1] is None:
                pass
            assert "UNAVAILABLE" in str(end[1])
            client.stop_stream(cancel_requests=True)
        until = time.monotonic() + 20
        while True:
            try:
                with triton.InferenceServerClient(f"127.0.0.1:{port}") as again:
                    assert again.infer("array", array_input(np.ones(3, np.float32))).as_numpy("y").tolist() == [1] * 3
                return took_s
            except triton.InferenceServerException:
                assert time.monotonic() < until, "no server listens there"
                time.sleep(0.1)

    async def script() -> float:
        async with served(repository, GRPC) as (manager, ports):
            pid = manager.pids()["servers"]
            return await asyncio.to_thread(client, ports[GRPC], lambda: os.kill(pid, signal.SIGKILL))

    assert run(script()) < 1.0
    wait_until(lambda: settled(session), 5)


@pytest.mark.slow
def test_two_ingress_processes_share_a_port(repository: Repository) -> None:
    async def script() -> None:
        manager = FrontendManager(LocalBackend(repository, {}), 16 << 20)
        try:
            config = ServeConfig({}, grpc=GrpcConfig(port=0, processes=2))
            spec = IngressSpec("grpc-0", (GRPC,), config)
            ports = await manager.start_ingress(spec)
            assert await manager.start_ingress(replace(spec, name="grpc-1").at(ports)) == ports

            def clients() -> None:
                for _ in range(8):
                    # Each its own connection: stock channels to one address share one otherwise.
                    options = [("grpc.use_local_subchannel_pool", 1)]
                    with triton.InferenceServerClient(f"127.0.0.1:{ports[GRPC]}", channel_args=options) as client:
                        client.infer("array", array_input(np.ones(3, np.float32)))

            await asyncio.to_thread(clients)
            assert len(manager.pids()) == 2
        finally:
            await manager.stop()

    run(script())


def test_a_token_file_that_is_no_good_is_said_where_the_process_is_started(
    repository: Repository, tmp_path: Path
) -> None:
    (tmp_path / "tokens.yaml").write_text("nonsense: [")

    async def script() -> None:
        with pytest.raises(WeftlineError, match=r"tokens\.yaml"):
            async with served(repository, GRPC, tokens=tmp_path / "tokens.yaml"):
                pass

    run(script())
