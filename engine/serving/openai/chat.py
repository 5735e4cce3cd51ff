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
from weftline.engine.serving.http.door import HttpContext, ask_for, caller_of
from weftline.engine.serving.http.mapping import ChatPorts, chat_ports
from weftline.engine.serving.http.refusal import unsupported
from weftline.engine.serving.http.replying import json_response
from weftline.engine.serving.http.sse import DONE, EventStream, event
from weftline.engine.serving.openai.answer import (
    ChunkHeader,
    Usage,
    chat_choice,
    chat_delta,
    chat_logprobs_json,
    choices_of,
    finish_of,
    usage_of,
)
from weftline.engine.serving.openai.fields import (
    chat_logprobs,
    check_no_sampling,
    check_refused,
    count_of,
    flag,
    model_of,
    sampling_of,
    wants_usage,
)
from weftline.engine.serving.openai.messages import chat_inputs


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

    def __init__(self, door: HttpContext) -> None:
        self._door = door

    async def create(self, request: Request) -> ASGIApp:
        body = await json_object_of(request, self._door.limits.message_bytes_max, json=self._door.json)
        asked = self._asked(request, body)
        if flag(body, "stream"):
            first, stream = await self._door.begin(request, asked.ask)
            head = ChunkHeader("chat.completion.chunk", asked.model, int(self._door.now_s()))
            return EventStream(chunks(asked, head, first, stream))
        outputs = await self._door.answer(request, asked.ask)
        head = ChunkHeader("chat.completion", asked.model, int(self._door.now_s()))
        return json_response(completion(asked, head, outputs))

    def _asked(self, request: Request, body: Mapping[str, Any]) -> ChatRequest:
        model = model_of(body)
        ports = chat_ports(self._door.face(request, model))
        check_refused(body)
        inputs = chat_inputs(body, ports)
        logprobs, n = chat_logprobs(body), count_of(body)
        sampling = sampling_of(body, logprobs)
        if ports.sampling is None:
            check_no_sampling(body, sampling, model)
        elif sampling:
            inputs[ports.sampling] = sampling
        several = n > 1 or logprobs is not None
        if several and ports.answers is None:
            raise unsupported("n" if n > 1 else "logprobs", "the model gives neither; it has no output `answers: json`")
        if ports.tenant is not None and caller_of(request).name:
            inputs[ports.tenant] = caller_of(request).name  # nobody else's cached prompts can be felt in the timing
        wanted = [ports.output, ports.usage, ports.tool_calls, ports.answers if several else None]
        ask = ask_for(request, model, inputs, [name for name in wanted if name], body)
        return ChatRequest(ask, ports, model, logprobs is not None, wants_usage(body))


def completion(asked: ChatRequest, head: ChunkHeader, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole answer as chat.completion."""
    ports = asked.ports
    choices = choices_of(outputs, ports.output, ports.usage, ports.answers, ports.tool_calls, 0)
    told = head.to_json([chat_choice(choice, asked.logprobs) for choice in choices])
    return told | {"usage": usage_of(outputs.get(ports.usage or "")).to_json()}


async def chunks(
    asked: ChatRequest, head: ChunkHeader, first: StreamedOutput | None, stream: AsyncGenerator[StreamedOutput, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer: who speaks, what is said, why it ended, what it took."""
    ports = asked.ports
    told = head.to_json([])
    extra = {"usage": None} if asked.usage else {}
    said = 0  # characters of the text that were told in pieces
    whole: dict[str, Any] = {}
    try:
        yield event(told | {"choices": [chat_delta(0, {"role": "assistant", "content": ""})]} | extra)
        piece = first
        while piece is not None:
            if piece.last:
                whole[piece.output] = piece.value
            elif piece.output == ports.output and piece.value:
                said += len(piece.value)
                yield event(told | {"choices": [chat_delta(0, {"content": piece.value})]} | extra)
            piece = await anext(stream, None)
    finally:
        await stream.aclose()
    usage = whole.get(ports.usage or "")
    choices = choices_of(whole, ports.output, ports.usage, ports.answers, ports.tool_calls, 0)
    for choice in choices:
        choice = dataclasses.replace(choice, text=choice.text[said:] if choice.index == 0 else choice.text)
        if choice.text or choice.logprobs:
            named = {"content": choice.text} | ({"role": "assistant"} if choice.index else {})
            logprobs = chat_logprobs_json(choice.logprobs) if choice.logprobs else None
            yield event(told | {"choices": [chat_delta(choice.index, named, None, logprobs)]} | extra)
        if choice.tool_calls:
            calls = [_numbered(place, call) for place, call in enumerate(choice.tool_calls)]
            yield event(told | {"choices": [chat_delta(choice.index, {"tool_calls": calls})]} | extra)
        finish = choice.finish if len(choices) > 1 else finish_of(usage, choice.tool_calls)
        yield event(told | {"choices": [chat_delta(choice.index, {}, finish)]} | extra)
    if asked.usage:
        yield event(told | {"usage": (usage_of(usage) if usage else Usage()).to_json()})
    yield DONE


def _numbered(place: int, call: Any) -> Any:
    return {"index": place, **call} if isinstance(call, dict) else call
