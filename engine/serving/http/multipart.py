"""Multipart bodies (multipart/form-data): parts by name, in memory, within limits.

The number of parts, the size of their headers and their names are checked before the data of a part is read; the size
of the whole body is limited by `body.py`. File names are ignored: a part with one is a file, and that is all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.http.plain_inputs import Part

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

HEADER_BYTES_MAX = 8 << 10
"""Most bytes of the headers of one part."""

NAME_CHARS_MAX = 128
"""Longest name of a part."""

BOUNDARY_BYTES_MAX = 200
"""Longest boundary; RFC 2046 allows 70."""

SLICE_BYTES = 16 << 10
"""Bytes that are parsed in one turn of the event loop; the parser takes about a microsecond for a hostile byte."""


def is_multipart(request: Request) -> bool:
    """Return True if the content type is multipart/form-data."""
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def parts_of(
    request: Request, parts_max: int, check: Callable[[Part], None], field_bytes_max: int | None = None
) -> list[Part]:
    """Return the parts of a body; HttpError if it is invalid or has too many.

    check:           called with each part before its data is read, to refuse it.
    field_bytes_max: size of a part that is no file; None: not limited, beside the body as a whole.
    """
    if not is_multipart(request):
        raise HttpError("content-type: expected multipart/form-data", code=415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError("content-encoding: a form is taken as it is, without compression", code=415)
    _, options = parse_options_header(request.headers["content-type"])
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= BOUNDARY_BYTES_MAX:
        raise HttpError(f"content-type: expected a boundary of 1 to {BOUNDARY_BYTES_MAX} bytes")
    reader = _PartReader(parts_max, check, field_bytes_max)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        async for chunk in request.stream():
            for at in range(0, len(chunk), SLICE_BYTES):
                parser.write(chunk[at : at + SLICE_BYTES])
                await asyncio.sleep(0)
    except (FormParserError, ValueError, KeyError, AssertionError):
        raise HttpError("the form cannot be read: it is not multipart/form-data with the stated boundary") from None
    if not reader.complete:
        raise HttpError("the form is cut off: its last boundary is missing")
    return reader.parts


class _PartReader:
    """Collects the parts that a parser finds."""

    def __init__(self, parts_max: int, check: Callable[[Part], None], field_bytes_max: int | None) -> None:
        self._parts_max, self._check, self._field_bytes_max = parts_max, check, field_bytes_max
        self._name, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._data = bytearray()
        self.parts: list[Part] = []
        self.complete = False

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header(self._name, data[start:end]),
            "on_header_value": lambda data, start, end: self._header(self._value, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) == self._parts_max:
            raise HttpError(f"the form: found more than {self._parts_max} parts, expected at most that many")
        self._data = bytearray()
        self.parts.append(Part(data=self._data))
        self._headers, self._header_bytes = {}, 0

    def _header(self, into: bytearray, some: bytes) -> None:
        self._header_bytes += len(some)
        if self._header_bytes > HEADER_BYTES_MAX:
            raise HttpError(f"the form: found a part with more than {HEADER_BYTES_MAX} bytes of headers")
        into += some

    def _end_header(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        part = self.parts[-1]
        disposition, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if disposition != b"form-data" or not 0 < len(name) <= NAME_CHARS_MAX:
            raise HttpError(f"the form: found a part without a name of 1 to {NAME_CHARS_MAX} characters")
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise HttpError(f"the form: {name:.80}: content-transfer-encoding: expected binary")
        part.name, part.is_file = name, b"filename" in options or b"filename*" in options
        part.type = parse_options_header(self._headers.get(b"content-type"))[0].decode("latin-1").lower()
        self._check(part)

    def _add(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        most = self._field_bytes_max
        if most is not None and not self.parts[-1].is_file and len(self._data) > most:
            raise HttpError(f"the form: {self.parts[-1].name:.80}: expected at most {most} bytes")

    def _end(self) -> None:
        self.complete = True
