"""Typed contents: tensor elements in protobuf lists.

    bool_contents    BOOL                      uint_contents    UINT8 UINT16 UINT32
    int_contents     INT8 INT16 INT32          uint64_contents  UINT64
    int64_contents   INT64                     fp32_contents    FP32
    bytes_contents   BYTES                     fp64_contents    FP64

FP16 and BF16 have none. A tensor fills the one list of its datatype and leaves the others empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weftline.engine.serving.v2.datatypes import BYTES, NUMPY
from weftline.engine.serving.v2.nouns import Parameter, Tensor
from weftline.errors import InputError

FIELDS: dict[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip
"""Which list holds each datatype."""

_SENT: dict[str, np.dtype] = {"int_contents": np.dtype(np.int32), "uint_contents": np.dtype(np.uint32)}


def has_contents(tensor: Any) -> bool:
    """Whether a protobuf tensor has typed contents, and any in them."""
    return tensor.HasField("contents") and bool(tensor.contents.ListFields())


def tensor_of_contents(
    name: str, datatype: str, shape: tuple[int, ...], contents: Any, parameters: Mapping[str, Parameter], count_max: int
) -> Tensor:
    """Return a tensor with typed contents: numbers as raw bytes, BYTES as `values`.

    InputError when they are in another list than the datatype's, too many, or beyond its range.
    """
    what = f"input {name!r:.80}"
    wanted = FIELDS.get(datatype)
    filled = [field.name for field, _ in contents.ListFields()]
    if wanted is None:
        raise InputError(f"{what}: typed contents of {datatype!r:.40}, which has none; send raw contents")
    if filled != [wanted]:
        raise InputError(f"{what}: found {', '.join(filled)}, expected {wanted} for {datatype}")
    elements = getattr(contents, wanted)
    if len(elements) > count_max:
        raise InputError(
            f"{what}: found {len(elements)} typed elements, expected at most {count_max}; send raw contents"
        )
    if datatype == BYTES:
        return Tensor(name, datatype, shape, None, tuple(elements), None, parameters)
    held = NUMPY[datatype]
    sent = np.fromiter(elements, _SENT.get(wanted, held), len(elements))
    array = sent.astype(held, copy=False)
    if array.dtype != sent.dtype and not np.array_equal(array, sent):
        raise InputError(f"{what}: found elements beyond the range of {datatype}")
    return Tensor(name, datatype, shape, array.view(np.uint8).data, None, None, parameters)
