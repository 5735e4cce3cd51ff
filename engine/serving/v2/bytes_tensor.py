"""BYTES tensors in raw contents: length-prefixed elements.

    03 00 00 00 'a' 'b' 'c'  00 00 00 00  01 00 00 00 00      three elements: abc, nothing, a NUL

Every length is held against what is left before anything is taken. Long elements are views; short ones are copies,
since a view is an object of its own and larger than they are: a message of nothing but lengths must not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from weftline.errors import InputError

PREFIX_BYTES = 4
"""Bytes of an element's length."""

_length = Struct("<I").unpack_from

ELEMENT_BYTES_MAX = (1 << 32) - 1
"""Longest element that a prefix can tell of."""

VIEW_BYTES_MIN = 4 << 10
"""From this size on an element is a view."""


def decode(raw: bytes | bytearray | memoryview, count: int) -> list[bytes | memoryview]:
    """Return the `count` elements of a tensor: views of its bytes, or bytes where they are short.

    InputError when a length runs past the end, or when there are more or fewer elements.
    """
    view, size = memoryview(raw), len(raw)
    if size < count * PREFIX_BYTES:
        raise InputError(f"found {size} bytes, expected {count} elements, each with a four-byte length before it")
    elements: list[bytes | memoryview] = []
    at = 0
    for place in range(count):
        begin = at + PREFIX_BYTES
        if begin <= size:
            at = begin + _length(raw, at)[0]
        if begin > size or at > size:
            raise InputError(f"element {place} of {count} runs past the end of the tensor's {size} bytes")
        elements.append(view[begin:at] if at - begin >= VIEW_BYTES_MIN else bytes(raw[begin:at]))
    if at != size:
        raise InputError(f"{size - at} bytes are left after the {count} elements that the shape tells of")
    return elements


def encode(elements: Sequence[bytes | memoryview]) -> bytes:
    """Return the raw contents of a tensor of these elements; InputError for one of 4 GiB or more."""
    if any(len(one) > ELEMENT_BYTES_MAX for one in elements):
        raise InputError("found an element of 4 GiB or more, which a BYTES tensor cannot carry")
    if len(elements) == 1:
        return b"".join((len(elements[0]).to_bytes(PREFIX_BYTES, "little"), elements[0]))
    return b"".join([part for one in elements for part in (len(one).to_bytes(PREFIX_BYTES, "little"), one)])
