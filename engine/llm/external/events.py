"""Parser of server-sent events: the bytes of a response to the data of its events, with limits on both.

Lines end with LF or CRLF. Comments and fields other than `data` are skipped. Several `data` lines of one event are
joined by LF.
"""

from __future__ import annotations

from collections.abc import Iterator

EVENT_BYTES_MAX = 4 << 20
"""Longest event, and longest line; the log-probabilities of many answers fit."""


class InvalidEvents(ValueError):
    """The response exceeds a limit, which the message names."""


class EventParser:
    """Incremental parser of one response."""

    def __init__(self, answer_bytes_max: int, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._left_bytes = answer_bytes_max
        self._line = bytearray()  # start of an incomplete line
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `chunk` completes; InvalidEvents for one that is too long."""
        self._left_bytes -= len(chunk)
        if self._left_bytes < 0:
            raise InvalidEvents("the response is too long")
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._line += line
            whole = bytes(self._line).removesuffix(b"\r")
            self._line.clear()
            event = self._add(whole)
            if event is not None:
                yield event
        self._line += rest
        self._check(len(self._line))

    def _add(self, line: bytes) -> bytes | None:
        """Add a line; return the data of the event that it ends."""
        self._check(len(line))
        if not line:
            event, self._data, self._data_bytes = b"\n".join(self._data), [], 0
            return event or None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + 1
        return None

    def _check(self, line_bytes: int) -> None:
        if self._data_bytes + line_bytes > self._event_bytes_max:
            raise InvalidEvents(f"an event is longer than {self._event_bytes_max} bytes")
