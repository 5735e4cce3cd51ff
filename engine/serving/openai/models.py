"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.serving.http.door import HttpContext, caller_of
from weftline.engine.serving.http.replying import json_response


class OpenAiModels:
    """Both paths. created: when the door opened; models have no date of their own here."""

    def __init__(self, door: HttpContext) -> None:
        self._door = door
        self._created = int(door.now_s())

    async def list(self, request: Request) -> ASGIApp:
        caller = caller_of(request)
        ready = [one.name for one in self._door.backend.index() if one.ready and caller.may(one.name)]
        return json_response({"object": "list", "data": [self._model(name) for name in ready]})

    async def get(self, request: Request) -> ASGIApp:
        return json_response(self._model(self._door.face(request, request.path_params["model"]).name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "weftline"}
