"""POST /v1/audio/transcriptions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.result import StreamedOutput
from weftline.engine.serving.http.body import file_field, form_of, text_field
from weftline.engine.serving.http.context import HttpContext, ask_for
from weftline.engine.serving.http.errors import unsupported
from weftline.engine.serving.http.responses import DONE, EventStream, event, json_response, text_response
from weftline.engine.serving.openai.bodies import TranscriptionBody
from weftline.engine.serving.openai.ports import SpeechPorts, speech_ports

FIELDS = ("model", "language", "prompt", "response_format", "temperature", "stream")


class Transcriptions:
    """The path."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> ASGIApp:
        form = await form_of(request)
        body = TranscriptionBody.parse({name: text_field(form, name) for name in FIELDS})
        ports = speech_ports(self._context.info(request, body.model))
        inputs = {ports.audio: await file_field(form, "file")} | _hints(body, ports)
        _check_lists(form)
        ask = ask_for(request, body.model, inputs, [ports.output])
        if body.streamed:
            first, stream = await self._context.begin(request, ask)
            return EventStream(events(ports.output, first, stream))
        text = (await self._context.answer(request, ask)).get(ports.output) or ""
        return text_response(text + "\n") if body.response_format == "text" else json_response({"text": text})


def _hints(body: TranscriptionBody, ports: SpeechPorts) -> dict[str, Any]:
    """Return the inputs for language and prompt; HttpError when the model has no such input."""
    inputs = {}
    for field, value, port in (("language", body.language, ports.language), ("prompt", body.prompt, ports.prompt)):
        if value is not None and port is None:
            raise unsupported(field, f"the model has no input `{field}: text`; its operator sets it, leave it out")
        if value is not None and port is not None:
            inputs[port] = value
    return inputs


def _check_lists(form: FormData) -> None:
    for field in ("timestamp_granularities[]", "include[]", "chunking_strategy", "known_speaker_names[]"):
        if form.getlist(field) not in ([], ["auto"]):
            raise unsupported(field, "not supported by this server; leave it out")


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
