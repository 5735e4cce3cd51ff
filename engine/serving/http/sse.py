"""Server-sent event responses.

Each event waits until the connection takes it, so a client that does not read stops the stream, and with it the step
that writes it. A client that leaves withdraws the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from weftline.engine.serving.http.attended import while_connected
from weftline.engine.serving.http.problems import openai_problem
from weftline.errors import SessionClosed

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would gather the events
]


def event(value: Mapping[str, Any]) -> bytes:
    """Return one event with a JSON value. JSON has no line ends of its own, so the value is one line."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


class EventStream:
    """An ASGI response made of events. An error ends it with an event in OpenAI's shape, and without [DONE]."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except asyncio.CancelledError:  # the server's grace time is over
            await self._end(send, event(openai_problem(SessionClosed("the server is shutting down"))))
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            async for one in self._events:
                await send({"type": "http.response.body", "body": one, "more_body": True})
        except Exception as error:
            await self._end(send, event(openai_problem(error)))
        else:
            await self._end(send, b"")

    async def _end(self, send: Send, last: bytes) -> None:
        await send({"type": "http.response.body", "body": last, "more_body": False})
