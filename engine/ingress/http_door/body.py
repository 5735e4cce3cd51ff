"""Bodies of requests: read within a limit, decompressed within the same limit, and JSON read strictly."""

from __future__ import annotations

import zlib
from typing import Any

from starlette.requests import Request
from starlette.types import Message, Receive

from weftline.engine.ingress.http_door.refusal import Refusal, too_large
from weftline.engine.ingress.v2.strict_json import loads

_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def counted(receive: Receive, bytes_max: int) -> Receive:
    """Return `receive` that refuses (413) more than so many bytes of body."""
    seen = 0

    async def receiving() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > bytes_max:
            raise too_large(bytes_max)
        return message

    return receiving


async def body_of(request: Request, bytes_max: int) -> bytes:
    """Return the whole body, decompressed where the client says that it is compressed."""
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in _WINDOW:
        raise Refusal("content-encoding: expected gzip, deflate or none", code=415)
    return decompressed(body, _WINDOW[encoding], bytes_max)


def decompressed(body: bytes, window: int, bytes_max: int) -> bytes:
    """Return what is inside; never makes more than the limit, however much is inside."""
    unpacker = zlib.decompressobj(window)
    try:
        inside = unpacker.decompress(body, bytes_max)
        if unpacker.unconsumed_tail:
            raise too_large(bytes_max)
        inside += unpacker.flush()
    except zlib.error:
        raise Refusal("the body is not what its content-encoding says") from None
    if not unpacker.eof or unpacker.unused_data:
        raise Refusal("the compressed body is cut off, or something follows it")
    if len(inside) > bytes_max:
        raise too_large(bytes_max)
    return inside


async def json_object_of(request: Request, bytes_max: int, *, empty: bool = False) -> dict[str, Any]:
    """Return the body as a JSON object; with `empty`, no body at all stands for {}."""
    body = await body_of(request, bytes_max)
    if empty and not body.strip():
        return {}
    value = loads(body, "the body")
    if not isinstance(value, dict):
        raise Refusal("the body: expected a JSON object")
    return value
