"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.serving.http.attended import while_connected
from weftline.engine.serving.http.body import json_object_of
from weftline.engine.serving.http.door import HttpContext, ask_for, caller_of
from weftline.engine.serving.http.mapping import embedding_ports
from weftline.engine.serving.http.refusal import HttpError, unsupported
from weftline.engine.serving.http.replying import json_response
from weftline.engine.serving.http.together import gathered
from weftline.engine.serving.openai.answer import Usage, usage_of
from weftline.engine.serving.openai.fields import model_of
from weftline.engine.serving.openai.texts import texts_of


class Embeddings:
    """The path."""

    def __init__(self, door: HttpContext) -> None:
        self._door = door

    async def create(self, request: Request) -> ASGIApp:
        body = await json_object_of(request, self._door.limits.message_bytes_max, json=self._door.json)
        model = model_of(body)
        ports = embedding_ports(self._door.face(request, model))
        as_text = _as_base64(body)
        texts = texts_of(body.get("input"), "input", self._door.limits.batch_max)
        if body.get("dimensions") is not None:
            raise unsupported("dimensions", "a model gives vectors of one length; leave it out")
        fixed = {ports.tenant: caller_of(request).name} if ports.tenant and caller_of(request).name else {}
        wanted = [name for name in (ports.output, ports.usage) if name]
        asks = [ask_for(request, model, {ports.prompt: one} | fixed, wanted, body) for one in texts]
        answers = await while_connected(request.receive, gathered([self._door.outputs(request, one) for one in asks]))
        usage = Usage()
        for outputs in answers:
            usage += usage_of(outputs.get(ports.usage or ""))
        data = [
            {"object": "embedding", "index": place, "embedding": _told(outputs[ports.output], as_text)}
            for place, outputs in enumerate(answers)
        ]
        counted = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        return json_response({"object": "list", "data": data, "model": model, "usage": counted})


def _as_base64(body: Mapping[str, Any]) -> bool:
    format = body.get("encoding_format")
    if format not in (None, "float", "base64"):
        raise HttpError("encoding_format: expected float or base64", param="encoding_format")
    return format == "base64"


def _told(vector: np.ndarray | None, as_text: bool) -> list[float] | str | None:
    """float32, little-endian, in base64; or a list of numbers. None for an output that is absent."""
    if vector is None:
        return None
    if as_text:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.astype(np.float32).tolist()
    return numbers
