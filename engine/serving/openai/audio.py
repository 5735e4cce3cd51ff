"""POST /v1/audio/transcriptions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.http.door import HttpContext, ask_for
from weftline.engine.serving.http.mapping import SpeechPorts, speech_ports
from weftline.engine.serving.http.multipart import file_field, form_of, text_field
from weftline.engine.serving.http.refusal import HttpError, unsupported
from weftline.engine.serving.http.replying import json_response, text_response
from weftline.engine.serving.http.sse import DONE, EventStream, event
from weftline.engine.serving.openai.fields import model_of


class Transcriptions:
    """The path."""

    def __init__(self, door: HttpContext) -> None:
        self._door = door

    async def create(self, request: Request) -> ASGIApp:
        form = await form_of(request)
        model = model_of({"model": text_field(form, "model")})
        ports = speech_ports(self._door.face(request, model))
        inputs = {ports.audio: await file_field(form, "file")} | _hints(form, ports)
        plain = _is_plain(form)
        ask = ask_for(request, model, inputs, [ports.output], {})
        if text_field(form, "stream") in ("true", "True", "1"):
            first, stream = await self._door.begin(request, ask)
            return EventStream(events(ports.output, first, stream))
        text = (await self._door.answer(request, ask)).get(ports.output) or ""
        return text_response(text + "\n") if plain else json_response({"text": text})


def _hints(form: FormData, ports: SpeechPorts) -> dict[str, Any]:
    """Return the inputs for what is said of the recording; Refusal for what the model could not follow."""
    inputs = {}
    for field, port in (("language", ports.language), ("prompt", ports.prompt)):
        given = text_field(form, field)
        if given is not None and port is None:
            raise unsupported(field, f"the model has no input `{field}: text`; its operator sets it, leave it out")
        if given is not None and port is not None:
            inputs[port] = given
    if text_field(form, "temperature") not in (None, "0", "0.0"):
        raise unsupported("temperature", "the likeliest words are taken; leave it out")
    for field in ("timestamp_granularities[]", "include[]", "chunking_strategy", "known_speaker_names[]"):
        if form.getlist(field) not in ([], ["auto"]):
            raise unsupported(field, "not supported by this server; leave it out")
    return inputs


def _is_plain(form: FormData) -> bool:
    format = text_field(form, "response_format")
    if format not in (None, "json", "text"):
        raise HttpError("response_format: expected json or text; no times of words are known", param="response_format")
    return format == "text"


async def events(
    output: str, first: StreamedOutput | None, stream: AsyncGenerator[StreamedOutput, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed transcription."""
    said, text = 0, ""
    try:
        piece = first
        while piece is not None:
            if piece.output == output and piece.last:
                text = piece.value or ""
            elif piece.output == output and piece.value:
                said += len(piece.value)
                yield event({"type": "transcript.text.delta", "delta": piece.value})
            piece = await anext(stream, None)
    finally:
        await stream.aclose()
    if text[said:]:
        yield event({"type": "transcript.text.delta", "delta": text[said:]})
    yield event({"type": "transcript.text.done", "text": text})
    yield DONE
