"""Data types of the Open Inference Protocol v2, common to gRPC and REST.

Both doors and the client speak in these; nothing here knows protobuf or JSON. (KServe, "Open Inference Protocol v2",
and Triton's extensions: binary tensor data, parameters, sequence, shared memory.)
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

Parameter = bool | int | float | str
"""A value of a `parameters` map."""

STATUS = "weftline_status"
"""Parameter of a streamed error that has the gRPC status' name; v2 has its words only."""


class Region(msgspec.Struct, frozen=True):
    """Where a tensor lies, or is wanted, in memory that the client registered: the region's name and a range of it."""

    name: str
    offset: int
    size_bytes: int


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a request or a response.

    datatype: v2's name: BOOL, UINT8 ... UINT64, INT8 ... INT64, FP16, BF16, FP32, FP64, BYTES.
    shape:    as sent, unchecked.
    raw:      its bytes as v2's raw contents have them (little-endian, row-major; BYTES with a four-byte length before
              each element); a view of the received message where that can be. None: see `values` and `region`.
    values:   its elements one by one, row-major, from typed contents or JSON; bytes or str for BYTES.
    region:   it lies in registered shared memory.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: memoryview | bytes | None = None
    values: tuple[object, ...] | None = None
    region: Region | None = None
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class WantedOutput(msgspec.Struct, frozen=True):
    """An output that a request asks for; `region` says that it is to be written into registered shared memory."""

    name: str
    region: Region | None = None
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class InferRequest(msgspec.Struct, frozen=True):
    """One inference request. `outputs` empty: all of the model's."""

    model: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[WantedOutput, ...] = ()
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)


class InferResponse(msgspec.Struct, frozen=True):
    """One response, whole or a piece of a stream. A tensor that was written into shared memory has its `region`."""

    model: str
    version: str
    id: str
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)
