"""Shared-memory parameters of a tensor, of Triton's extension.

shared_memory_region     the region's name
shared_memory_byte_size  how many bytes of it
shared_memory_offset     from where on; 0 when left out
"""

from __future__ import annotations

from collections.abc import Mapping

from weftline.engine.serving.v2.names import NAME_CHARS_MAX
from weftline.engine.serving.v2.nouns import Parameter, Region
from weftline.errors import InputError

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
BYTES_MAX = (1 << 63) - 1
"""Largest offset or size that the protocol can tell."""


def region_of(parameters: Mapping[str, Parameter], what: str) -> Region | None:
    """Return the region that a tensor's parameters name, None when they name none; InputError when they are wrong.

    what: how the message begins, such as 'input photo'.
    """
    if REGION not in parameters:
        if SIZE in parameters or OFFSET in parameters:
            raise InputError(f"{what}: found {SIZE} or {OFFSET} without {REGION}")
        return None
    name, size, offset = parameters[REGION], parameters.get(SIZE), parameters.get(OFFSET, 0)
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise InputError(f"{what}: {REGION}: expected a name of 1 to {NAME_CHARS_MAX} characters")
    return Region(name, _count(offset, OFFSET, what), _count(size, SIZE, what))


def parameters_of(region: Region) -> dict[str, Parameter]:
    """Return the parameters that tell of a region."""
    told: dict[str, Parameter] = {REGION: region.name, SIZE: region.size_bytes}
    return told | {OFFSET: region.offset} if region.offset else told


def _count(value: object, key: str, what: str) -> int:
    if type(value) is not int or not 0 <= value <= BYTES_MAX:
        raise InputError(f"{what}: {key}: expected a number of bytes from 0")
    return value
