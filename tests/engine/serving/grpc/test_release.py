"""Borrowed outputs are released and open requests cancelled, however a ModelInfer call ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.serving.grpc.fakes import Slow
from tests.engine.serving.grpc.requests import text_request
from weftline.engine.serving.auth.gate import UNRESTRICTED
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.grpc import infer
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.service import CallContext
from weftline.engine.serving.v2.settings import TraceSettings
from weftline.errors import StepError

LIMITS = ServeLimits()


def call() -> CallContext:
    return CallContext(UNRESTRICTED, "grpc")


def inference(backend: Any) -> Inference:
    return Inference(backend, LIMITS, SharedMemory(LIMITS, False), TraceSettings())


def batch(*texts: str) -> bytes:
    """Return the bytes of a request for a batch of texts."""
    message = text_request("text", "")
    message.inputs[0].shape[:] = [len(texts), 1]
    message.raw_input_contents[0] = b"".join(len(one).to_bytes(4, "little") + one.encode() for one in texts)
    return bytes(message.SerializeToString())


def test_an_answer_is_given_back_when_it_was_written() -> None:
    async def go() -> None:
        backend = Slow()
        backend.end("a")
        assert b"said" in await inference(backend).infer(text_request("text", "x", "a").SerializeToString(), call())
        assert backend.log == ["a began", "a ended", "a given back"]

    asyncio.run(go())


def test_an_answer_is_given_back_when_it_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(response: object) -> bytes:
        raise MemoryError

    async def go() -> None:
        monkeypatch.setattr(infer, "response_bytes", broken)
        backend = Slow()
        backend.end("a")
        with pytest.raises(MemoryError):
            await inference(backend).infer(text_request("text", "x", "a").SerializeToString(), call())
        assert backend.log[-1] == "a given back"

    asyncio.run(go())


def test_a_failed_batch_item_cancels_open_items_and_releases_the_others() -> None:
    async def go() -> None:
        backend = Slow()
        asked = asyncio.ensure_future(inference(backend).infer(batch("good", "bad", "open"), call()))
        await asyncio.sleep(0.05)
        backend.end("good")
        await asyncio.sleep(0.05)
        backend.end("bad")
        with pytest.raises(StepError, match="failed on purpose"):
            await asyncio.wait_for(asked, 10)
        assert {"good given back", "open withdrawn"} <= set(backend.log)

    asyncio.run(go())


def test_a_cancelled_batch_withdraws_everything() -> None:
    async def go() -> None:
        backend = Slow()
        asked = asyncio.ensure_future(inference(backend).infer(batch("a", "b"), call()))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert {"a withdrawn", "b withdrawn"} <= set(backend.log)

    asyncio.run(go())
