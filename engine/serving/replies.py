"""Error mapping of all servers: from exceptions to status and message.

`told` takes any exception and gives a gRPC status name, a message and when to try again. Messages of our own errors are
kept, but scrubbed of what is nobody's business: paths, addresses, tracebacks, tokens, names of what is inside; they may
quote user code and frameworks, which do not know who reads them. An exception that nobody foresaw becomes one fixed
sentence, and the server's log gets the rest.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from weftline.engine.serving.auth.plain import scrubbed
from weftline.errors import LimitReached, WeftlineError

MESSAGE_CHARS_MAX = 1000
"""Longest message; a status travels in HTTP/2 trailers, which clients bound at 8 KiB."""

RETRY_MAX_S = 60.0
"""Longest pause a client is asked to make."""

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
"""The HTTP status of each gRPC status name. 499 is nobody's standard, and nobody is there to read it."""

_GIVEN_UP = "its worker keeps failing to start"  # the one refusal that waiting a little does not cure

_log = logging.getLogger("weftline.ingress")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What a client is told.

    status:        a gRPC status name, a key of HTTP_STATUS.
    message:       one line, at most MESSAGE_CHARS_MAX characters.
    retry_after_s: when it is worth trying again; 0 says nothing about it.
    """

    status: str
    message: str
    retry_after_s: float = 0.0

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.status]


INTERNAL = ErrorReply("INTERNAL", "internal error; the server's log has it")
NO_MEMORY = ErrorReply(
    "RESOURCE_EXHAUSTED", "the server has no memory for this now; try again later, or with less", 1.0
)
CANCELLED = ErrorReply("CANCELLED", "the request was cancelled")


def told(error: BaseException) -> ErrorReply:
    """Return what a client may be told of `error`; one that nobody foresaw is logged here with its traceback."""
    if isinstance(error, WeftlineError):
        return _told_ours(error)
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    if isinstance(error, MemoryError):
        _log.error("out of memory", exc_info=error)
        return NO_MEMORY
    _log.error("an error that nobody foresaw, told as INTERNAL", exc_info=error)
    return INTERNAL


def _told_ours(error: WeftlineError) -> ErrorReply:
    status = error.status if error.status in HTTP_STATUS and error.status != "OK" else "INTERNAL"
    text = str(error)
    if isinstance(error, LimitReached) and _GIVEN_UP in text:
        status = "UNAVAILABLE"
    message = scrubbed(text, MESSAGE_CHARS_MAX) or type(error).__name__
    wait_s = error.retry_after_s
    return ErrorReply(status, message, min(wait_s, RETRY_MAX_S) if wait_s > 0 else 0.0)  # NaN is not > 0
