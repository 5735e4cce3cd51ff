"""A backend that answers when it is let, and as much of a gRPC call as handlers use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc.aio

from weftline.engine.serving.backend import Answer, Ask
from weftline.engine.serving.face import ModelFace, PortFace
from weftline.errors import StepError

FACE = ModelFace("text", 1, (PortFace("text", "text"),), (PortFace("text", "text"),))


class Slow:
    """A backend whose requests end when they are let; `log` says what began and what ended."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.let: dict[str, asyncio.Event] = {}
        self.text = "said"

    def face(self, model: str, version: str = "") -> ModelFace:
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
    """As much of a ServicerContext as a stream uses."""

    def __init__(self, messages: Iterable[Any]) -> None:
        self._messages = [one.SerializeToString() for one in messages]
        self.written: list[bytes] = []

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    async def write(self, response: bytes) -> None:
        self.written.append(response)

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object = ()) -> None:
        raise AssertionError(f"{code}: {details}")
