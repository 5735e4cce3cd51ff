"""Request body reader: size limits, decompression, strict JSON and forms.

`middleware.py` refuses a body by its headers before any of it is read.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from typing import Any

import numpy as np
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.requests import Request
from starlette.types import Message, Receive

from weftline.engine.runtime.byte_budget import RETRY_S, ByteBudget
from weftline.engine.serving.config import FREE_BYTES, ServeLimits
from weftline.engine.serving.http.connection import BODY_BYTES_S
from weftline.engine.serving.http.context import caller_of
from weftline.engine.serving.http.errors import HttpError, too_large
from weftline.engine.serving.http.multipart import parts_of
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.threads import finish_in_thread
from weftline.errors import LimitReached
from weftline.nodes.strict_json import loads

BODY = "weftline.body"
"""Scope key of the Body."""

WAIT_S = 10.0
"""Longest wait of an unread body for room in the budget; half of `limits.header_s` if that is less."""

SLOW_S, LOOK_S = 2.0, 0.5
"""Longest time that a body may be slow while others wait, and the interval of that check."""

DEFLATE_RATIO = 1032
"""Largest expansion of deflate, per byte."""

THREAD_BYTES = 1 << 10
"""Compressed size from which a thread decompresses a body; smaller ones expand to a megabyte at most."""

FIELDS_MAX, FIELD_BYTES_MAX = 64, 64 << 10
"""Most fields of a form besides its file, and the largest of them."""

_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Body:
    """The body of one request, received within limits. `receive` is the ASGI callable for the application.

    A body of up to FREE_BYTES is not counted. A larger one waits unread until `budget` has room for it and for its
    decompressed form, fair by `caller`; `100-continue` is sent only then. It is refused (429) after WAIT_S without
    room. While others wait, a body slower than BODY_BYTES_S is refused (408). `hold` counts what the request adds.
    """

    def __init__(
        self, receive: Receive, headers: Headers, limits: ServeLimits, budget: ByteBudget, caller: str
    ) -> None:
        self._receive = receive
        self._caller = caller
        self._limits = limits
        self._budget = budget
        length = headers.get("content-length")
        self._charge = min(_charge(headers, int(length) if length else None, limits), budget.bytes_max)
        self._announced = length is not None
        self._plain = _is_plain(headers)
        self._held = 0
        self._more: list[int] = []
        self._since_s = 0.0
        self._seen = 0
        self._whole = False

    async def receive(self) -> Message:
        """Return the next message; HttpError (413, 408) or LimitReached when the body is over a limit."""
        if self._whole:
            return await self._receive()
        if not self._held and self._charge > FREE_BYTES and (self._announced or self._seen > FREE_BYTES):
            self._held = await self._room(self._charge)
            self._since_s = asyncio.get_running_loop().time()
        message = await self._next()
        self._seen += len(message.get("body", b""))
        if self._seen > self._limits.message_bytes_max:
            raise too_large(self._limits.message_bytes_max)
        if message["type"] != "http.request" or not message.get("more_body"):
            self._whole = True
            if self._held and self._plain and not self._announced:
                self._budget.shrink(self._held - min(self._held, self._seen))
                self._held = min(self._held, self._seen)
        return message

    def close(self) -> None:
        """Release its share of the budget at the end of the request."""
        if self._held:
            self._budget.give_back(self._held, self._caller)
            self._held = 0
        while self._more:
            self._budget.give_back(self._more.pop(), self._caller)

    async def hold(self, size_bytes: int) -> None:
        """Wait for room for stored values that a request refers to, counted as a body; LimitReached without room."""
        size = min(size_bytes, self._budget.bytes_max - self._held - sum(self._more))
        if size > FREE_BYTES:
            self._more.append(await self._room(size))

    async def _room(self, size_bytes: int) -> int:
        wait_s = min(WAIT_S, self._limits.header_s / 2)
        try:
            return await self._budget.enter(size_bytes, self._caller).wait_async(wait_s)
        except TimeoutError:
            most = self._budget.bytes_max
            found = f"bodies of other requests take up limits.inflight_bytes_max, which is {most}"
            raise LimitReached(found, RETRY_S) from None

    async def _next(self) -> Message:
        while self._held:
            try:
                async with asyncio.timeout(LOOK_S):
                    message = await self._receive()
            except TimeoutError:
                self._check_pace()
            else:
                if message.get("more_body"):
                    self._check_pace()
                return message
        return await self._receive()

    def _check_pace(self) -> None:
        """Refuse a slow body that others wait for."""
        due_s = asyncio.get_running_loop().time() - self._since_s - SLOW_S
        if self._held and self._budget.waiting and self._seen < due_s * BODY_BYTES_S:
            slow = f"the body came slower than {BODY_BYTES_S} bytes a second while other requests waited; send it again"
            raise HttpError(slow, code=408, close=True)


def _charge(headers: Headers, length: int | None, limits: ServeLimits) -> int:
    """Return the memory to reserve for a body.

    A form takes twice its size. A compressed body takes its own size and its largest decompressed size.
    """
    size = limits.message_bytes_max if length is None else length
    if headers.get("content-type", "").lower().startswith("multipart/"):
        return 2 * size
    if _is_plain(headers):
        return size
    return size + min(size * DEFLATE_RATIO, limits.message_bytes_max)


async def hold_bytes(request: Request, size_bytes: int) -> None:
    """Count stored values that a request refers to against the budget of bodies, until its end; see `Body.hold`."""
    body: Body = request.scope[BODY]
    await body.hold(size_bytes)


def _is_plain(headers: Headers) -> bool:
    """Return True for a body that is not compressed."""
    return headers.get("content-encoding", "identity").strip().lower() == "identity"


async def body_of(request: Request, bytes_max: int) -> bytes | bytearray | memoryview:
    """Return the whole body, decompressed according to its content-encoding."""
    body = await _received(request, bytes_max)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in _WINDOW:
        raise HttpError("content-encoding: expected gzip, deflate or none", code=415)
    if len(body) < THREAD_BYTES:
        return decompressed(body, _WINDOW[encoding], bytes_max)
    return await finish_in_thread(decompressed, body, _WINDOW[encoding], bytes_max)


async def _received(request: Request, bytes_max: int) -> bytearray | memoryview:
    """Return the body as received; one over FREE_BYTES in a block of its announced size.

    Growing a bytearray reallocates it repeatedly, and the fragmented heap took more memory than the budget. Where no
    size is announced the block has that of the largest message; its pages exist once they are written.
    """
    size_max = min(int(request.headers.get("content-length", bytes_max)), bytes_max)
    if size_max <= FREE_BYTES:
        body = bytearray()
        async for part in request.stream():
            body += part
        return body
    block, size = np.empty(size_max, np.uint8).data, 0
    async for part in request.stream():
        block[size : size + len(part)] = part
        size += len(part)
    return block[:size].toreadonly()


def decompressed(body: bytes | bytearray | memoryview, window: int, bytes_max: int) -> bytes:
    """Decompress a body; never produces more than the limit."""
    unpacker = zlib.decompressobj(window)
    try:
        inside = unpacker.decompress(body, bytes_max)
        if unpacker.unconsumed_tail:
            raise too_large(bytes_max)
        inside += unpacker.flush()
    except zlib.error:
        raise HttpError("the body is not what its content-encoding says") from None
    if not unpacker.eof or unpacker.unused_data:
        raise HttpError("the compressed body is cut off, or something follows it")
    if len(inside) > bytes_max:
        raise too_large(bytes_max)
    return inside


async def json_object_of(
    request: Request, bytes_max: int, *, empty: bool = False, json: JsonParser | None = None
) -> dict[str, Any]:
    """Return the body as a JSON object.

    empty: an empty body is read as {}.
    json:  parser for large bodies; None: the body is small.
    """
    body = await body_of(request, bytes_max)
    if empty and not bytes(body).strip():
        return {}
    value = loads(body, "the body") if json is None else await json.document(body, "the body", caller_of(request).name)
    if not isinstance(value, dict):
        raise HttpError("the body: expected a JSON object")
    return value


async def form_of(request: Request) -> FormData:
    """Return the fields of a form with at most one file."""
    parts = await parts_of(request, FIELDS_MAX + 1, lambda part: None, FIELD_BYTES_MAX)
    if sum(one.is_file for one in parts) > 1:
        raise HttpError("the form: found several files, expected one")
    items: list[tuple[str, str | UploadFile]] = []
    for one in parts:
        if one.is_file:
            items.append((one.name, UploadFile(io.BytesIO(one.data))))
            continue
        try:
            items.append((one.name, str(one.data, "utf-8")))
        except UnicodeDecodeError:
            raise HttpError(f"the form: {one.name:.80}: expected text in UTF-8", param=one.name[:80]) from None
    return FormData(items)


def text_field(form: FormData, field: str) -> str | None:
    """Return a field that occurs at most once; None when it is absent or empty."""
    values = form.getlist(field)
    if len(values) > 1 or any(not isinstance(one, str) for one in values):
        raise HttpError(f"{field}: expected one text", param=field)
    return str(values[0]) if values and values[0] else None


async def file_field(form: FormData, field: str) -> bytes:
    """Return the bytes of the form's file; its name is ignored."""
    found = form.get(field)
    if not isinstance(found, UploadFile):
        raise HttpError(f"{field}: expected a file", param=field)
    return await found.read()
