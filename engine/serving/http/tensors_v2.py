"""POST /v2/models/{model}/infer."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.serving.backend import Answer, Ask
from weftline.engine.serving.face import ModelFace
from weftline.engine.serving.http.attended import while_connected
from weftline.engine.serving.http.binary_tensors import HEADER, BinaryOutputs, response_body
from weftline.engine.serving.http.body import body_of
from weftline.engine.serving.http.door import ID_CHARS_MAX, SPAN, HttpContext, caller_of, deadline_ms_of
from weftline.engine.serving.http.problems import JSON
from weftline.engine.serving.http.together import gathered
from weftline.engine.serving.v2.messages import InferRequest, check_name, check_version
from weftline.engine.serving.v2.request import ParsedRequest, to_asks
from weftline.engine.serving.v2.response import to_response


class Infer:
    """Both paths, with a version and without."""

    def __init__(self, door: HttpContext) -> None:
        self._door = door

    async def infer(self, request: Request) -> ASGIApp:
        limits = self._door.limits
        model = check_name(request.path_params["model"])
        version = check_version(request.path_params.get("version", ""))
        face = self._door.face(request, model, version)
        body = await body_of(request, limits.message_bytes_max)
        json, regions = self._door.json, self._door.shared_memory if self._door.shared_memory.enabled else None
        asking, wanted = await json.rest_body(body, request.headers.get(HEADER), model, version, limits)
        caller_of(request).check_regions(asking)
        asked = to_asks(
            await json.elements(asking, face, limits, regions),
            face,
            limits,
            regions,
            deadline_ms=deadline_ms_of(request),
            caller=caller_of(request).name,
            door="http",
            traceparent=request.headers.get("traceparent", "")[:ID_CHARS_MAX],
            size_bytes=len(body),
        )
        return await while_connected(request.receive, self._answered(request, asking, asked, face, wanted))

    async def _answered(
        self, request: Request, asking: InferRequest, asked: ParsedRequest, face: ModelFace, wanted: BinaryOutputs
    ) -> Response:
        with ExitStack() as lent:
            answers = await gathered([self._ask(one, lent) for one in asked.asks])
            response = to_response(asking, face, answers, asked.batch, self._door.shared_memory)
            body, length = response_body(response, wanted)
        request.scope[SPAN] = answers[0].traceparent
        headers = {} if length is None else {HEADER: str(length)}
        return Response(body, 200, headers, JSON if length is None else "application/octet-stream")

    async def _ask(self, ask: Ask, lent: ExitStack) -> Answer:
        """The answer is noted for its release here, so that none is lost when another of the batch fails."""
        answer = await self._door.backend.ask(ask)
        lent.callback(answer.release)
        if self._door.trace.active:
            self._door.trace.note(ask, answer.timings, answer.total_ms)
        return answer
