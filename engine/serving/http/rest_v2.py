"""v2 REST routes: server, models, inference, load, unload, settings and shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.serving.backend import Answer
from weftline.engine.serving.http.binary_tensors import HEADER, BinaryOutputs
from weftline.engine.serving.http.body import body_of, json_object_of
from weftline.engine.serving.http.client_gone import while_connected
from weftline.engine.serving.http.context import ID_CHARS_MAX, SPAN, HttpContext, caller_of, deadline_ms_of, room_of
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.http.responses import JSON, json_response
from weftline.engine.serving.http.run import Run
from weftline.engine.serving.identity import NAME, version
from weftline.engine.serving.lifecycle import gather_or_cancel
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.replies import to_status
from weftline.engine.serving.statistics import ModelFigures, Spent
from weftline.engine.serving.v2.messages import InferRequest, check_name, check_version
from weftline.engine.serving.v2.metadata import config_of, metadata_of
from weftline.engine.serving.v2.request import ParsedRequest, to_asks
from weftline.engine.serving.v2.response import to_response
from weftline.errors import ModelError, UnknownModel

EXTENSIONS = (
    "binary_tensor_data",
    "parameters",
    "classification",
    "sequence",
    "model_configuration",
    "model_repository",
    "statistics",
    "system_shared_memory",
    "trace",
    "logging",
)
SETTINGS_BYTES_MAX = 64 << 10


class RestServer:
    """/v2, /v2/health/*, /v2/repository/*, /v2/trace/setting, /v2/logging."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def metadata(self, request: Request) -> ASGIApp:
        off = () if self._context.shared_memory.enabled else ("system_shared_memory",)
        extensions = [one for one in EXTENSIONS if one not in off]
        return json_response({"name": NAME, "version": version(), "extensions": extensions})

    async def live(self, request: Request) -> ASGIApp:
        return json_response({"live": True})

    async def ready(self, request: Request) -> ASGIApp:
        ready = self._context.ready()
        return json_response({"ready": ready}, 200 if ready else 503)

    async def index(self, request: Request) -> ASGIApp:
        body = await json_object_of(request, SETTINGS_BYTES_MAX, empty=True)
        caller, only_ready = caller_of(request), body.get("ready", False)
        if not isinstance(only_ready, bool):
            raise HttpError("ready: expected true or false")
        return json_response(
            [
                {
                    "name": one.name,
                    "version": str(one.version) if one.version else "",
                    "state": one.state.upper(),
                    "reason": to_status(ModelError(one.why)).message if caller.admin and one.why else "",
                }
                for one in self._context.backend.index()
                if caller.may_use_model(one.name) and (one.ready or not only_ready)
            ]
        )

    async def load(self, request: Request) -> ASGIApp:
        _check_no_files(await json_object_of(request, SETTINGS_BYTES_MAX, empty=True))
        await self._context.backend.load(check_name(request.path_params["model"]))
        return json_response({})

    async def unload(self, request: Request) -> ASGIApp:
        await json_object_of(request, SETTINGS_BYTES_MAX, empty=True)
        await self._context.backend.unload(check_name(request.path_params["model"]))
        return json_response({})

    async def trace(self, request: Request) -> ASGIApp:
        model = request.path_params.get("model", "")
        if model:
            self._context.authorised_info(request, check_name(model))
        if request.method == "POST":
            body = await json_object_of(request, SETTINGS_BYTES_MAX, empty=True)
            self._context.trace.set({name: _texts(name, value) for name, value in body.items()}, model)
        now = self._context.trace.get(model)
        return json_response({name: list(found) if name == "trace_level" else found[0] for name, found in now.items()})

    async def logging(self, request: Request) -> ASGIApp:
        if request.method == "POST":
            body = await json_object_of(request, SETTINGS_BYTES_MAX, empty=True)
            for name, value in body.items():
                if not isinstance(value, bool | int | str):
                    raise HttpError(f"{name!r:.80}: expected true, false, a whole number or a text")
            self._context.logs.set(body)
        return json_response(self._context.logs.get())


class RestModels:
    """/v2/models/*: metadata, readiness, configuration and statistics of models."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def metadata(self, request: Request) -> ASGIApp:
        name, version = _named(request)
        return json_response(dataclasses.asdict(metadata_of(self._context.authorised_info(request, name, version))))

    async def ready(self, request: Request) -> ASGIApp:
        name, version = _named(request)
        caller_of(request).check(name)
        found = next((one for one in self._context.backend.index() if one.name == name), None)
        if found is None or version not in ("", str(found.version)):
            raise UnknownModel("no model has that name and version")
        ready = found.ready and self._context.serving.on
        return json_response({"name": name, "ready": ready}, 200 if ready else 503)

    async def config(self, request: Request) -> ASGIApp:
        name, version = _named(request)
        return json_response(
            config_of(self._context.authorised_info(request, name, version), self._context.limits.batch_max)
        )

    async def stats(self, request: Request) -> ASGIApp:
        """Return the statistics of one model, or of all models of the caller with their steps."""
        name, version = _named(request) if "model" in request.path_params else ("", "")
        if name:
            info = self._context.authorised_info(request, name, version)
            versions = {name: info.version}
        else:
            caller = caller_of(request)
            serving = {one.name: one.version for one in self._context.backend.index() if one.ready}
            versions = {name: one for name, one in serving.items() if caller.may_use_model(name)}
        figures = await self._context.figures(versions)
        return json_response({"model_stats": [_figures(one) for one in figures if name in ("", one.name)]})


class Infer:
    """POST /v2/models/{model}/infer, with and without a version. Plain requests get plain answers (`run.py`)."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._run = Run(context)

    async def infer(self, request: Request) -> ASGIApp:
        limits = self._context.limits
        model = check_name(request.path_params["model"])
        version = check_version(request.path_params.get("version", ""))
        info = self._context.authorised_info(request, model, version)
        if HEADER not in request.headers and (plain := await self._run.form_or_value(request, info)) is not None:
            return await self._run.answer(request, info, plain, version)
        body = await body_of(request, limits.message_bytes_max)
        caller = caller_of(request).name
        json, regions = self._context.json, self._context.shared_memory if self._context.shared_memory.enabled else None
        asking, wanted = await json.rest_body(
            body, request.headers.get(HEADER), model, version, limits, caller, info.inputs
        )
        if wanted.plain:
            return await self._run.answer(request, info, asking, version)
        caller_of(request).check_regions(asking)
        asked = to_asks(
            await json.elements(asking, info, limits, regions, caller),
            info,
            limits,
            regions,
            deadline_ms=deadline_ms_of(request),
            caller=caller,
            protocol="http",
            traceparent=request.headers.get("traceparent", "")[:ID_CHARS_MAX],
            size_bytes=len(body),
        )
        caller_of(request).spend(asked.cost(info) - 1)
        return await while_connected(request.scope, self._answered(request, asking, asked, info, wanted))

    async def _answered(
        self, request: Request, asking: InferRequest, asked: ParsedRequest, info: ModelInfo, wanted: BinaryOutputs
    ) -> Response:
        answers = await gather_or_cancel([self._context.backend.ask(one) for one in asked.asks], Answer.release)
        try:
            await room_of(request).take(sum(answer.size_bytes for answer in answers))
            await gather_or_cancel([answer.load() for answer in answers])
            for answer in answers:
                await self._context.json.write(answer, info, caller_of(request).name)
            if self._context.trace.active:
                for one, answer in zip(asked.asks, answers, strict=True):
                    self._context.trace.note(one, answer.timings, answer.total_ms)
            response = to_response(asking, info, answers, asked.batch, self._context.shared_memory)
            body, length = await self._context.json.rest_response(response, wanted, caller_of(request).name)
        finally:
            for answer in answers:
                answer.release()
        request.scope[SPAN] = answers[0].traceparent
        headers = {} if length is None else {HEADER: str(length)}
        return Response(body, 200, headers, JSON if length is None else "application/octet-stream")


class HttpSharedMemory:
    """The paths under /v2/systemsharedmemory and /v2/cudasharedmemory."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def status(self, request: Request) -> ASGIApp:
        regions = self._context.shared_memory.status(request.path_params.get("region", ""))
        return json_response(
            [{"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.size_bytes} for one in regions]
        )

    async def register(self, request: Request) -> ASGIApp:
        body = await json_object_of(request, SETTINGS_BYTES_MAX)
        key = body.get("key")
        if not isinstance(key, str):
            raise HttpError("key: expected a text, the name of a shared-memory object", param="key")
        self._context.shared_memory.register(
            request.path_params["region"], key, _whole(body, "offset", 0), _whole(body, "byte_size", None)
        )
        return json_response({})

    async def unregister(self, request: Request) -> ASGIApp:
        region = request.path_params.get("region")
        if region is None:
            self._context.shared_memory.unregister_all()
        else:
            self._context.shared_memory.unregister(region)
        return json_response({})

    async def cuda_status(self, request: Request) -> ASGIApp:
        return json_response([])

    async def cuda_register(self, request: Request) -> ASGIApp:
        raise HttpError("this server shares no CUDA memory; use system shared memory, or send the tensor itself")

    async def cuda_unregister(self, request: Request) -> ASGIApp:
        return json_response({})  # no region exists


def _named(request: Request) -> tuple[str, str]:
    return check_name(request.path_params["model"]), check_version(request.path_params.get("version", ""))


def _check_no_files(body: Mapping[str, Any]) -> None:
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, dict) or parameters:
        raise HttpError("parameters: a model is loaded as its operator configured it; send none")


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Return a trace setting as a tuple of texts; () for null, which resets it."""
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) or type(one) is int for one in values):
        raise HttpError(f"{name!r:.80}: expected a text, a whole number or a list of them")
    return tuple(str(one) for one in values)


def _figures(one: ModelFigures) -> dict[str, Any]:
    nothing, copied = _spent(Spent()), _spent(Spent(one.success.count, 0))  # copies are part of queue and compute_infer
    return {
        "name": one.name,
        "version": str(one.version),
        "last_inference": one.last_ms,
        "inference_count": one.inferences,
        "execution_count": one.executions,
        "inference_stats": {
            "success": _spent(one.success),
            "fail": _spent(one.fail),
            "queue": _spent(one.queue),
            "compute_input": copied,
            "compute_infer": _spent(one.compute_infer),
            "compute_output": copied,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [
            {
                "batch_size": batch.size,
                "compute_input": _spent(Spent(batch.calls.count, 0)),
                "compute_infer": _spent(batch.calls),
                "compute_output": _spent(Spent(batch.calls.count, 0)),
            }
            for batch in one.batches
        ],
        "memory_usage": [],
    }


def _spent(one: Spent) -> dict[str, int]:
    return {"count": one.count, "ns": one.ns}


def _whole(body: Mapping[str, Any], key: str, default: int | None) -> int:
    value = body.get(key, default)
    if type(value) is not int:
        raise HttpError(f"{key}: expected a whole number of bytes", param=key)
    return value
