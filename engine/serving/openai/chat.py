"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.http.body import json_object_of
from weftline.engine.serving.http.context import HttpContext, ask_for, caller_of
from weftline.engine.serving.http.responses import DONE, EventStream, event, json_response
from weftline.engine.serving.openai.bodies import ChatBody, answers_output
from weftline.engine.serving.openai.messages import chat_inputs
from weftline.engine.serving.openai.ports import ChatPorts, chat_ports
from weftline.engine.serving.openai.responses import (
    ChunkHeader,
    Usage,
    chat_choice,
    chat_delta,
    chat_logprobs_json,
    choices_of,
    finish_of,
    usage_of,
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request as understood."""

    ask: Ask
    ports: ChatPorts
    model: str
    logprobs: bool
    usage: bool


class Chat:
    """The path; see `docs/guides/openai.md` for what each field does."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> ASGIApp:
        body = await json_object_of(request, self._context.limits.message_bytes_max, json=self._context.json)
        chat = ChatBody.parse(body)
        asked = self._asked(request, chat)
        if chat.stream:
            first, stream = await self._context.begin(request, asked.ask)
            head = ChunkHeader("chat.completion.chunk", asked.model, int(self._context.now_s()))
            return EventStream(chunks(asked, head, first, stream))
        outputs = await self._context.answer(request, asked.ask)
        head = ChunkHeader("chat.completion", asked.model, int(self._context.now_s()))
        return json_response(completion(asked, head, outputs))

    def _asked(self, request: Request, body: ChatBody) -> ChatRequest:
        ports = chat_ports(self._context.info(request, body.model))
        inputs = chat_inputs(body, ports)
        sampling = body.sampling()
        if ports.sampling is None:
            body.check_no_sampling(sampling)
        elif sampling:
            inputs[ports.sampling] = sampling
        answers = answers_output(body, ports.answers)
        if ports.tenant is not None and caller_of(request).name:
            inputs[ports.tenant] = caller_of(request).name  # so that timing reveals no cached prompt of another caller
        wanted = [ports.output, ports.usage, ports.tool_calls, answers]
        ask = ask_for(request, body.model, inputs, [name for name in wanted if name], body.priority)
        return ChatRequest(ask, ports, body.model, body.likeliest is not None, body.usage_in_stream)


def completion(asked: ChatRequest, head: ChunkHeader, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole answer as chat.completion."""
    ports = asked.ports
    choices = choices_of(outputs, ports.output, ports.usage, ports.answers, ports.tool_calls, 0)
    body = head.to_json([chat_choice(choice, asked.logprobs) for choice in choices])
    return body | {"usage": usage_of(outputs.get(ports.usage or "")).to_json()}


async def chunks(
    asked: ChatRequest, head: ChunkHeader, first: StreamedOutput | None, stream: AsyncGenerator[StreamedOutput, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer: role, text, finish reason, usage."""
    ports = asked.ports
    chunk = head.to_json([])
    extra = {"usage": None} if asked.usage else {}
    streamed_chars = 0  # characters of the text that were sent in chunks
    whole: dict[str, Any] = {}
    try:
        yield event(chunk | {"choices": [chat_delta(0, {"role": "assistant", "content": ""})]} | extra)
        output = first
        while output is not None:
            if output.last:
                whole[output.output] = output.value
            elif output.output == ports.output and output.value:
                streamed_chars += len(output.value)
                yield event(chunk | {"choices": [chat_delta(0, {"content": output.value})]} | extra)
            output = await anext(stream, None)
    finally:
        await stream.aclose()
    usage = whole.get(ports.usage or "")
    choices = choices_of(whole, ports.output, ports.usage, ports.answers, ports.tool_calls, 0)
    for choice in choices:
        choice = dataclasses.replace(choice, text=choice.text[streamed_chars:] if choice.index == 0 else choice.text)
        if choice.text or choice.logprobs:
            named = {"content": choice.text} | ({"role": "assistant"} if choice.index else {})
            logprobs = chat_logprobs_json(choice.logprobs) if choice.logprobs else None
            yield event(chunk | {"choices": [chat_delta(choice.index, named, None, logprobs)]} | extra)
        if choice.tool_calls:
            calls = [_numbered(place, call) for place, call in enumerate(choice.tool_calls)]
            yield event(chunk | {"choices": [chat_delta(choice.index, {"tool_calls": calls})]} | extra)
        finish = choice.finish if len(choices) > 1 else finish_of(usage, choice.tool_calls)
        yield event(chunk | {"choices": [chat_delta(choice.index, {}, finish)]} | extra)
    if asked.usage:
        yield event(chunk | {"usage": (usage_of(usage) if usage else Usage()).to_json()})
    yield DONE


def _numbered(place: int, call: Any) -> Any:
    return {"index": place, **call} if isinstance(call, dict) else call
