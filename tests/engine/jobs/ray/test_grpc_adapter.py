"""A call's info: its status, and messages in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from tests.engine.jobs.ray.test_service import Context
from weftline.engine.jobs.ray.grpc_adapter import Aborted, RayCallContext


def test_aborting_gives_the_call_its_status_and_ends_the_handler() -> None:
    context = Context(authorization="x")
    call = RayCallContext(context)
    assert list(call.invocation_metadata()) == [("authorization", "x")] and call.time_remaining() is None

    with pytest.raises(Aborted):
        asyncio.run(call.abort(grpc.StatusCode.NOT_FOUND, "no such", (("retry-after-ms", "5"),)))
    assert (context.status, context.details) == (grpc.StatusCode.NOT_FOUND, "no such")
    assert context.trailing == [("retry-after-ms", "5")]


def test_messages_are_read_until_their_end() -> None:
    async def sent() -> AsyncIterator[bytes]:
        yield b"one"

    async def script() -> None:
        call = RayCallContext(Context(), sent())
        assert [await call.read(), await call.read()] == [b"one", grpc.aio.EOF]
        assert await RayCallContext(Context()).read() is grpc.aio.EOF

    asyncio.run(script())


@pytest.mark.parametrize("ahead", [True, False])
def test_written_messages_are_read_to_the_last(ahead: bool) -> None:
    async def script() -> None:
        call = RayCallContext(Context())

        async def write() -> None:
            for number in range(3):
                await call.write(b"%d" % number)
            call.end()

        writing = asyncio.ensure_future(write())
        if ahead:
            await asyncio.sleep(0)
            assert not writing.done()  # one message at a time
        async with asyncio.timeout(5):
            assert [one async for one in call.written()] == [b"0", b"1", b"2"]

    asyncio.run(script())


def test_ending_never_waits_for_a_reader_that_is_gone() -> None:
    async def script() -> None:
        call = RayCallContext(Context())
        await call.write(b"unread")
        call.end()

    asyncio.run(script())
