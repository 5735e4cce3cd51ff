"""JSON and plain-text responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from weftline.engine.serving.http.problems import JSON


def json_response(value: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer of JSON. Numbers that JSON cannot tell (NaN, infinities) become null."""
    return Response(msgspec.json.encode(value), code, headers, JSON)


def text_response(text: str, code: int = 200) -> Response:
    return Response(text, code, media_type="text/plain; charset=utf-8")
