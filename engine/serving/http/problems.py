"""Conversion of errors to HTTP responses in the format of the API called."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from starlette.responses import Response

from weftline.engine.serving.http.refusal import HttpError
from weftline.engine.serving.openai.fields import OF_SAMPLING
from weftline.engine.serving.replies import HTTP_STATUS, ErrorReply, told
from weftline.errors import UnknownModel

JSON = "application/json"
WORTH_RETRYING = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_SAMPLING = re.compile(r"\bsampling\.([a-z_]+)")


def problem_response(error: BaseException, path: str) -> Response:
    """Return the answer for an error; under /v1 in OpenAI's shape, else in v2's."""
    reply = told(error)
    code = code_of(error, reply.status)
    body = _openai(error, reply, code) if path.startswith("/v1") else {"error": reply.message}
    headers = {"x-should-retry": "true" if reply.status in WORTH_RETRYING and code != 413 else "false"}
    if reply.retry_after_s > 0:
        headers["retry-after"] = str(math.ceil(reply.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(reply.retry_after_s * 1e3))
    if code == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, HttpError) and error.close:
        headers["connection"] = "close"
    return Response(msgspec.json.encode(body), code, headers, JSON)


def code_of(error: BaseException, status: str) -> int:
    """Return the HTTP status for an error with that gRPC status name."""
    return error.code if isinstance(error, HttpError) else HTTP_STATUS.get(status, 500)


def openai_problem(error: BaseException) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it: {"error": {message, type, param, code}}."""
    reply = told(error)
    return _openai(error, reply, code_of(error, reply.status))


def _openai(error: BaseException, reply: ErrorReply, code: int) -> dict[str, Any]:
    kind = _TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")
    named = "model_not_found" if isinstance(error, UnknownModel) else _CODES.get(code)
    param = "model" if isinstance(error, UnknownModel) else _param_of(error, reply.message)
    return {"error": {"message": reply.message, "type": kind, "param": param, "code": named}}


def _param_of(error: BaseException, message: str) -> str | None:
    if isinstance(error, HttpError):
        return error.param
    found = _SAMPLING.search(message)
    return OF_SAMPLING.get(found[1], found[1]) if found else None
