"""Steps of a client call, as values, and the failures of their responses. Independent of gRPC.

A failed call has a gRPC status, a message and, from the server, a retry delay (pushback). It is retried or becomes the
WeftlineError of its status.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

from weftline import errors
from weftline.errors import Unavailable, WeftlineError

SERVICE = "/inference.GRPCInferenceService/"

SHORT_MS = 10_000.0
"""Deadline of calls that run no model, in milliseconds."""

PUSHBACK, RETRY_AFTER = "grpc-retry-pushback-ms", "retry-after-ms"
"""Trailing metadata, both in ms: gRFC A6's, and its plain equivalent."""

MESSAGE_CHARS_MAX = 4000

_STEP = re.compile(r"^step ([\w.-]{1,128}): ", re.ASCII)
_TOO_LARGE = re.compile(r"(CLIENT: Received|SERVER: Sent|Received|Sent) message larger than max \((\d+) vs\. (\d+)\)")
_UNREACHABLE = re.compile(
    r"failed to connect|connections to all backends failing|DNS resolution failed|empty address list"
)
_HTTP1 = re.compile(r"http1\.x server|Failed parsing HTTP/2")
"""Of a server of HTTP/1. Where a host has several addresses, another attempt may fail at another one."""

_BY_STATUS: dict[str, type[WeftlineError]] = {
    "INVALID_ARGUMENT": errors.InputError,
    "OUT_OF_RANGE": errors.InputError,
    "NOT_FOUND": errors.UnknownModel,
    "PERMISSION_DENIED": errors.AccessDenied,
    "FAILED_PRECONDITION": errors.ModelError,
    "RESOURCE_EXHAUSTED": errors.LimitReached,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.RequestCancelled,
    "UNAVAILABLE": Unavailable,
}


# steps


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Call `method` with these bytes. timeout_s None: no limit."""

    method: str
    message: bytes
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the next step."""

    ms: float


T = TypeVar("T")
Steps = Generator[SendRequest | Pause, bytes, T]
"""Yields steps, receives the response's bytes or a Refused, and returns a result."""


# failures


@dataclass(frozen=True, slots=True)
class Refusal:
    """Status of a failed call.

    status:      gRPC status name.
    pushback_ms: retry delay requested by the server; negative: do not retry; None: not set.
    """

    status: str
    message: str
    pushback_ms: float | None = None


class Refused(Exception):
    """Raised for a failed call; `error_of` converts it to a WeftlineError."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refusal_of(status: str, message: str | None, metadata: Iterable[tuple[str, str | bytes]]) -> Refusal:
    """Return a refusal from a gRPC status and metadata; metadata that is not a number is ignored."""
    pushback = None
    for key, value in metadata:
        if key == PUSHBACK or (key == RETRY_AFTER and pushback is None):
            pushback = _ms(value)
    text = message or ""
    if status == "UNAVAILABLE" and _HTTP1.search(text):
        pushback = -1.0
    if found := _TOO_LARGE.search(text):
        side = "answer" if ":" in found[1] else "request"
        text = f"a message of {found[2]} bytes; the most is {found[3]}"
        fix = "raise limits.message_bytes_max of the server and message_bytes_max of the client, or send less"
        text, pushback = f"the {side} is {text}\n    fix: {fix}", None
    return Refusal(status, text[:MESSAGE_CHARS_MAX], pushback)


def _ms(value: str | bytes) -> float | None:
    """Return a pushback in ms; an invalid one means 'never' (gRFC A6)."""
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return float(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else -1.0


def error_of(refusal: Refusal, url: str) -> WeftlineError:
    """Return the exception for a refusal; it names `url` if the server could not be reached."""
    status, message = refusal.status, refusal.message or f"the server gave no reason ({refusal.status})"
    error: WeftlineError
    if status == "UNAUTHENTICATED":
        error = errors.AccessDenied(message, known=False)
    elif status == "INTERNAL" and (step := _STEP.match(message)):
        error = errors.StepError(message[step.end() :], step[1])
    elif status == "UNAVAILABLE" and _HTTP1.search(message):
        error = Unavailable(
            f"the server at {url} speaks HTTP/1, not gRPC\n    fix: pass its gRPC address; weftline serve prints both,"
            " and its port is 8001 by default"
        )
    elif status == "UNAVAILABLE" and _UNREACHABLE.search(message):
        error = Unavailable(
            f"cannot reach a server at {url}\n    fix: start one with `weftline serve`; check its gRPC address and tls"
        )
    elif status == "UNIMPLEMENTED":
        error = WeftlineError(f"the server at {url} does not support this: {message}")
    else:
        error = _BY_STATUS.get(status, WeftlineError)(message)
    if refusal.pushback_ms is not None and refusal.pushback_ms > 0:
        error.retry_after_s = refusal.pushback_ms / 1000
    return error
