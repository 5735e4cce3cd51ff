"""The async client against a real server, and against one with programmed failures."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.client.flaky import Refuse, flaky
from tests.engine.client.pipelines import OPTION_NAMES, plain
from tests.engine.serving.grpc.served import Served
from weftline import errors
from weftline.engine.client.async_client import AsyncClient
from weftline.engine.client.steps import Unavailable
from weftline.engine.request import RequestOptions


def run(url: str, go: Callable[[AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with AsyncClient(url, **options) as client:
            await asyncio.wait_for(go(client), 60)

    asyncio.run(main())


def test_inputs_may_have_the_names_of_options(server: Served) -> None:
    async def go(client: AsyncClient) -> None:
        inputs = {name: name.upper() for name in OPTION_NAMES}
        wanted = {f"{name}_out": name.upper() for name in OPTION_NAMES}
        assert dict(await client.run("named", **inputs)) == wanted
        assert {one.output: one.value async for one in client.stream("named", RequestOptions(), **inputs)} == wanted

    run(server.address, go)


async def eventually(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, "it never came to that"
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_requests_run_side_by_side(server: Served) -> None:
    async def go(client: AsyncClient) -> None:
        answers = await asyncio.gather(*(client.run("fails", x=f"t{i}") for i in range(8)))
        assert [one["y"] for one in answers] == [f"t{i}" for i in range(8)]
        assert dict(await client.run("everything", RequestOptions(outputs=["words"]), **plain())) == {"words": "a"}
        sent = np.arange(1 << 20, dtype=np.uint8)
        assert np.array_equal((await client.run("bytes", x=sent))["y"], sent)

    run(server.address, go)


@pytest.mark.slow
def test_a_stream_gives_pieces_and_then_the_whole(server: Served) -> None:
    async def go(client: AsyncClient) -> None:
        pieces = [one async for one in client.stream("trickle", x="go")]
        assert [(one.value[:1], one.last) for one in pieces] == [*((x, False) for x in "abcd"), ("a", True)]

    run(server.address, go)


@pytest.mark.slow
def test_cancelling_the_task_cancels_the_request(server: Served) -> None:
    async def go(client: AsyncClient) -> None:
        await client.describe("slow")
        task = asyncio.create_task(client.run("slow", x="a"))
        await eventually(lambda: server.open_requests("slow") == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: server.open_requests("slow") == 0)

    run(server.address, go)


def test_leaving_a_stream_cancels_the_request(server: Served) -> None:
    async def go(client: AsyncClient) -> None:
        stream = client.stream("endless", x="a")
        assert (await anext(stream)).value
        assert server.open_requests("endless") == 1
        await stream.aclose()
        await eventually(lambda: server.open_requests("endless") == 0)

    run(server.address, go)


def test_errors_are_those_of_a_session(server: Served) -> None:
    async def go(client: AsyncClient) -> None:
        with pytest.raises(errors.StepError) as failed:
            await client.run("fails", x="bad")
        assert failed.value.step == "only"
        with pytest.raises(errors.DeadlineExceeded):
            await client.run("slow", RequestOptions(deadline_ms=150), x="a")
        with pytest.raises(errors.DeadlineExceeded):
            [one async for one in client.stream("endless", RequestOptions(deadline_ms=200), x="a")]
        with pytest.raises(errors.UnknownModel):
            await client.run("missing")

    run(server.address, go)


@pytest.mark.slow
def test_the_server_is_asked_about_itself(server: Served) -> None:
    async def go(client: AsyncClient) -> None:
        assert await client.live() and await client.ready() and await client.ready("fails")
        assert "fails" in [one.name for one in await client.models()]
        assert (await client.stats("bytes"))["bytes"].name == "bytes"
        assert await client.load("bytes") > 1
        await client.unload("bytes")
        assert not await client.ready("bytes")
        await client.load("bytes")

    run(server.address, go)


def test_retries_and_streams_that_begin_again() -> None:
    with flaky() as server:

        async def go(client: AsyncClient) -> None:
            server.refusals = [Refuse("UNAVAILABLE", pushback_ms="1")]
            assert (await client.run("m", x="a"))["x"] == "a"
            server.refusals = [Refuse("UNAVAILABLE", pushback_ms="1")]
            assert len([one async for one in client.stream("m", x="a")]) == 4
            assert len(server.seen) == 4
            server.dies_after = 1
            with pytest.raises(Unavailable):
                [one async for one in client.stream("m", x="a")]
            assert len(server.seen) == 5

        run(server.url, go)


def test_a_closed_client_says_so(server: Served) -> None:
    async def main() -> None:
        client = AsyncClient(server.address)
        assert await client.live()
        await client.close()
        await client.close()
        with pytest.raises(errors.SessionClosed):
            await client.run("fails", x="a")

    asyncio.run(main())


def test_where_no_server_is_nothing_is_ready() -> None:
    async def go(client: AsyncClient) -> None:
        assert not await client.live() and not await client.ready()
        with pytest.raises(Unavailable):
            await client.run("a")

    run("localhost:1", go, retries=0)
