"""Minimal protobuf wire-format reader for untrusted files.

A message is a run of (field, wire type, value); nothing is copied and nothing is allocated from a length somebody
wrote: every length is compared with the bytes that are there. Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator

Value = int | memoryview
"""A varint as a number, a fixed-size or length-delimited field as its bytes, in place."""

_FIXED = {1: 8, 5: 4}


class WireError(ValueError):
    """The bytes are no valid protobuf message; the text gives the position."""


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Yield each field's number and value, in file order; WireError when the bytes stop making sense."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        field, wire = key >> 3, key & 7
        if field == 0:
            raise WireError(f"a field numbered 0 at byte {at}")
        if wire == 0:
            value, at = _varint(message, at)
            yield field, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in _FIXED:
            size = _FIXED[wire]
        else:
            raise WireError(f"wire type {wire} at byte {at}")
        if size > end - at:
            raise WireError(f"a field of {size} bytes where {end - at} are left")
        yield field, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(message):
            raise WireError("it ends in the middle of a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise WireError(f"a number of more than ten bytes at byte {at}")


def chunk(value: Value) -> memoryview:
    """Return a field that must be bytes; WireError when it is a number."""
    if isinstance(value, int):
        raise WireError("a number where a message belongs")
    return value


def text(value: Value) -> str:
    """Return a field that must be text; WireError when it is not UTF-8."""
    try:
        return bytes(chunk(value)).decode()
    except UnicodeDecodeError:
        raise WireError("a name that is not UTF-8") from None


def number(value: Value) -> int:
    """Return a field that must be a signed 64-bit number; WireError when it is bytes."""
    if not isinstance(value, int):
        raise WireError("bytes where a number belongs")
    return value - (1 << 64) if value >> 63 else value
