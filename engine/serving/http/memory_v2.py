"""Shared-memory routes of v2 REST: system regions; CUDA regions are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from weftline.engine.serving.http.body import json_object_of
from weftline.engine.serving.http.door import HttpContext
from weftline.engine.serving.http.refusal import HttpError
from weftline.engine.serving.http.replying import json_response

BODY_BYTES_MAX = 64 << 10


class HttpSharedMemory:
    """The paths under /v2/systemsharedmemory and /v2/cudasharedmemory."""

    def __init__(self, door: HttpContext) -> None:
        self._door = door

    async def status(self, request: Request) -> ASGIApp:
        regions = self._door.shared_memory.status(request.path_params.get("region", ""))
        return json_response(
            [{"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.size_bytes} for one in regions]
        )

    async def register(self, request: Request) -> ASGIApp:
        body = await json_object_of(request, BODY_BYTES_MAX)
        key = body.get("key")
        if not isinstance(key, str):
            raise HttpError("key: expected a text, the name of a shared-memory object", param="key")
        self._door.shared_memory.register(
            request.path_params["region"], key, _whole(body, "offset", 0), _whole(body, "byte_size", None)
        )
        return json_response({})

    async def unregister(self, request: Request) -> ASGIApp:
        region = request.path_params.get("region")
        if region is None:
            self._door.shared_memory.unregister_all()
        else:
            self._door.shared_memory.unregister(region)
        return json_response({})

    async def cuda_status(self, request: Request) -> ASGIApp:
        return json_response([])

    async def cuda_register(self, request: Request) -> ASGIApp:
        raise HttpError("this server shares no CUDA memory; use system shared memory, or send the tensor itself")

    async def cuda_unregister(self, request: Request) -> ASGIApp:
        return json_response({})  # there is none, so none is left


def _whole(body: Mapping[str, Any], key: str, default: int | None) -> int:
    value = body.get(key, default)
    if type(value) is not int:
        raise HttpError(f"{key}: expected a whole number of bytes", param=key)
    return value
