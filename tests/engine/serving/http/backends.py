"""A backend whose models are functions, for tests of the HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Answer, Ask
from weftline.engine.serving.model_info import READY, ModelInfo, ModelState, PortInfo
from weftline.errors import UnknownModel


def info(name: str, inputs: dict[str, str], outputs: dict[str, str], *pieces: str) -> ModelInfo:
    """Return a info; a type that ends with `?` may be left out, and the outputs named in `pieces` stream."""
    return ModelInfo(
        name,
        1,
        tuple(PortInfo(one, type.removesuffix("?"), type.endswith("?")) for one, type in inputs.items()),
        tuple(
            PortInfo(one, type.removesuffix("?"), type.endswith("?"), one in pieces) for one, type in outputs.items()
        ),
    )


Answering = Callable[[Ask], Awaitable[dict[str, Any]] | dict[str, Any]]


@dataclass
class Functions:
    """Models by name: a info and a function from Ask to outputs, or to what is raised.

    asked, withdrawn, released: what happened, in order.
    """

    models: dict[str, tuple[ModelInfo, Answering]]
    states: dict[str, str] = field(default_factory=dict)
    asked: list[Ask] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    released: int = 0
    piece_s: float = 0.0

    def index(self) -> tuple[ModelState, ...]:
        return tuple(ModelState(name, 1, self.states.get(name, READY), "why") for name in sorted(self.models))

    def info(self, model: str, version: str = "") -> ModelInfo:
        if model not in self.models or version not in ("", "1"):
            raise UnknownModel("no model has that name and version")
        return self.models[model][0]

    async def _outputs(self, ask: Ask) -> dict[str, Any]:
        self.asked.append(ask)
        found = self.models[self.info(ask.model).name][1](ask)
        outputs = found if isinstance(found, dict) else await found
        return {name: outputs.get(name) for name in (ask.outputs or outputs)}

    async def ask(self, ask: Ask) -> Answer:
        try:
            span = ask.traceparent.replace("b", "c")  # a child span's, as a tracer would create it
            return Answer(await self._outputs(ask), version=1, traceparent=span, give_back=self._released)
        except asyncio.CancelledError:
            self.withdrawn.append(ask.id)
            raise

    def _released(self) -> None:
        self.released += 1

    async def stream(self, ask: Ask) -> AsyncGenerator[StreamedOutput, None]:
        try:
            outputs = await self._outputs(ask)
            streaming = {port.name for port in self.info(ask.model).outputs if port.pieces}
            for name, value in outputs.items():
                if name in streaming and isinstance(value, str):
                    for letter in value:
                        await asyncio.sleep(self.piece_s)
                        yield StreamedOutput(name, letter, False)
                elif isinstance(value, BaseException):
                    raise value
                yield StreamedOutput(name, value, True)
        except (asyncio.CancelledError, GeneratorExit):
            self.withdrawn.append(ask.id)
            raise

    async def load(self, model: str) -> int:
        self.info(model)
        self.states[model] = READY
        return 1

    async def unload(self, model: str) -> None:
        self.info(model)
        self.states[model] = "unavailable"

    def stats(self, model: str) -> Mapping[str, Any]:
        return {}

    async def metrics(self) -> bytes:
        return b"weftline_up 1\n"


def chatting(answer: Answering, name: str = "chat") -> tuple[ModelInfo, Answering]:
    """Return a model with the ports of an llm step."""
    inputs = {"prompt": "text?", "messages": "json?", "tools": "json?", "sampling": "json?", "tenant": "text?"}
    return info(name, inputs, {"text": "text", "usage": "json", "answers": "json"}, "text"), answer
