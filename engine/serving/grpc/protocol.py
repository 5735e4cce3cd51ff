"""gRPC's protocol over HTTP/2 as functions of bytes (github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md): no call, no time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote_from_bytes

from weftline.engine.serving.grpc.guard import UnknownMethod
from weftline.engine.serving.grpc.nghttp2 import Field
from weftline.engine.serving.grpc.service import pushback
from weftline.engine.serving.replies import to_status
from weftline.errors import LimitReached, WeftlineError

JOIN_BYTES_MAX = 64 << 10
"""Frames of up to this total are joined into one write, and a message of up to this size with its prefix."""

CODES: Mapping[str, bytes] = {
    "OK": b"0", "CANCELLED": b"1", "UNKNOWN": b"2", "INVALID_ARGUMENT": b"3", "DEADLINE_EXCEEDED": b"4",
    "NOT_FOUND": b"5", "ALREADY_EXISTS": b"6", "PERMISSION_DENIED": b"7", "RESOURCE_EXHAUSTED": b"8",
    "FAILED_PRECONDITION": b"9", "ABORTED": b"10", "OUT_OF_RANGE": b"11", "UNIMPLEMENTED": b"12", "INTERNAL": b"13",
    "UNAVAILABLE": b"14", "DATA_LOSS": b"15", "UNAUTHENTICATED": b"16",
}  # fmt: skip
"""gRPC's status codes by name."""

HEAD: Sequence[Field] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
"""Header fields of a response."""

_CONTENT_TYPE = re.compile(rb"application/grpc([+;].*)?", re.IGNORECASE)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_TIMEOUT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class Malformed(WeftlineError):
    """A call that does not follow gRPC's protocol."""

    status = "INTERNAL"


class Unsupported(WeftlineError):
    """A call that uses a part of gRPC's protocol that this server does not have."""

    status = "UNIMPLEMENTED"


def is_grpc(content_type: bytes) -> bool:
    """Return whether a content type is one of gRPC's."""
    return content_type == b"application/grpc" or _CONTENT_TYPE.fullmatch(content_type) is not None


def parse_timeout(value: bytes) -> float:
    """Return a `grpc-timeout` in seconds; Malformed if it is not one."""
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise Malformed("grpc-timeout: expected 1 to 8 digits and one of H M S m u n")
    return int(found[1]) * _TIMEOUT_S[found[2]]


def status_trailers(error: BaseException) -> list[Field]:
    """Return the trailers of a failed call."""
    if isinstance(error, UnknownMethod):
        return [(b"grpc-status", CODES["UNIMPLEMENTED"]), (b"grpc-message", b"there is no such method here")]
    status = to_status(error)
    message = quote_from_bytes(status.message.encode(), safe=_PLAIN).encode()
    return [
        (b"grpc-status", CODES[status.status]),
        (b"grpc-message", message),
        *((name.encode(), value.encode()) for name, value in pushback(status.retry_after_s).items()),
        *([(b"grpc-accept-encoding", b"identity")] if status.status == "UNIMPLEMENTED" else []),
    ]


_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""Characters of grpc-message that are not percent-encoded."""


def too_large(kind: str, size: int, bytes_max: int) -> LimitReached:
    """Return the error of a message over the limit. kind: 'request' or 'response'."""
    return LimitReached(f"the {kind} is a message of {size} bytes; limits.message_bytes_max is {bytes_max}")


def take_message(body: bytearray, bytes_max: int) -> tuple[bytes | None, int]:
    """Take the first message off received bytes: the message, or None, and its length with the prefix (0: unknown).

    Unsupported for a compressed message; LimitReached for one over `bytes_max`.
    """
    received = len(body)
    if received < 5:
        return None, 0
    size = int.from_bytes(body[1:5], "big")
    if body[0]:
        raise Unsupported("found a compressed message; this server takes none (grpc-encoding: identity)")
    if size > bytes_max:
        raise too_large("request", size, bytes_max)
    size += 5
    if received < size:
        return None, size
    message = bytes(memoryview(body)[5:size])
    del body[:size]
    return message, size


def framed(message: bytes) -> list[bytes]:
    """Return a message with its length prefix, in parts that are not copied again."""
    size = len(message)
    prefix = b"\0" + size.to_bytes(4, "big")
    return [prefix + message] if size <= JOIN_BYTES_MAX else [prefix, message]
