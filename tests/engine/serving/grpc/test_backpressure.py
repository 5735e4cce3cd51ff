"""Order, back-pressure and end of a stream, with a backend and a client that are controlled by the test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.serving.grpc.fakes import Call, Slow
from tests.engine.serving.grpc.requests import text_request
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.stream import UNSENT_BYTES_MAX, InferStream
from weftline.engine.serving.lifecycle import DrainSwitch
from weftline.engine.serving.v2.settings import TraceSettings
from weftline.errors import SessionClosed


def test_a_sequence_waits_only_for_its_own_requests() -> None:
    async def go() -> None:
        backend: Any = Slow()
        limits = ServeLimits()
        inference = Inference(backend, limits, SharedMemory(limits, False), TraceSettings())
        call = Call(
            [
                text_request("text", "x", "a1", sequence_id=1, sequence_start=True),
                text_request("text", "x", "a2", sequence_id=1),
                text_request("text", "x", "b1", sequence_id=2, sequence_start=True),
                text_request("text", "x", "free"),
            ]
        )
        running = asyncio.ensure_future(InferStream(inference, DrainSwitch(), call).run())
        for id in ("free", "b1"):
            backend.end(id)
        await asyncio.sleep(0.05)
        assert {"a1 began", "b1 ended", "free ended"} <= set(backend.log) and "a2 began" not in backend.log
        backend.end("a2")
        backend.end("a1")
        await asyncio.wait_for(running, 10)
        assert backend.log.index("a1 ended") < backend.log.index("a2 began")
        assert len(call.written) == 4

    asyncio.run(go())


@pytest.mark.parametrize("half_closed", [True, False])
def test_a_drain_ends_the_call_only_for_those_who_would_send_more(half_closed: bool) -> None:
    async def go() -> None:
        backend: Any = Slow()
        limits, serving = ServeLimits(), DrainSwitch()
        inference = Inference(backend, limits, SharedMemory(limits, False), TraceSettings())
        call = Call([text_request("text", "x", "a")])
        if not half_closed:
            never = asyncio.Event()
            first = call.read

            async def read() -> Any:
                data = await first()
                if data is None:
                    await never.wait()
                return data

            call.read = read  # type: ignore[method-assign]
        running = asyncio.ensure_future(InferStream(inference, serving, call).run())
        await asyncio.sleep(0.05)
        serving.set(False)
        await asyncio.sleep(0.05)
        assert not running.done() and not call.written  # what is open finishes
        backend.end("a")
        if half_closed:
            await asyncio.wait_for(running, 10)
        else:
            with pytest.raises(SessionClosed, match="the server is shutting down"):
                await asyncio.wait_for(running, 10)
        assert len(call.written) == 1

    asyncio.run(go())


def test_a_cancelled_call_withdraws_what_is_open() -> None:
    async def go() -> None:
        backend: Any = Slow()
        limits = ServeLimits()
        inference = Inference(backend, limits, SharedMemory(limits, False), TraceSettings())
        call = Call([text_request("text", "x", id) for id in ("a", "b")])
        running = asyncio.ensure_future(InferStream(inference, DrainSwitch(), call).run())
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(backend.log) == ["a began", "a withdrawn", "b began", "b withdrawn"]

    asyncio.run(go())


def test_answers_stay_lent_while_enough_bytes_are_on_their_way() -> None:
    async def go() -> None:
        backend: Any = Slow()
        backend.text = "x" * (1 << 20)
        limits = ServeLimits()
        inference = Inference(backend, limits, SharedMemory(limits, False), TraceSettings())
        ids = [str(place) for place in range(20)]
        call = Call([text_request("text", "x", id) for id in ids])
        reads = asyncio.Event()
        write = call.write

        async def slowly(response: bytes) -> None:
            await reads.wait()
            await write(response)

        call.write = slowly  # type: ignore[method-assign]
        running = asyncio.ensure_future(InferStream(inference, DrainSwitch(), call).run())
        await asyncio.sleep(0.05)
        for id in ids:
            backend.end(id)
        await asyncio.sleep(0.05)
        assert sum(line.endswith("ended") for line in backend.log) == 20
        assert sum(line.endswith("given back") for line in backend.log) == UNSENT_BYTES_MAX // (1 << 20)
        reads.set()
        await asyncio.wait_for(running, 10)
        assert len(call.written) == 20 and sum(line.endswith("given back") for line in backend.log) == 20

    asyncio.run(go())
