"""Protocol Buffers wire format: read and write the fields of a message, without message classes.

A message is a sequence of fields: a key (number << 3 | wire type) and contents. Accepts and rejects the same bytes as
upb, the parser of google.protobuf, except that a reader has a limit on fields:

    key        a varint of at most 5 bytes and 32 bits; number 0 and the wire types 6 and 7 are invalid
    varint     at most 10 bytes; bits beyond 64 are dropped
    group      skipped with everything in it; messages and groups nest at most 100 deep
    string     UTF-8, without surrogates

A field whose wire type differs from its declared one is unknown. The caller skips unknown fields. (Protocol Buffers
documentation, "Encoding".)
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

import numpy as np

from weftline.errors import InputError

VARINT, I64, LEN, GROUP, END_GROUP, I32 = range(6)
"""Wire types."""

DEPTH_MAX = 100
"""Deepest nesting of messages and groups, as in upb."""

VARINT_BYTES_MAX = 10
KEY_BYTES_MAX = 5

MASK = (1 << 64) - 1

_FIXED_BYTES = {I64: 8, I32: 4}
_CUT = "found a message that ends in the middle of a field"
_double = Struct("<d")


class FieldReader:
    """Reads the fields of messages in `data`.

    left: number of fields that it still reads, over all calls; InputError for more. Bounds the time for a message.
    """

    __slots__ = ("data", "left")

    def __init__(self, data: bytes | memoryview, fields_max: int) -> None:
        self.data = data
        self.left = fields_max

    def fields(self, at: int, end: int, depth: int = 0) -> Iterator[tuple[int, int, int, int]]:
        """Yield (key, begin, start, stop) of each field of the message in data[at:end]; groups are skipped.

        The field begins at `begin`. Its contents are data[start:stop]; for a varint `start` is the value instead.

        depth: number of messages around this one.
        """
        data = self.data
        while at < end:
            self.left -= 1
            if self.left < 0:
                raise InputError("found a message of too many fields")
            begin = at
            key = data[at]
            at += 1
            if key >= 0x80:
                key, at = _key(data, begin, end)
            wire = key & 7
            if key < 8:
                raise InputError("found a field number that protobuf does not have")
            if wire == LEN:
                if at < end and (start := data[at]) < 0x80:
                    at += 1
                else:
                    start, at = varint(data, at, end)
                if start > end - at:
                    raise InputError(_CUT)
                start, at = at, at + start
                yield key, begin, start, at
            elif wire == VARINT:
                start, at = varint(data, at, end)
                yield key, begin, start, at
            elif wire in _FIXED_BYTES:
                start, at = at, at + _FIXED_BYTES[wire]
                if at > end:
                    raise InputError(_CUT)
                yield key, begin, start, at
            elif wire == GROUP:
                at = self._skip_group(at, end, key >> 3, depth)
            else:
                raise InputError(f"found a field of wire type {wire}, which starts no field")

    def text(self, start: int, stop: int) -> str:
        """Decode a string field."""
        try:
            return str(self.data[start:stop], "utf-8")
        except UnicodeDecodeError:
            raise InputError("found a text that is not UTF-8") from None

    def _skip_group(self, at: int, end: int, number: int, depth: int) -> int:
        """Return the position after a group that starts before `at`."""
        data, groups = self.data, [number]
        while groups:
            self.left -= 1
            if self.left < 0:
                raise InputError("found a message of too many fields")
            if depth + len(groups) > DEPTH_MAX:
                raise InputError(f"found a message nested deeper than {DEPTH_MAX}")
            key, at = _key(data, at, end)
            wire = key & 7
            if key < 8:
                raise InputError("found a field number that protobuf does not have")
            if wire == GROUP:
                groups.append(key >> 3)
            elif wire == END_GROUP:
                if groups.pop() != key >> 3:
                    raise InputError("found the end of another group")
            elif wire == VARINT:
                _, at = varint(data, at, end)
            elif wire == LEN:
                size, at = varint(data, at, end)
                at += size
            elif wire in _FIXED_BYTES:
                at += _FIXED_BYTES[wire]
            else:
                raise InputError(f"found a field of wire type {wire}, which starts no field")
            if at > end:
                raise InputError(_CUT)
        return at


def varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the unsigned number at `at`, and the position after it."""
    if at + 1 < end and data[at + 1] < 0x80 <= data[at]:
        return data[at] & 0x7F | data[at + 1] << 7, at + 2  # most lengths that are not in `fields`
    value = shift = 0
    for place in range(at, min(end, at + VARINT_BYTES_MAX)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & MASK, place + 1
        shift += 7
    raise InputError("found a message that ends in the middle of a number, or a number of more than ten bytes")


def _key(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    key, after = varint(data, at, end)
    if after - at > KEY_BYTES_MAX or key >> 32:
        raise InputError("found a field number that protobuf does not have")
    return key, after


def varint_count(packed: bytes | memoryview) -> int:
    """Return the number of varints in packed contents, without decoding them."""
    return int(np.count_nonzero(np.frombuffer(packed, np.uint8) < 0x80))


def packed_varints(packed: bytes | memoryview) -> np.ndarray:
    """Decode packed varints: uint64."""
    data = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise InputError(_CUT)
    starts = np.concatenate([np.zeros(min(1, len(ends)), ends.dtype), ends[:-1] + 1])
    sizes = ends - starts + 1
    longest = int(sizes.max(initial=0))
    if longest > VARINT_BYTES_MAX:
        raise InputError("found a number of more than ten bytes")
    values = np.zeros(len(ends), np.uint64)
    for place in range(longest):
        has = sizes > place
        values[has] |= (data[starts[has] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values


def signed(value: int) -> int:
    """Return the int64 of an unsigned varint."""
    return value - (1 << 64) if value >> 63 else value


# writing


def encode_varint(value: int) -> bytes:
    """Encode a number from 0 to 2^64 - 1."""
    if value < 0x80:
        return value.to_bytes(1, "little")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_prefix(number: int, size: int) -> bytes:
    """Return the key and length that precede a length-delimited field of `size` bytes."""
    return encode_varint(number << 3 | LEN) + encode_varint(size)


def field(number: int, contents: bytes) -> bytes:
    """Encode a length-delimited field."""
    return field_prefix(number, len(contents)) + contents


def text_field(number: int, text: str) -> bytes:
    """Encode a string field, which is left out if it is empty."""
    return field(number, text.encode()) if text else b""


def varint_field(number: int, value: int) -> bytes:
    """Encode a bool or an integer; negative ones take ten bytes."""
    return encode_varint(number << 3 | VARINT) + encode_varint(value & MASK)


def double_field(number: int, value: float) -> bytes:
    return encode_varint(number << 3 | I64) + _double.pack(value)


def double_at(data: bytes | memoryview, at: int) -> float:
    number: float = _double.unpack_from(data, at)[0]
    return number
