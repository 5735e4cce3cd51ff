"""Errors in Anthropic's form. Pure."""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    """Return True for a path whose errors have Anthropic's form."""
    return path == PATH or path.startswith(f"{PATH}/")


def problem(message: str, code: int, request_id: str) -> dict[str, Any]:
    """Return the body of an error. code: its HTTP status."""
    server_fault = code >= 500 or code == 409  # 409: the model cannot be opened
    kind = _TYPES.get(code, "api_error" if server_fault else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
