"""Handlers of Anthropic's routes: messages, and their count of tokens. A request is run as the chat that it means.

`docs/guides/anthropic.md` lists what each field does.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.serving.anthropic.bodies import Chat, ConversationBody, MessagesBody
from weftline.engine.serving.anthropic.responses import BlockWriter, MessageAnswer, frame
from weftline.engine.serving.http.context import caller_of, shown_id
from weftline.engine.serving.http.responses import JSON, EventStream, anthropic_problem, json_response
from weftline.engine.serving.openai import endpoints as openai
from weftline.engine.serving.openai.messages import chat_inputs
from weftline.engine.serving.openai.ports import chat_ports


class Messages(openai.Chat):
    """POST /v1/messages."""

    async def create(self, request: Request) -> ASGIApp:
        body = MessagesBody.parse(await self._object(request))
        ports = chat_ports(self._info(request, body.model))
        chat, caller = body.chat(ports), caller_of(request).name
        answer = MessageAnswer(
            id=f"msg_{secrets.token_hex(12)}", model=body.model, ports=ports, shown=body.thinking_shown
        )
        with chat.naming_fields():
            [ask] = self._asks(request, chat.body, ports, [chat_inputs(chat.body, ports)])
            if body.stream:
                text = await self._text(request, ask, *(name for name in (ports.output, ports.reasoning) if name))
                ending = partial(self._context.json.ending, caller=caller)
                return EventStream(events(answer, chat, text, ending), partial(_error_event, shown_id(request.scope)))
            answers = await self._outputs_of(request, [ask], encoded=True)
        return Response(await self._context.json.completion(answer, answers, caller), media_type=JSON)


Ending = Callable[[MessageAnswer, Mapping[str, Any], Mapping[str, int]], Awaitable[list[bytes]]]
"""`JsonParser.ending` for a caller."""


async def events(
    answer: MessageAnswer, chat: Chat, text: openai.StreamedText, ending: Ending
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer."""
    blocks = BlockWriter(answer)
    with chat.naming_fields():
        async with contextlib.aclosing(text.deltas()) as deltas:
            yield answer.opening()
            async for output, delta in deltas:
                type = "thinking" if output == answer.ports.reasoning else "text"
                if added := blocks.add(type, delta):
                    yield b"".join(map(frame, added))
    begun = msgspec.structs.replace(answer, index=blocks.index, opened=blocks.opened)
    yield b"".join(await ending(begun, text.outputs, text.sent))


def _error_event(request_id: str, error: BaseException) -> bytes:
    return frame(anthropic_problem(error, request_id))


class CountTokens(openai.Tokenize):
    """POST /v1/messages/count_tokens."""

    async def create(self, request: Request) -> ASGIApp:
        body = ConversationBody.parse(await self._object(request))
        ports = chat_ports(self._info(request, body.model))
        chat = body.chat(ports)
        with chat.naming_fields():
            inputs, template = chat_inputs(chat.body, ports), openai.template_of(chat.body, ports)
            found = await self._prompt_of(request, chat.body, ports, inputs, template)
        return json_response({"input_tokens": len(found["prompt_token_ids"])})
