"""JSON lists as JSON lines: a stream that yields each element of `[{...}, {...}]` on a line of its own.

Memory holds one element and one read. Line ends inside an element become carriage returns: both are white space between
JSON tokens, and neither is allowed inside a JSON text, so that valid elements stay equal and invalid ones stay invalid.
"""

from __future__ import annotations

import io
import re
from typing import Any, BinaryIO, cast

from weftline.errors import InputError

ELEMENT_BYTES_MAX = 256 << 20
READ_BYTES = 1 << 20
HEAD_BYTES = 4 << 10
"""Bytes that are searched for the list's bracket; white space before it may not be longer."""

BOM = b"\xef\xbb\xbf"

_TOKEN = re.compile(
    rb"""
    [\[{] (?: [^"\[\]{}]++ | "(?:[^"\\]++|\\.)*+" )*+ (?P<leaf>[\]}]?)  # a bracket, to the next one
    | [\]}] | , | " (?:[^"\\]++|\\.)*+ (?P<quote>"?)
    """,
    re.DOTALL | re.VERBOSE,
)
_OPENED, _CLOSED = frozenset(b"[{"), frozenset(b"]}")


def is_list(head: bytes) -> bool:
    """Return True if a file that begins with `head` holds a JSON list."""
    return head.removeprefix(BOM).lstrip()[:1] == b"["


class JsonListStream(io.RawIOBase):
    """Elements of a JSON list as lines. Not seekable; closing it leaves the inner stream open.

    stream: stands at the beginning of the file.
    shown:  name of the file, for errors.
    """

    def __init__(self, stream: BinaryIO, shown: str) -> None:
        self._stream, self._shown = stream, shown
        self._data = b""
        self._begin = self._at = 0  # of the element and of the next token, in _data
        self._depth = 0  # of brackets inside the list
        self._elements = 0
        self._started = self._ended = False
        self._lines = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._lines and not self._ended:
            self._lines = memoryview(b"".join(self._next_lines()))
        size = min(len(buffer), len(self._lines))
        buffer[:size] = self._lines[:size]
        self._lines = self._lines[size:]
        return size

    def _next_lines(self) -> list[bytes]:
        """Read on and return the lines of the elements that end there."""
        held = self._data[self._begin :]
        if len(held) > ELEMENT_BYTES_MAX:
            raise InputError(f"{self._shown}: element {self._elements + 1} has more than {ELEMENT_BYTES_MAX} bytes")
        more = self._stream.read(max(READ_BYTES, len(held)))  # doubles, so that a long element is scanned few times
        if not more:
            raise InputError(
                f"{self._shown}: the JSON list does not end (after {self._elements} elements); expected ]\n"
                "    fix: write the file again; it may be cut off"
            )
        self._data, self._at, self._begin = held + more, self._at - self._begin, 0
        if not self._started:
            self._started = b"[" in self._data
            self._begin = self._at = self._data.find(b"[") + 1
        return self._scanned() if self._started else []

    def _scanned(self) -> list[bytes]:
        found: list[bytes] = []
        for token in _TOKEN.finditer(self._data, self._at):
            sign = self._data[token.start()]
            if sign == 0x22 and not token["quote"]:
                self._at = token.start()  # the text goes on behind the data
                return found
            if sign in _OPENED:
                self._depth += not token["leaf"]
            elif sign in _CLOSED and self._depth:
                self._depth -= 1
            elif not self._depth and sign != 0x22:
                self._take(token.start(), sign == 0x2C, found)
                if sign != 0x2C:
                    self._finish(token.start())
                    return found
                self._begin = token.end()
        self._at = len(self._data)
        return found

    def _take(self, end: int, more: bool, found: list[bytes]) -> None:
        """Append the element before a comma or the end of the list."""
        element = self._data[self._begin : end].strip()
        if element or more or self._elements:  # [] has no element
            self._elements += 1
            found.append((element or b"no value").replace(b"\n", b"\r") + b"\n")

    def _finish(self, end: int) -> None:
        """Check that nothing follows the list."""
        rest = self._data[end + 1 :]
        while not rest.strip() and (rest := self._stream.read(READ_BYTES)):
            pass
        if self._data[end] != 0x5D or rest.strip():
            found = rest.strip()[:20] or b"}"
            raise InputError(
                f"{self._shown}: found {found!r} after element {self._elements} of a JSON list, expected its end"
                "\n    fix: write one list of objects, or one object on each line"
            )
        self._ended, self._data = True, b""


def as_lines(stream: BinaryIO, shown: str) -> BinaryIO:
    """Return the elements of a JSON list as a buffered stream of lines."""
    return cast(BinaryIO, io.BufferedReader(JsonListStream(stream, shown), READ_BYTES))
