"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.serving.http.context import HttpContext, caller_of
from weftline.engine.serving.http.responses import json_response


class OpenAiModels:
    """Both routes. `created` is the start of the server: models have no date of their own."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._created = int(context.now_s())

    async def list(self, request: Request) -> ASGIApp:
        caller = caller_of(request)
        ready = [one.name for one in self._context.backend.index() if one.ready and caller.may(one.name)]
        return json_response({"object": "list", "data": [self._model(name) for name in ready]})

    async def get(self, request: Request) -> ASGIApp:
        return json_response(self._model(self._context.info(request, request.path_params["model"]).name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "weftline"}
