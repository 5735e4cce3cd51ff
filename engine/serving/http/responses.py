"""HTTP responses: JSON, plain text, errors and server-sent events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weftline.engine.serving.anthropic.errors import is_messages_path, problem
from weftline.engine.serving.http.client_gone import while_connected
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.replies import ErrorReply, to_status
from weftline.errors import ContextOverflow, SessionClosed, UnknownModel

JSON = "application/json"
_OPENAI_PATHS = ("/v1", "/v2/rerank", "/rerank", "/score", "/tokenize", "/detokenize")
_RETRIABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")

_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}

DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
]


def json_response(value: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; `value` has neither NaN nor infinities."""
    return Response(msgspec.json.encode(value), code, headers, JSON)


def text_response(text: str, code: int = 200) -> Response:
    return Response(text, code, media_type="text/plain; charset=utf-8")


def error_response(error: BaseException, path: str, request_id: str = "") -> Response:
    """Return the response for an error; on paths of Anthropic and OpenAI in their formats, else in v2's."""
    reply = to_status(error)
    code = _code_of(error, reply)
    if is_messages_path(path):
        body = problem(reply.message, code, request_id)
    else:
        body = _openai_body(error, reply, code) if path.startswith(_OPENAI_PATHS) else {"error": reply.message}
    headers = {"x-should-retry": "true" if reply.status in _RETRIABLE and code != 413 else "false"}
    if reply.retry_after_s > 0:
        headers["retry-after"] = str(math.ceil(reply.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(reply.retry_after_s * 1e3))
    if code == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, HttpError) and error.allow:
        headers["allow"] = error.allow
    if isinstance(error, HttpError) and error.close:
        headers["connection"] = "close"
    return json_response(body, code, headers)


def _code_of(error: BaseException, reply: ErrorReply) -> int:
    return error.code if isinstance(error, HttpError) else reply.http_status


def openai_problem(error: BaseException) -> dict[str, Any]:
    """Return an error in OpenAI's format: {"error": {message, type, param, code}}."""
    reply = to_status(error)
    return _openai_body(error, reply, _code_of(error, reply))


def anthropic_problem(error: BaseException, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    reply = to_status(error)
    return problem(reply.message, _code_of(error, reply), request_id)


def _openai_body(error: BaseException, reply: ErrorReply, code: int) -> dict[str, Any]:
    kind = _TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")
    name, param, message = _CODES.get(code), reply.param or None, reply.message
    if isinstance(error, UnknownModel):
        name, param = "model_not_found", "model"
    elif isinstance(error, ContextOverflow):  # clients look for these words
        name, message = "context_length_exceeded", f"This model's maximum context length is exceeded: {message}"
    elif isinstance(error, HttpError):
        name = error.name or name
    return {"error": {"message": message, "type": kind, "param": param, "code": name}}


def event(value: Mapping[str, Any] | msgspec.Raw) -> bytes:
    """Encode a JSON value as one server-sent event. JSON contains no line ends, so the value is one line."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


def named_event(value: Mapping[str, Any]) -> bytes:
    """Encode an object as one server-sent event that is named by its `type`."""
    return b"event: %b\n%b" % (value["type"].encode(), event(value))


def _openai_event(error: BaseException) -> bytes:
    return event(openai_problem(error))


class EventStream:
    """An ASGI response of server-sent events.

    Each event waits until the connection accepts it, so a client that does not read blocks the stream and the step that
    writes it. A client that disconnects cancels the request. An error ends the stream with an event, without [DONE].

    problem: returns the event of an error; default: in OpenAI's format.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], problem: Callable[[BaseException], bytes] | None = None
    ) -> None:
        self._events = events
        self._problem = problem or _openai_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(scope, self._write(send))
        except asyncio.CancelledError:  # the server's grace time is over
            await self._end(send, self._problem(SessionClosed("the server is shutting down")))
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        try:
            async for one in self._events:
                await send({"type": "http.response.body", "body": one, "more_body": True})
        except Exception as error:
            await self._end(send, self._problem(error))
        else:
            await self._end(send, b"")

    async def _end(self, send: Send, last: bytes) -> None:
        await send({"type": "http.response.body", "body": last, "more_body": False})
