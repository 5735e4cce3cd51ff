"""Route table of the HTTP server and the ASGI application.

The gate's table (`auth/methods.py`) has the same paths with their rights; a test compares the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weftline.engine.serving import identity
from weftline.engine.serving.anthropic.endpoints import CountTokens, Messages
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.config import LOOPBACK
from weftline.engine.serving.deployments import deployments_of
from weftline.engine.serving.http import rest_v2
from weftline.engine.serving.http.context import HttpContext, caller_of
from weftline.engine.serving.http.docs_page import docs_response
from weftline.engine.serving.http.middleware import HttpGuard
from weftline.engine.serving.http.openapi import document
from weftline.engine.serving.http.responses import json_response, text_response
from weftline.engine.serving.http.rest_v2 import HttpSharedMemory, Infer
from weftline.engine.serving.http.route_table import Endpoint, Route, RouteTable
from weftline.engine.serving.http.run import Run
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.openai.audio_endpoints import Speech, Transcriptions, Translations
from weftline.engine.serving.openai.endpoints import (
    Chat,
    Completions,
    Embeddings,
    OpenAiModels,
    Rerank,
    Score,
    Tokenize,
)
from weftline.engine.serving.openai.responses_api.endpoint import Responses

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def application(context: HttpContext, gate: Gate, host: str = LOOPBACK, origins: Sequence[str] = ()) -> HttpGuard:
    """Return the ASGI application."""
    return HttpGuard(RouteTable(routes(context)), context=context, gate=gate, host=host, origins=origins)


def routes(context: HttpContext) -> list[Route]:
    """Return all routes."""
    return [
        _post("/run/{model}", Run(context).run),
        *_openai(context),
        *_v2(context),
        *_v2_memory(context),
        *_probes(context),
    ]


def _openai(context: HttpContext) -> list[Route]:
    models, responses = OpenAiModels(context), Responses(context)
    return [
        _post("/v1/chat/completions", Chat(context).create),
        _post("/v1/responses", responses.create),
        _get("/v1/responses/{response}", responses.get),
        _delete("/v1/responses/{response}", responses.delete),
        _get("/v1/responses/{response}/input_items", responses.input_items),
        _post("/v1/responses/{response}/cancel", responses.cancel),
        _post("/v1/completions", Completions(context).create),
        _post("/v1/messages", Messages(context).create),
        _post("/v1/messages/count_tokens", CountTokens(context).create),
        _post("/v1/embeddings", Embeddings(context).create),
        *(_post(path, Rerank(context).create) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        *(_post(path, Score(context).create) for path in ("/score", "/v1/score")),
        _post("/v1/audio/speech", Speech(context).create),
        _post("/v1/audio/transcriptions", Transcriptions(context).create),
        _post("/v1/audio/translations", Translations(context).create),
        _post("/tokenize", Tokenize(context).tokenize),
        _post("/detokenize", Tokenize(context).detokenize),
        _get("/v1/models", models.list),
        _get("/v1/models/{model:path}", models.get),
    ]


def _v2(context: HttpContext) -> list[Route]:
    server, models, infer = rest_v2.RestServer(context), rest_v2.RestModels(context), Infer(context)
    run = Run(context)
    found = [
        _get("/v2", server.metadata),
        _get("/v2/health/live", server.live),
        _get("/v2/health/ready", server.ready),
        _get("/v2/models/stats", models.stats),
        _post("/v2/repository/index", server.index),
        _post("/v2/repository/models/{model}/load", server.load),
        _post("/v2/repository/models/{model}/unload", server.unload),
        _both("/v2/trace/setting", server.trace),
        _both("/v2/models/{model}/trace/setting", server.trace),
        _both("/v2/logging", server.logging),
    ]
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [
            _get(model, models.metadata),
            _get(f"{model}/ready", models.ready),
            _get(f"{model}/config", models.config),
            _get(f"{model}/stats", models.stats),
            _post(f"{model}/infer", infer.infer),
            _post(f"{model}/generate", run.generate),
            _post(f"{model}/generate_stream", run.generate_stream),
        ]
    return found


def _v2_memory(context: HttpContext) -> list[Route]:
    memory = HttpSharedMemory(context)
    found = []
    for path, status, register, unregister in (
        ("/v2/systemsharedmemory", memory.status, memory.register, memory.unregister),
        ("/v2/cudasharedmemory", memory.cuda_status, memory.cuda_register, memory.cuda_unregister),
    ):
        found += [
            _get(f"{path}/status", status),
            _get(f"{path}/region/{{region}}/status", status),
            _post(f"{path}/region/{{region}}/register", register),
            _post(f"{path}/region/{{region}}/unregister", unregister),
            _post(f"{path}/unregister", unregister),
        ]
    return found


def _probes(context: HttpContext) -> list[Route]:
    probes = Probes(context)

    async def openapi(request: Request) -> ASGIApp:
        return json_response(document(_described(context, request)))

    async def docs(request: Request) -> ASGIApp:
        origin = f"{request.url.scheme}://{request.headers.get('host', 'localhost')}"
        return docs_response(_described(context, request), origin)

    async def deployments(request: Request) -> ASGIApp:
        return json_response(deployments_of(context.backend, caller_of(request).may_use_model))

    async def version(request: Request) -> ASGIApp:
        return json_response({"version": identity.version()})

    return [
        _get("/livez", probes.live),
        _get("/readyz", probes.ready),
        _get("/healthz", probes.live),
        _get("/health", probes.ready),
        _get("/metrics", probes.metrics),
        _get("/openapi.json", openapi),
        _get("/docs", docs),
        _get("/version", version),
        _get("/deployments", deployments),
        _both("/ping", probes.live),
    ]


def _described(context: HttpContext, request: Request) -> list[ModelInfo]:
    """Return the models that are ready and the caller may use."""
    caller, backend = caller_of(request), context.backend
    return [backend.info(one.name) for one in backend.index() if one.ready and caller.may_use_model(one.name)]


class Probes:
    """Health and metrics routes. A draining server is live and not ready."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._rendering: asyncio.Future[bytes] | None = None

    async def live(self, request: Request) -> ASGIApp:
        return text_response("live\n")

    async def ready(self, request: Request) -> ASGIApp:
        """Report readiness, and the names of models that are not ready without their reasons."""
        missing = [
            one.name
            for one in self._context.backend.index()
            if not one.ready and caller_of(request).may_use_model(one.name)
        ]
        ready = self._context.ready()
        return json_response({"ready": ready, "not_ready": missing}, 200 if ready else 503)

    async def metrics(self, request: Request) -> ASGIApp:
        """Return all figures; concurrent requests share the text, however slowly they read it."""
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.ensure_future(self._context.backend.metrics())
        return Response(await asyncio.shield(self._rendering), media_type=METRICS_TYPE)


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, frozenset({"GET"}))


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, frozenset({"POST"}))


def _delete(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, frozenset({"DELETE"}))


def _both(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, frozenset({"GET", "POST"}))
