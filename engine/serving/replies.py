"""Error mapping of all servers: from exceptions to status and message.

`to_status` converts any exception to a gRPC status name, a message and a retry time. Messages of Weftline's errors are
kept without paths, addresses, tracebacks, tokens and internal names, since they may quote user code and frameworks. An
unexpected exception becomes one fixed sentence, and the server's log has the rest.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from dataclasses import dataclass

from weftline.engine.serving.auth.plain import scrubbed
from weftline.errors import InputError, WeftlineError

MESSAGE_CHARS_MAX = 1000
"""Longest message; a status travels in HTTP/2 trailers, which clients bound at 8 KiB."""

PARAM_CHARS_MAX = 80

RETRY_MAX_S = 60.0
"""Longest retry time in a reply."""

HTTP_STATUS: dict[str, int] = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "DATA_LOSS": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""The HTTP status of each gRPC status name. 499 is not standard: the client has disconnected."""

_log = logging.getLogger("weftline.ingress")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Error as sent to a client.

    status:        a gRPC status name, a key of HTTP_STATUS.
    message:       one line, at most MESSAGE_CHARS_MAX characters.
    retry_after_s: earliest useful retry; 0: unknown.
    param:         option or field at fault; '' for none.
    """

    status: str
    message: str
    retry_after_s: float = 0.0
    param: str = ""

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.status]


INTERNAL = ErrorReply("INTERNAL", "internal error; the server's log has it")
NO_MEMORY = ErrorReply(
    "RESOURCE_EXHAUSTED", "the server has no memory for this now; try again later, or with less", 1.0
)
CANCELLED = ErrorReply("CANCELLED", "the request was cancelled")


def to_status(error: BaseException) -> ErrorReply:
    """Convert an exception to a reply; an unexpected one is logged with its traceback."""
    if isinstance(error, WeftlineError):
        return _of_weftline_error(error)
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    if isinstance(error, MemoryError):
        _log.error("out of memory", exc_info=error)
        return NO_MEMORY
    _log.error("an unexpected error, answered as INTERNAL", exc_info=error)
    return INTERNAL


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of an answered error's frames.

    They refer to the request, often in a cycle with the error that only garbage collection would end: megabytes of
    inputs stayed in memory until then.
    """
    seen = set[int]()
    next_one: BaseException | None = error
    while next_one is not None and id(next_one) not in seen:
        seen.add(id(next_one))
        traceback.clear_frames(next_one.__traceback__)
        next_one = next_one.__cause__ or next_one.__context__


def _of_weftline_error(error: WeftlineError) -> ErrorReply:
    status = error.status if error.status in HTTP_STATUS and error.status != "OK" else "INTERNAL"
    message = scrubbed(str(error), MESSAGE_CHARS_MAX) or type(error).__name__
    wait_s = error.retry_after_s
    retry_after_s = min(wait_s, RETRY_MAX_S) if wait_s > 0 else 0.0  # NaN is not > 0
    param = scrubbed(error.param, PARAM_CHARS_MAX) if isinstance(error, InputError) else ""
    return ErrorReply(status, message, retry_after_s, param)
