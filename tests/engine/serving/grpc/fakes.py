"""A backend whose requests end on demand, and a stream call without gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from weftline.engine.serving.auth.gate import UNRESTRICTED
from weftline.engine.serving.backend import Answer, Ask
from weftline.engine.serving.grpc.service import CallContext
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.errors import StepError

FACE = ModelInfo("text", 1, (PortInfo("text", "text"),), (PortInfo("text", "text"),))


class Slow:
    """A backend whose requests end when `end` is called. log: starts and ends of requests."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.let: dict[str, asyncio.Event] = {}
        self.text = "said"

    def info(self, model: str, version: str = "") -> ModelInfo:
        return FACE

    async def ask(self, ask: Ask) -> Answer:
        name = ask.id or str(ask.inputs["text"])
        self.log.append(f"{name} began")
        try:
            await self.let.setdefault(name, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.log.append(f"{name} withdrawn")
            raise
        if ask.inputs["text"] == "bad":
            raise StepError("failed on purpose")
        self.log.append(f"{name} ended")
        return Answer({"text": self.text}, version=1, give_back=lambda: self.log.append(f"{name} given back"))

    def end(self, id: str) -> None:
        self.let.setdefault(id, asyncio.Event()).set()


class Call:
    """A StreamCall with fixed messages."""

    def __init__(self, messages: Iterable[Any]) -> None:
        self._messages = [one.SerializeToString() for one in messages]
        self.written: list[bytes] = []

    def context(self) -> CallContext:
        return CallContext(UNRESTRICTED, "grpc-stream")

    async def read(self) -> bytes | None:
        return self._messages.pop(0) if self._messages else None

    async def write(self, response: bytes) -> None:
        self.written.append(response)
