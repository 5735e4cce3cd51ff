"""Zero-copy splitter of a protobuf message into its top-level fields.

A message is a row of fields: a key (field number and wire type) and what the wire type says. `cut` takes one
length-delimited field out of that row, as views of the message, and gives back the rest, which is a message too and is
left to a real parser. It goes no level deeper, reads every byte at most once and believes no length it has not checked.
(Protocol Buffers, "Encoding".)
"""

from __future__ import annotations

from weftline.errors import InputError

FIELDS_MAX = 4096
"""Most outermost fields of one message: far above any request, far below what would keep this loop busy."""

VARINT, I64, LEN, I32 = 0, 1, 2, 5
"""Wire types; 3 and 4 are groups, which no message of ours has, and there are no others."""

_FIXED = {I64: 8, I32: 4}


def cut(data: bytes | memoryview, number: int) -> tuple[bytes, list[memoryview]]:
    """Return `data` without its length-delimited fields of that number, and those fields' contents as views of it.

    InputError for what is no message: lengths past the end, varints over ten bytes, groups, unknown wire types, and for
    more than FIELDS_MAX fields.
    """
    view, end = memoryview(data), len(data)
    wanted = number << 3 | LEN
    found: list[memoryview] = []
    rest: list[memoryview] = []
    at = kept = fields = 0
    while at < end:
        fields += 1
        if fields > FIELDS_MAX:
            raise InputError(f"found a message of more than {FIELDS_MAX} fields")
        begin = at
        key, at = _varint(data, at, end)
        wire = key & 7
        if not 0 < key >> 3 < 1 << 29:
            raise InputError("found a field number that protobuf does not have")
        if wire == LEN:
            size, at = _varint(data, at, end)
            if size > end - at:
                raise InputError("found a message that ends in the middle of a field")
            at += size
            if key == wanted:
                rest.append(view[kept:begin])
                found.append(view[at - size : at])
                kept = at
        elif wire == VARINT:
            _, at = _varint(data, at, end)
        elif wire in _FIXED:
            at += _FIXED[wire]
            if at > end:
                raise InputError("found a message that ends in the middle of a field")
        else:
            raise InputError(f"found a field of wire type {wire}, which no message here has")
    rest.append(view[kept:end])
    return b"".join(rest), found


def _varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and where what follows it begins."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
        shift += 7
        if shift == 70:
            break
    raise InputError("found a message that ends in the middle of a number, or a number over 64 bits")


def prefix(number: int, size: int) -> bytes:
    """Return what stands before a length-delimited field of `size` bytes: its key and its length."""
    return _encoded(number << 3 | LEN) + _encoded(size)


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
