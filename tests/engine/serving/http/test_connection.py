from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.client_gone import ClientGone, while_connected
from weftline.engine.serving.http.connection import BODY_BYTES_S, CONNECTION, LimitedProtocol, limited, overdue_s


def test_the_time_limit_of_a_request_grows_with_its_body() -> None:
    assert overdue_s(100.0, 90.0, 0, 20.0) == -10.0
    assert overdue_s(111.0, 90.0, 0, 20.0) == 1.0
    assert overdue_s(111.0, 90.0, 2 * BODY_BYTES_S, 20.0) == -1.0


class Socket:
    """A transport without a socket."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Close nothing."""

    def resume_reading(self) -> None:
        """Read nothing."""


async def unused(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request is parsed")


def connection() -> LimitedProtocol:
    config = uvicorn.Config(unused, ws="none", lifespan="off", log_config=None)
    made: LimitedProtocol = limited(ServeLimits())(config=config, server_state=ServerState(), app_state={})
    made.connection_made(Socket())
    return made


class Work:
    """Work that waits until it is cancelled, and then ends in its own way."""

    def __init__(self, end: Callable[[], Awaitable[int]]) -> None:
        self._end = end
        self.ended = False

    async def run(self) -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # the release of what it holds
            self.ended = True
            return await self._end()
        raise AssertionError("it was not cancelled")


async def raise_cancelled() -> int:
    raise asyncio.CancelledError


async def raise_error() -> int:
    raise OSError("its cleanup failed")


async def return_result() -> int:
    return 1


@pytest.mark.parametrize("end", [raise_cancelled, raise_error, return_result])
def test_work_has_ended_when_its_client_is_gone(end: Callable[[], Awaitable[int]]) -> None:
    async def run() -> None:
        one, work = connection(), Work(end)
        asyncio.get_running_loop().call_later(0.01, one.connection_lost, None)
        with pytest.raises(ClientGone):
            await while_connected({CONNECTION: one}, work.run())
        assert work.ended
        async with asyncio.timeout(5):  # the task goes on without a pending cancellation
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_work_for_a_client_that_left_before_is_cancelled() -> None:
    async def run() -> None:
        one, work = connection(), Work(raise_cancelled)
        one.connection_lost(None)
        with pytest.raises(ClientGone):
            await while_connected({CONNECTION: one}, work.run())
        assert work.ended

    asyncio.run(run())


def test_work_that_ends_first_gives_its_result_or_error() -> None:
    async def run() -> None:
        one = connection()
        one.connection_lost(None)
        assert await while_connected({CONNECTION: one}, return_result()) == 1
        with pytest.raises(OSError, match="cleanup"):
            await while_connected({CONNECTION: one}, raise_error())
        await asyncio.sleep(0.01)  # nothing cancels the task any more

    asyncio.run(run())


def test_a_request_that_the_server_cancels_is_cancelled() -> None:
    async def run() -> None:
        one, work = connection(), Work(raise_cancelled)
        task = asyncio.ensure_future(while_connected({CONNECTION: one}, work.run()))
        await asyncio.sleep(0.01)
        task.cancel()
        one.connection_lost(None)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


class Written(Socket):
    """A transport that keeps what is written, by system call."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.writes.append(b"".join(parts))


async def answered(app: Any, sent: bytes = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") -> list[bytes]:
    """Return the writes of the responses that an ASGI application gives to what is sent."""
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, server_header=False, date_header=False)
    made: LimitedProtocol = limited(ServeLimits())(config=config, server_state=ServerState(), app_state={})
    socket = Written()
    made.connection_made(socket)
    made.data_received(sent)
    await asyncio.sleep(0.05)
    made.connection_lost(None)
    return socket.writes


def test_a_head_and_its_body_leave_in_one_write() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await send({"type": "http.response.body", "body": b"cd"})

    head = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
    assert asyncio.run(answered(app)) == [head + b"ab", b"cd"]


def test_a_head_without_a_body_leaves_in_the_same_turn() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"ab"})

    assert asyncio.run(answered(app)) == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"ab"]
