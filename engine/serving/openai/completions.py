"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.http.attended import while_connected
from weftline.engine.serving.http.body import json_object_of
from weftline.engine.serving.http.door import HttpContext, ask_for, caller_of
from weftline.engine.serving.http.mapping import TextPorts, completion_ports
from weftline.engine.serving.http.refusal import HttpError, unsupported
from weftline.engine.serving.http.replying import json_response
from weftline.engine.serving.http.sse import DONE, EventStream, event
from weftline.engine.serving.http.together import gathered
from weftline.engine.serving.openai.answer import (
    ChunkHeader,
    Usage,
    choices_of,
    finish_of,
    text_choice,
    usage_of,
)
from weftline.engine.serving.openai.fields import (
    check_no_sampling,
    check_refused,
    count_of,
    flag,
    model_of,
    sampling_of,
    wants_usage,
)
from weftline.engine.serving.openai.texts import texts_of


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

    def __init__(self, door: HttpContext) -> None:
        self._door = door

    async def create(self, request: Request) -> ASGIApp:
        body = await json_object_of(request, self._door.limits.message_bytes_max, json=self._door.json)
        asked = self._asked(request, body)
        head = ChunkHeader("text_completion", asked.model, int(self._door.now_s()))
        if flag(body, "stream"):
            if len(asked.asks) > 1:
                raise unsupported("prompt", "one prompt streams at a time; send a request for each")
            first, stream = await self._door.begin(request, asked.asks[0])
            return EventStream(chunks(asked, head, first, stream))
        answers = await while_connected(
            request.receive, gathered([self._door.outputs(request, one) for one in asked.asks])
        )
        return json_response(completion(asked, head, answers))

    def _asked(self, request: Request, body: Mapping[str, Any]) -> CompletionRequest:
        model = model_of(body)
        ports = completion_ports(self._door.face(request, model))
        check_refused(body)
        prompts = texts_of(body.get("prompt"), "prompt", self._door.limits.batch_max)
        n, logprobs = count_of(body), _logprobs(body)
        sampling = sampling_of(body, logprobs)
        if flag(body, "echo"):
            sampling["echo"] = True
        if ports.sampling is None:
            check_no_sampling(body, sampling, model)
        several = n > 1 or logprobs is not None
        if several and ports.answers is None:
            raise unsupported("n" if n > 1 else "logprobs", "the model gives neither; it has no output `answers: json`")
        fixed: dict[str, Any] = {ports.sampling: sampling} if ports.sampling is not None and sampling else {}
        if ports.tenant is not None and caller_of(request).name:
            fixed[ports.tenant] = caller_of(request).name
        wanted = [name for name in (ports.output, ports.usage, ports.answers if several else None) if name]
        asks = tuple(ask_for(request, model, {ports.prompt: one} | fixed, wanted, body) for one in prompts)
        return CompletionRequest(asks, ports, model, n, logprobs is not None, wants_usage(body))


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
    told = head.to_json([])
    extra = {"usage": None} if asked.usage else {}
    said = 0
    whole: dict[str, Any] = {}
    try:
        piece = first
        while piece is not None:
            if piece.last:
                whole[piece.output] = piece.value
            elif piece.output == ports.output and piece.value:
                said += len(piece.value)
                yield event(told | {"choices": [text_choice(0, piece.value, None)]} | extra)
            piece = await anext(stream, None)
    finally:
        await stream.aclose()
    usage = whole.get(ports.usage or "")
    choices = choices_of(whole, ports.output, ports.usage, ports.answers, None, 0)
    for one in choices:
        text = one.text[said:] if one.index == 0 else one.text
        finish = one.finish if len(choices) > 1 else finish_of(usage)
        logprobs = (one.logprobs or ()) if asked.logprobs else None
        yield event(told | {"choices": [text_choice(one.index, text, finish, logprobs)]} | extra)
    if asked.usage:
        yield event(told | {"usage": usage_of(usage).to_json()})
    yield DONE


def _logprobs(body: Mapping[str, Any]) -> int | None:
    given = body.get("logprobs")
    if given is not None and (type(given) is not int or not 0 <= given <= 20):
        raise HttpError("logprobs: expected a whole number from 0 to 20", param="logprobs")
    return given
