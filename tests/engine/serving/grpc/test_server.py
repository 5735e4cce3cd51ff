"""The server: sockets, drain, limits of calls, unavailable addresses."""

from __future__ import annotations

import asyncio
import re
import socket
import stat
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.engine.serving.grpc.requests import METHOD, request, text_request
from tests.engine.serving.grpc.served import ECHO, ENDLESS, WORDS, Served, served
from weftline.engine.serving.config import GrpcConfig, ServeConfig, ServeLimits
from weftline.engine.serving.grpc import server as server_module
from weftline.engine.serving.grpc.grpcio_transport import options
from weftline.errors import ModelError

SLOW = WORDS.replace("delay_ms: 5", "delay_ms: 100")


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def until(server: Served, model: str, count: int) -> None:
    async with asyncio.timeout(10):
        while server.open_requests(model) != count:
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_a_drain_lets_open_requests_finish_and_turns_new_ones_away(tmp_path: Path) -> None:
    async def go() -> None:
        async with (
            served({"words": SLOW, "echo": ECHO}) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            ask = channel.unary_unary(METHOD + "ModelInfer")
            data = text_request("words", "go").SerializeToString()
            open_one = asyncio.ensure_future(ask(data, timeout=20))
            stream = channel.stream_stream(METHOD + "ModelStreamInfer")()
            await stream.write(data)
            idle = channel.stream_stream(METHOD + "ModelStreamInfer")()
            await idle.write(request().SerializeToString())
            assert await idle.read()
            await until(server, "words", 2)

            server.server.set_serving(False)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(request().SerializeToString(), timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
            ready = await channel.unary_unary(METHOD + "ServerReady")(b"", timeout=20)
            assert ready == b""  # false
            stopping = asyncio.ensure_future(server.server.stop(300))
            assert b"d" * 8 in await open_one
            pieces: list[bytes] = []
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while (piece := await stream.read()) is not grpc.aio.EOF:
                    pieces.append(piece)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert sum(b"dddddddd" in one for one in pieces) == 1
            assert await idle.code() is grpc.StatusCode.UNAVAILABLE
            await stopping  # long before its grace is over: nothing holds it up
            assert server.backend.stats("words")["requests"]["ok"] == 2

    run(go())


@pytest.mark.slow
def test_what_is_not_finished_within_the_grace_is_cancelled(tmp_path: Path) -> None:
    async def go() -> None:
        async with served({"endless": ENDLESS}) as server, grpc.aio.insecure_channel(server.address) as channel:
            ask = channel.unary_unary(METHOD + "ModelInfer")
            asked = asyncio.ensure_future(ask(text_request("endless", "go").SerializeToString(), timeout=20))
            await until(server, "endless", 1)
            await server.server.stop(0.2)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asked
            assert ended.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            await until(server, "endless", 0)

    run(go())


@pytest.mark.slow
def test_it_listens_at_a_unix_socket(tmp_path: Path) -> None:
    async def go() -> None:
        endpoint = GrpcConfig(socket=tmp_path / "weftline.sock")
        async with (
            served({"echo": ECHO}, grpc=endpoint) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            answer = await channel.unary_unary(METHOD + "ModelInfer")(request().SerializeToString(), timeout=20)
            assert b"\1\2\3" in answer
            assert stat.S_IMODE((tmp_path / "weftline.sock").stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == []

    run(go())


@pytest.mark.slow
def test_a_socket_that_took_its_place_is_left_alone_when_it_stops(tmp_path: Path) -> None:
    async def go() -> None:
        path = tmp_path / "weftline.sock"
        async with served({"echo": ECHO}, grpc=GrpcConfig(socket=path)):
            path.unlink()
            other = socket.socket(socket.AF_UNIX)
            other.bind(str(path))
        with other:
            assert path.is_socket()

    run(go())


def test_more_calls_than_the_limit_are_refused_at_once() -> None:
    async def go() -> None:
        limits = ServeLimits(calls_max=2)
        async with (
            served({"endless": ENDLESS}, limits=limits) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            ask = channel.unary_unary(METHOD + "ModelInfer")
            data = text_request("endless", "go").SerializeToString()
            held = [asyncio.ensure_future(ask(data)) for _ in range(2)]
            await until(server, "endless", 2)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(data, timeout=20)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for one in held:
                one.cancel()
            await until(server, "endless", 0)
            assert await channel.unary_unary(METHOD + "ServerLive")(b"", timeout=20)

    run(go())


def test_an_address_that_is_taken_is_said_to_be(tmp_path: Path) -> None:
    async def go() -> None:
        async with served({}) as first:
            port = int(first.address.rpartition(":")[2])
            with pytest.raises(ModelError, match=f"port {port}: it is in use"):
                async with served({}, grpc=GrpcConfig(port=port)):
                    pass

    run(go())


def test_a_port_is_shared_only_among_processes_of_one_server() -> None:
    def shared(processes: int) -> int:
        return int(dict(options(ServeConfig({}, GrpcConfig(processes=processes))))["grpc.so_reuseport"])

    assert [shared(count) for count in (0, 1, 2)] == [0, 0, 1]


def test_only_the_transport_and_the_server_import_grpc() -> None:
    folder = Path(server_module.__file__).parent
    users = {
        path.name for path in folder.glob("*.py") if re.search(r"^\s*(import|from) grpc\b", path.read_text(), re.M)
    }
    assert users == {"grpcio_transport.py"}
