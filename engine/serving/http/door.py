"""Shared state of the HTTP handlers, and requests bound to a caller and a connection."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from weftline.engine.result import StreamedOutput, owned
from weftline.engine.serving.auth.gate import Caller
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.backend import Ask, Backend
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.face import ModelFace
from weftline.engine.serving.http.attended import while_connected
from weftline.engine.serving.http.refusal import HttpError
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.statistics import ModelFigures
from weftline.engine.serving.v2.metadata import server_ready
from weftline.engine.serving.v2.settings import LogSettings, TraceSettings
from weftline.errors import AccessDenied

Figures = Callable[[Mapping[str, int]], Awaitable[Sequence[ModelFigures]]]
"""Returns the figures of models that are given with the version that serves, and of their steps."""

SPAN = "weftline.traceparent"
"""Where in a scope the trace context of the request's own span stands, for the answer's headers."""

ID_CHARS_MAX = 128
DEADLINE_HEADER = "x-request-timeout-ms"
"""Header with the milliseconds that a request has; OpenAI's protocol has no field for it."""


@dataclass(slots=True)
class HttpDrainState:
    """Whether new work is taken. Changed by the server alone, when it drains."""

    on: bool = True


@dataclass(frozen=True, slots=True)
class HttpContext:
    """What the paths need.

    shared_memory: regions that clients registered; it refuses all where it is off.
    figures:       what v2's statistics tell.
    trace, logs:   what v2 clients may set.
    json:          reads bodies and elements that are JSON.
    now_s:         seconds since the epoch.
    """

    backend: Backend
    limits: ServeLimits
    shared_memory: SharedMemory
    figures: Figures
    trace: TraceSettings
    logs: LogSettings
    serving: HttpDrainState = field(default_factory=HttpDrainState)
    json: JsonParser = field(default_factory=JsonParser)
    now_s: Callable[[], float] = time.time

    def face(self, request: Request, model: str, version: str = "") -> ModelFace:
        """Return the face of a model that the caller may use; whoever may not is not told whether it exists."""
        if not caller_of(request).may(model):
            raise AccessDenied("this token does not allow that model")
        return self.backend.face(model, version)

    def ready(self) -> bool:
        """Whether every model that should serve is ready, and new work is taken; the gRPC door says the same."""
        return self.serving.on and server_ready(self.backend.index())

    async def answer(self, request: Request, ask: Ask) -> dict[str, Any]:
        """Return the outputs of a request, the caller's own; a client that leaves withdraws it."""
        return await while_connected(request.receive, self.outputs(request, ask))

    async def outputs(self, request: Request, ask: Ask) -> dict[str, Any]:
        """Return the outputs of a request, copied out of what the engine lent."""
        with await self.backend.ask(ask) as answer:
            request.scope[SPAN] = answer.traceparent
            if self.trace.active:
                self.trace.note(ask, answer.timings, answer.total_ms)
            return {name: owned(value) for name, value in answer.outputs.items()}

    async def begin(
        self, request: Request, ask: Ask
    ) -> tuple[StreamedOutput | None, AsyncGenerator[StreamedOutput, None]]:
        """Return a stream and its first piece, None when it has none: what fails before is an error, not a stream."""
        stream = self.backend.stream(ask)
        try:
            return await while_connected(request.receive, anext(stream, None)), stream
        except BaseException:
            await stream.aclose()
            raise


def caller_of(request: Request) -> Caller:
    """Return who asks, as the gate said."""
    caller: Caller = request.scope["weftline.caller"]
    return caller


def ask_for(
    request: Request, model: str, inputs: Mapping[str, Any], outputs: Sequence[str], body: Mapping[str, Any]
) -> Ask:
    """Return one request to a model for the caller, with what its headers say of time, name and trace."""
    return Ask(
        model,
        inputs,
        tuple(outputs),
        deadline_ms_of(request),
        priority_of(body),
        id=id_of(request),
        caller=caller_of(request).name,
        door="http",
        traceparent=request.headers.get("traceparent", "")[:ID_CHARS_MAX],
        size_bytes=int(request.headers.get("content-length", "0") or 0),
    )


def id_of(request: Request) -> str:
    """Return the caller's name for its request; '' without one."""
    given = request.headers.get("x-request-id", "")
    if len(given) > ID_CHARS_MAX or not given.isprintable():
        raise HttpError(f"x-request-id: expected at most {ID_CHARS_MAX} printable characters")
    return given


def deadline_ms_of(request: Request) -> float | None:
    """Return how long the request has by its header; None without one."""
    given = request.headers.get(DEADLINE_HEADER)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 8):
        raise HttpError(f"{DEADLINE_HEADER}: expected a whole number of milliseconds")
    return float(given)


def priority_of(body: Mapping[str, Any]) -> int:
    """Return the engine's priority for the field `priority`, where, as in vLLM, the lower goes first."""
    given = body.get("priority")
    if given is None:
        return 0
    if type(given) is not int or not -100 <= given <= 100:
        raise HttpError("priority: expected a whole number from -100 (first) to 100", param="priority")
    return -given
