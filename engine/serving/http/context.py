"""Shared state of the HTTP handlers, and requests bound to a caller and a connection."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from weftline.engine.protocol.values import decoded_json, owned_packed
from weftline.engine.result import StreamedOutput, owned
from weftline.engine.serving.auth.gate import Caller
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.backend import Ask, Backend
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.client_gone import while_connected
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.lifecycle import DrainSwitch
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.room import reserve
from weftline.engine.serving.statistics import ModelFigures
from weftline.engine.serving.unsent_budget import SMALL_BYTES, Reservation, UnsentBudget
from weftline.engine.serving.v2.metadata import server_ready
from weftline.engine.serving.v2.settings import LogSettings, TraceSettings

Figures = Callable[[Mapping[str, int]], Awaitable[Sequence[ModelFigures]]]
"""Returns the figures of models that are given with the version that serves, and of their steps."""

SPAN = "weftline.traceparent"
"""Scope key of the trace context of the request's own span, for the response headers."""

REQUEST_ID = "weftline.request_id"
"""Scope key of the id of a request without one of its caller."""

ROOM = "weftline.room"
"""Scope key of the HttpRoom."""

HEADERS = "weftline.headers"
"""Scope key of the RequestHeaders."""

ID_CHARS_MAX = 128
DEADLINE_HEADER = "x-request-timeout-ms"
"""Header with the milliseconds that a request has; OpenAI's protocol has no field for it."""


@dataclass(frozen=True, slots=True)
class HttpContext:
    """Dependencies of the routes.

    serving:       accepting state of the server.
    json:          parser of JSON bodies and elements.
    shared_memory: registered regions; refuses every registration where shared memory is off.
    figures:       source of v2's statistics.
    trace, logs:   settings that v2 clients may change.
    strict:        not ready while any model that should serve is not.
    now_s:         seconds since the epoch.
    aliases:       further names of models on OpenAI's routes.
    """

    backend: Backend
    limits: ServeLimits
    serving: DrainSwitch
    json: JsonParser
    shared_memory: SharedMemory
    figures: Figures
    trace: TraceSettings
    logs: LogSettings
    strict: bool = False
    now_s: Callable[[], float] = time.time
    aliases: Mapping[str, str] = field(default_factory=dict)

    def model_of(self, name: str) -> str:
        """Return the model of a name on OpenAI's routes."""
        return self.aliases.get(name, name)

    def authorised_info(self, request: Request, model: str, version: str = "") -> ModelInfo:
        """Return the metadata of a model that the caller may use; AccessDenied also for an unknown one."""
        caller_of(request).check(model)
        return self.backend.info(model, version)

    def ready(self) -> bool:
        """Return True while new work is accepted and models can serve, as the gRPC server does."""
        return self.serving.on and server_ready(self.backend.index(), self.strict)

    async def outputs(self, request: Request, ask: Ask, encoded: bool = False) -> dict[str, Any]:
        """Return copies of a request's outputs. encoded: large json stays Packed."""
        with await self.backend.ask(ask) as answer:
            await room_of(request).take(answer.size_bytes)
            await answer.load()
            request.scope[SPAN] = answer.traceparent
            if self.trace.active:
                self.trace.note(ask, answer.timings, answer.total_ms)
            copy = owned_packed if encoded else decoded_json
            return {name: copy(owned(value)) for name, value in answer.outputs.items()}

    async def begin(
        self, request: Request, ask: Ask
    ) -> tuple[StreamedOutput | None, AsyncGenerator[StreamedOutput, None]]:
        """Return a stream and its first chunk, None when it has none; earlier failures are raised."""
        stream = self.backend.stream(ask)
        try:
            return await while_connected(request.scope, anext(stream, None)), stream
        except BaseException:
            await stream.aclose()
            raise


class RequestHeaders(Headers):
    """Headers of one request, decoded once: Starlette's scan and encode all of them at each look-up."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._values: dict[str, list[str]] = {}
        for name, value in raw:
            self._values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def __getitem__(self, key: str) -> str:
        return self._values[key.lower()][0]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._values

    def get(self, key: str, default: Any = None) -> Any:
        found = self._values.get(key.lower())
        return default if found is None else found[0]

    def getlist(self, key: str) -> list[str]:
        return list(self._values.get(key.lower(), ()))


class HttpRequest(Request):
    """A request of the guard, with its RequestHeaders."""

    @property
    def headers(self) -> Headers:
        headers: Headers = self.scope[HEADERS]
        return headers


class HttpRoom:
    """Room for the response of one request in the budget of unsent bytes. connection: key of its connection."""

    def __init__(self, budget: UnsentBudget, connection: Hashable, caller: str) -> None:
        self._budget, self._connection, self._caller = budget, connection, caller or connection
        self._taken: list[Reservation] = []

    async def take(self, size_bytes: int) -> None:
        """Wait for room until `close`, except for a small answer; LimitReached if there is none in time."""
        if size_bytes > SMALL_BYTES:
            self._taken.append(await reserve(self._budget, self._connection, self._caller, size_bytes))

    async def cover(self, size_bytes: int) -> None:
        """Wait for room for a body that is larger than what was taken."""
        await self.take(size_bytes - sum(one.size_bytes for one in self._taken))

    def pressed(self) -> bool:
        """Return True while responses on other connections wait for the budget."""
        return self._budget.pressed(self._connection)

    def close(self) -> None:
        for one in self._taken:
            one.release()


def room_of(request: Request) -> HttpRoom:
    """Return the room for the response."""
    room: HttpRoom = request.scope[ROOM]
    return room


def caller_of(request: Request) -> Caller:
    """Return the caller that the gate admitted."""
    caller: Caller = request.scope["weftline.caller"]
    return caller


def ask_for(
    request: Request, model: str, inputs: Mapping[str, Any], outputs: Sequence[str], priority: int | None = None
) -> Ask:
    """Build a request of the caller, with deadline, id and trace context from its headers.

    priority: as in vLLM, lower values run first.
    """
    return Ask(
        model,
        inputs,
        tuple(outputs),
        deadline_ms_of(request),
        -(priority or 0),
        id=id_of(request),
        caller=caller_of(request).name,
        protocol="http",
        traceparent=request.headers.get("traceparent", "")[:ID_CHARS_MAX],
        size_bytes=int(request.headers.get("content-length", "0") or 0),
    )


def id_of(request: Request) -> str:
    """Return the request id of the caller, or the one that the response gets instead."""
    given = request.headers.get("x-request-id", "")
    if len(given) > ID_CHARS_MAX or not given.isprintable():
        raise HttpError(f"x-request-id: expected at most {ID_CHARS_MAX} printable characters")
    return given or str(request.scope.get(REQUEST_ID, ""))


def shown_id(scope: Scope) -> str:
    """Return the id that a response has: that of the request, or the server's where it is absent or invalid."""
    given = scope[HEADERS].get("x-request-id", "")
    return given if given and len(given) <= ID_CHARS_MAX and given.isprintable() else str(scope[REQUEST_ID])


def deadline_ms_of(request: Request) -> float | None:
    """Return the deadline in the header; None without one."""
    given = request.headers.get(DEADLINE_HEADER)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 8):
        raise HttpError(f"{DEADLINE_HEADER}: expected a whole number of milliseconds")
    return float(given)
