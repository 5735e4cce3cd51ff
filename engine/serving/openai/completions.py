"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.http.body import json_object_of
from weftline.engine.serving.http.connection import while_connected
from weftline.engine.serving.http.context import HttpContext, ask_for, caller_of
from weftline.engine.serving.http.errors import unsupported
from weftline.engine.serving.http.responses import DONE, EventStream, event, json_response
from weftline.engine.serving.lifecycle import gather_or_cancel
from weftline.engine.serving.openai.bodies import CompletionBody, answers_output
from weftline.engine.serving.openai.ports import TextPorts, completion_ports
from weftline.engine.serving.openai.responses import (
    ChunkHeader,
    Usage,
    choices_of,
    finish_of,
    text_choice,
    usage_of,
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion request as understood: one ask for each prompt, n answers to each."""

    asks: tuple[Ask, ...]
    ports: TextPorts
    model: str
    n: int
    logprobs: bool
    usage: bool


class Completions:
    """The path."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> ASGIApp:
        fields = await json_object_of(request, self._context.limits.message_bytes_max, json=self._context.json)
        body = CompletionBody.parse(fields, texts_max=self._context.limits.batch_max)
        asked = self._asked(request, body)
        head = ChunkHeader("text_completion", asked.model, int(self._context.now_s()))
        if body.stream:
            if len(asked.asks) > 1:
                raise unsupported("prompt", "one prompt streams at a time; send a request for each")
            first, stream = await self._context.begin(request, asked.asks[0])
            return EventStream(chunks(asked, head, first, stream))
        answers = await while_connected(
            request.receive, gather_or_cancel([self._context.outputs(request, one) for one in asked.asks])
        )
        return json_response(completion(asked, head, answers))

    def _asked(self, request: Request, body: CompletionBody) -> CompletionRequest:
        ports = completion_ports(self._context.info(request, body.model))
        sampling = body.sampling()
        if ports.sampling is None:
            body.check_no_sampling(sampling)
        answers = answers_output(body, ports.answers)
        fixed: dict[str, Any] = {ports.sampling: sampling} if ports.sampling is not None and sampling else {}
        if ports.tenant is not None and caller_of(request).name:
            fixed[ports.tenant] = caller_of(request).name
        wanted = [name for name in (ports.output, ports.usage, answers) if name]
        asks = tuple(
            ask_for(request, body.model, {ports.prompt: one} | fixed, wanted, body.priority) for one in body.prompt
        )
        return CompletionRequest(asks, ports, body.model, body.n, body.likeliest is not None, body.usage_in_stream)


def completion(asked: CompletionRequest, head: ChunkHeader, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whole answers as text_completion."""
    ports, choices, usage = asked.ports, [], Usage()
    for place, outputs in enumerate(answers):
        usage += usage_of(outputs.get(ports.usage or ""))
        choices += [
            text_choice(one.index, one.text, one.finish, (one.logprobs or ()) if asked.logprobs else None)
            for one in choices_of(outputs, ports.output, ports.usage, ports.answers, None, place * asked.n)
        ]
    return head.to_json(choices) | {"usage": usage.to_json()}


async def chunks(
    asked: CompletionRequest,
    head: ChunkHeader,
    first: StreamedOutput | None,
    stream: AsyncGenerator[StreamedOutput, None],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed completion."""
    ports = asked.ports
    chunk = head.to_json([])
    extra = {"usage": None} if asked.usage else {}
    streamed_chars = 0
    whole: dict[str, Any] = {}
    try:
        output = first
        while output is not None:
            if output.last:
                whole[output.output] = output.value
            elif output.output == ports.output and output.value:
                streamed_chars += len(output.value)
                yield event(chunk | {"choices": [text_choice(0, output.value, None)]} | extra)
            output = await anext(stream, None)
    finally:
        await stream.aclose()
    usage = whole.get(ports.usage or "")
    choices = choices_of(whole, ports.output, ports.usage, ports.answers, None, 0)
    for one in choices:
        text = one.text[streamed_chars:] if one.index == 0 else one.text
        finish = one.finish if len(choices) > 1 else finish_of(usage)
        logprobs = (one.logprobs or ()) if asked.logprobs else None
        yield event(chunk | {"choices": [text_choice(one.index, text, finish, logprobs)]} | extra)
    if asked.usage:
        yield event(chunk | {"usage": usage_of(usage).to_json()})
    yield DONE
