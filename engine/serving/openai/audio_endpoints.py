"""Handlers of the OpenAI routes for recordings: transcriptions, translations, speech."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.serving.http.body import file_field, form_of, text_field
from weftline.engine.serving.http.client_gone import while_connected
from weftline.engine.serving.http.context import HttpContext, caller_of
from weftline.engine.serving.http.errors import unsupported
from weftline.engine.serving.http.responses import DONE, EventStream, event, json_response, text_response
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.openai.bodies import GRANULARITIES, SpeechBody, TranscriptionBody
from weftline.engine.serving.openai.endpoints import Endpoint, StreamedText
from weftline.engine.serving.openai.ports import (
    TranscriptionPorts,
    speech_ports,
    transcription_ports,
    translation_ports,
)
from weftline.engine.serving.openai.recordings import MEDIA_TYPES, RecordingLengths, encode_recording
from weftline.engine.serving.openai.transcripts import SUBTITLES, segments_of, verbose_json

TRANSCRIPTION_FIELDS = ("model", "language", "prompt", "response_format", "temperature", "stream", "priority")


class Transcriptions(Endpoint):
    """POST /v1/audio/transcriptions."""

    task: ClassVar[str] = "transcribe"

    def __init__(self, context: HttpContext) -> None:
        super().__init__(context)
        self._lengths = RecordingLengths()

    async def create(self, request: Request) -> ASGIApp:
        form = await form_of(request)
        texts = {name: text_field(form, name) for name in TRANSCRIPTION_FIELDS}
        fields: dict[str, Any] = {name: form.getlist(name) for name in form if name not in ("file", GRANULARITIES)}
        fields |= {name: value for name, value in texts.items() if value is not None}
        body = TranscriptionBody.parse(fields | {GRANULARITIES: [str(one) for one in form.getlist(GRANULARITIES)]})
        ports = self._ports(self._info(request, body.model))
        recording = await file_field(form, "file")
        inputs, wanted = self._inputs(body, ports, recording), _timed_outputs(body, ports)
        ask = self._ask(request, body.model, inputs, wanted, body.priority)
        if body.streamed:
            return EventStream(transcript_events(ports.output, await self._text(request, ask, ports.output)))
        [outputs] = await self._outputs_of(request, [ask])
        text = outputs.get(ports.output) or ""
        if body.response_format == "text":
            return text_response(text + "\n")
        if not body.timed:
            return json_response({"text": text})
        segments = segments_of(body.model, outputs.get(ports.segments or ""))
        if body.response_format in SUBTITLES:
            return text_response(SUBTITLES[body.response_format](segments))
        header = {
            "task": self.task,
            "language": outputs.get(ports.detected or "") or body.language or "",
            "duration": await self._seconds(request, recording),
            "text": text,
        }
        return json_response(verbose_json(segments, header, body.granularities or ("segment",)))

    async def _seconds(self, request: Request, recording: bytes) -> float:
        return await while_connected(request.scope, self._lengths.seconds(recording, caller_of(request).name))

    def _ports(self, info: ModelInfo) -> TranscriptionPorts:
        return transcription_ports(info)

    def _inputs(self, body: TranscriptionBody, ports: TranscriptionPorts, recording: bytes) -> dict[str, Any]:
        """Return the inputs; HttpError when the model has no input for a field."""
        inputs: dict[str, Any] = {ports.audio: recording}
        if ports.task is not None:
            inputs[ports.task] = self.task
        for field, value, port in (("language", body.language, ports.language), ("prompt", body.prompt, ports.prompt)):
            if value is not None and port is None:
                raise unsupported(field, f"the model has no input `{field}: text`; its operator sets it, leave it out")
            if value is not None and port is not None:
                inputs[port] = value
        return inputs


class Translations(Transcriptions):
    """POST /v1/audio/translations: a transcript in English. `language` is the spoken one, beyond OpenAI's fields."""

    task = "translate"

    def _ports(self, info: ModelInfo) -> TranscriptionPorts:
        return translation_ports(info)


def _timed_outputs(body: TranscriptionBody, ports: TranscriptionPorts) -> list[str]:
    """Return the outputs of a response format; HttpError if the model lacks the one for times."""
    if not body.timed:
        return [ports.output]
    if ports.segments is None:
        why = f"{body.response_format} needs times, and the model has no output `segments: json`"
        raise unsupported("response_format", why)
    return [name for name in (ports.output, ports.segments, ports.detected) if name is not None]


async def transcript_events(output: str, text: StreamedText) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed transcription."""
    async with contextlib.aclosing(text.deltas()) as deltas:
        async for _, delta in deltas:
            yield event({"type": "transcript.text.delta", "delta": delta})
    whole = text.outputs.get(output) or ""
    if rest := whole[text.sent[output] :]:
        yield event({"type": "transcript.text.delta", "delta": rest})
    yield event({"type": "transcript.text.done", "text": whole})
    yield DONE


class Speech(Endpoint):
    """POST /v1/audio/speech."""

    async def create(self, request: Request) -> ASGIApp:
        body = SpeechBody.parse(await self._object(request))
        ports = speech_ports(self._info(request, body.model))
        inputs: dict[str, Any] = {ports.text: body.input}
        if ports.voice is not None and body.voice is not None:
            inputs[ports.voice] = body.voice
        if ports.speed is not None:
            inputs[ports.speed] = body.speed
        elif body.speed != 1:
            raise unsupported("speed", "the model has no input `speed: json`; its operator sets it, leave it out")
        ask = self._ask(request, body.model, inputs, [ports.output], body.priority)
        [outputs] = await self._outputs_of(request, [ask])
        samples = outputs.get(ports.output)
        samples = np.zeros(0, np.float32) if samples is None else samples
        content = await asyncio.to_thread(encode_recording, samples, body.response_format)
        return Response(content, media_type=MEDIA_TYPES[body.response_format])
