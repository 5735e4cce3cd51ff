"""POST /v1/embeddings."""

from __future__ import annotations

import base64

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.serving.http.body import json_object_of
from weftline.engine.serving.http.connection import while_connected
from weftline.engine.serving.http.context import HttpContext, ask_for, caller_of
from weftline.engine.serving.http.responses import json_response
from weftline.engine.serving.lifecycle import gather_or_cancel
from weftline.engine.serving.openai.bodies import EmbeddingBody
from weftline.engine.serving.openai.ports import embedding_ports
from weftline.engine.serving.openai.responses import Usage, usage_of


class Embeddings:
    """The path."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> ASGIApp:
        fields = await json_object_of(request, self._context.limits.message_bytes_max, json=self._context.json)
        body = EmbeddingBody.parse(fields, texts_max=self._context.limits.batch_max)
        ports = embedding_ports(self._context.info(request, body.model))
        fixed = {ports.tenant: caller_of(request).name} if ports.tenant and caller_of(request).name else {}
        wanted = [name for name in (ports.output, ports.usage) if name]
        asks = [ask_for(request, body.model, {ports.prompt: one} | fixed, wanted, body.priority) for one in body.input]
        answers = await while_connected(
            request.receive, gather_or_cancel([self._context.outputs(request, one) for one in asks])
        )
        usage = Usage()
        for outputs in answers:
            usage += usage_of(outputs.get(ports.usage or ""))
        as_text = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": place,
                "embedding": _encoded(outputs[ports.output], as_text),
            }
            for place, outputs in enumerate(answers)
        ]
        counted = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        return json_response({"object": "list", "data": data, "model": body.model, "usage": counted})


def _encoded(vector: np.ndarray | None, as_text: bool) -> list[float] | str | None:
    """float32, little-endian, in base64; or a list of numbers. None for an output that is absent."""
    if vector is None:
        return None
    if as_text:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.astype(np.float32).tolist()
    return numbers
