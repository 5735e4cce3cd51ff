"""Message framing: four-byte little-endian length, then the body; pure.

Each byte is copied once or twice, however the stream is cut."""

from __future__ import annotations

HEAD_BYTES = 4


class Frames:
    """Collects what arrives until messages are whole.

    frame_bytes_max: longest message; a longer one is ValueError as soon as it is announced.
    """

    def __init__(self, frame_bytes_max: int) -> None:
        self._most = frame_bytes_max
        self._begun = bytearray()
        self._wanted_bytes = HEAD_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that end in `data`; what is left over waits for more."""
        if self._begun:
            self._begun += data
            if len(self._begun) < self._wanted_bytes:
                return []
            data = bytes(self._begun)
            self._begun = bytearray()
        self._wanted_bytes = HEAD_BYTES
        found, at, end = [], 0, len(data)
        while end - at >= HEAD_BYTES:
            size = int.from_bytes(data[at : at + HEAD_BYTES], "little")
            if size > self._most:
                raise ValueError(f"a message of {size} bytes; the most is {self._most}")
            if end - at - HEAD_BYTES < size:
                self._wanted_bytes = HEAD_BYTES + size
                break
            found.append(data[at + HEAD_BYTES : at + HEAD_BYTES + size])
            at += HEAD_BYTES + size
        if at < end:
            self._begun += data[at:]
        return found


def framed(body: bytes) -> bytes:
    """Return a message with its length in front."""
    return len(body).to_bytes(HEAD_BYTES, "little") + body
