"""Messages of the Open Inference Protocol v2, common to gRPC and REST.

Independent of protobuf and JSON. (KServe, "Open Inference Protocol v2", and Triton's extensions: binary tensor data,
parameters, sequence, shared memory.)

Parameters of a tensor in shared memory:

    shared_memory_region     name of the region
    shared_memory_byte_size  size in bytes
    shared_memory_offset     start within the region; default 0
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from weftline.errors import InputError

Parameter = bool | int | float | str
"""A value of a `parameters` map."""

STATUS = "weftline_status"
"""Parameter with the gRPC status name of an error in a stream; v2 has only its text."""

NAME_CHARS_MAX = 128
"""Longest name."""

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"

BYTES_MAX = (1 << 63) - 1
"""Largest offset or size in the protocol."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


class Region(msgspec.Struct, frozen=True):
    """A range of a registered shared-memory region, with an input or for an output."""

    name: str
    offset: int
    size_bytes: int


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a request or a response.

    Its data is in exactly one of `raw`, `values` and `region`.

    datatype: BOOL, UINT8 ... UINT64, INT8 ... INT64, FP16, BF16, FP32, FP64 or BYTES.
    shape:    as received, not validated.
    raw:      v2 raw contents (little-endian, row-major; BYTES with a four-byte length before each element), a view of
              the received message where possible.
    values:   elements one by one, row-major, from typed contents or JSON; bytes or str for BYTES.
    region:   range of registered shared memory.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: memoryview | bytes | None = None
    values: tuple[object, ...] | None = None
    region: Region | None = None
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class WantedOutput(msgspec.Struct, frozen=True):
    """An output that a request selects. region: where to write it; None: into the response."""

    name: str
    region: Region | None = None
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class InferRequest(msgspec.Struct, frozen=True):
    """One inference request. outputs: empty for all outputs of the model."""

    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[WantedOutput, ...] = ()
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class InferResponse(msgspec.Struct, frozen=True):
    """One response: whole, or a chunk of a stream. An output written to shared memory has a `region`."""

    model: str
    version: str
    id: str
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


# names


def check_name(name: object, what: str = "model") -> str:
    """Validate a name: 1 to 128 letters, digits, dots, dashes and underscores.

    InputError for anything else.

    Names are keys of a registry and never part of a path; that they could not be one is a second line of defence.

    what: kind of the name, for the message, which never quotes the name.
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    found = f"a name of {len(name)} characters" if isinstance(name, str) else "something that is no text"
    raise InputError(f"{what}: found {found}, expected 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -")


def check_version(version: object) -> str:
    """Return `version` if it is '' (the version that serves) or a name; InputError otherwise."""
    return "" if version == "" else check_name(version, "model version")


# shared-memory parameters


def region_of(parameters: Mapping[str, Parameter], what: str) -> Region | None:
    """Return the region in a tensor's parameters, None without one.

    InputError for invalid parameters.

    what: start of the message, such as 'input photo'.
    """
    if REGION not in parameters:
        if SIZE in parameters or OFFSET in parameters:
            raise InputError(f"{what}: found {SIZE} or {OFFSET} without {REGION}")
        return None
    name, size, offset = parameters[REGION], parameters.get(SIZE), parameters.get(OFFSET, 0)
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise InputError(f"{what}: {REGION}: expected a name of 1 to {NAME_CHARS_MAX} characters")
    return Region(name, _byte_count(offset, OFFSET, what), _byte_count(size, SIZE, what))


def parameters_of(region: Region) -> dict[str, Parameter]:
    """Return the parameters of a tensor in a region."""
    parameters: dict[str, Parameter] = {REGION: region.name, SIZE: region.size_bytes}
    return parameters | {OFFSET: region.offset} if region.offset else parameters


def _byte_count(value: object, key: str, what: str) -> int:
    if type(value) is not int or not 0 <= value <= BYTES_MAX:
        raise InputError(f"{what}: {key}: expected a number of bytes from 0")
    return value
