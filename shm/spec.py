"""Tensor spec: dtype, shape and size in bytes.

`byte_size` is the only computation of a size from received numbers. It uses Python's unbounded integers with limits, so
a negative, huge or overflowing shape is refused before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weftline.errors import InputError

ITEM_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
"""Bytes of one element by dtype name. The names are numpy's, and torch's for the four numpy does not have."""

STAND_INS: dict[str, str] = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Numpy dtype for a dtype that numpy lacks: unsigned integers with the same bits. torch has the true dtype."""

RANK_MAX = 32
"""Most dimensions of a tensor: below numpy's own limit of 64, above anything a model uses."""

TENSOR_BYTES_MAX = 1 << 40
"""Largest tensor, 1 TiB; arenas and ports have tighter limits."""


def byte_size(dtype: str, dims: Sequence[int]) -> int:
    """Return the bytes a dense tensor of `dtype` and `dims` takes.

    Raises InputError for an unknown dtype, a negative or non-integer dimension, more than RANK_MAX dimensions, or
    more than TENSOR_BYTES_MAX bytes counting each zero dimension as one (0 x huge is refused too).
    """
    if dtype not in ITEM_BYTES:
        raise InputError(f"unknown dtype {dtype!r:.40}; known: {', '.join(ITEM_BYTES)}")
    if len(dims) > RANK_MAX:
        raise InputError(f"a tensor of {len(dims)} dimensions; the most is {RANK_MAX}")
    for dim in dims:
        if type(dim) is not int or dim < 0:
            raise InputError(f"a dimension of {dim!r:.40} in a tensor's shape; dimensions are integers from 0")
    if math.prod(max(dim, 1) for dim in dims) * ITEM_BYTES[dtype] > TENSOR_BYTES_MAX:
        raise InputError(f"a {dtype} tensor of shape {list(dims)} is larger than {TENSOR_BYTES_MAX} bytes")
    return math.prod(dims) * ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The dtype and shape of one dense, row-major tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return byte_size(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"
