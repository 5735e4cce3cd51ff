"""Serve /livez, /readyz and /metrics, for process supervisors and monitoring.

Two more names for probes that are written already: /healthz is /livez, /health is /readyz.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.serving.http.door import HttpContext, caller_of
from weftline.engine.serving.http.replying import json_response, text_response

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Probes:
    """The paths. A server that drains lives, and is not ready."""

    def __init__(self, door: HttpContext) -> None:
        self._door = door

    async def live(self, request: Request) -> ASGIApp:
        return text_response("live\n")

    async def ready(self, request: Request) -> ASGIApp:
        """Whether every model is ready and new work is taken; which are not, by name and without the reason."""
        missing = [one.name for one in self._door.backend.index() if not one.ready and caller_of(request).may(one.name)]
        ready = self._door.ready()
        return json_response({"ready": ready, "not_ready": missing}, 200 if ready else 503)

    async def metrics(self, request: Request) -> ASGIApp:
        return Response(await self._door.backend.metrics(), media_type=METRICS_TYPE)
