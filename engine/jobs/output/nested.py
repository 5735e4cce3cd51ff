"""Split of concatenated values into one list for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftline.engine.jobs.output.arrow import pa

OFFSET_MAX = (1 << 31) - 1
"""Most elements of all lists of one array: Arrow counts them in 32 bits."""


def cut(arrow_type: pa.DataType, values: Sequence[Any], inner: pa.Array, size: Callable[[Any], int]) -> pa.Array:
    """Return `inner` cut into one list for each value, null where a value is None."""
    sizes = np.fromiter((0 if one is None else size(one) for one in values), np.int64, len(values))
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    if offsets[-1] > OFFSET_MAX:
        raise ValueError(f"{offsets[-1]} numbers in one block of rows\n    fix: lower --block-rows")
    where = pa.array(offsets.astype(np.int32))
    return pa.ListArray.from_arrays(where, inner, type=arrow_type, mask=missing(values))


def missing(values: Sequence[Any]) -> pa.Array | None:
    """Return which values are None, or None when none is: the array then has no bitmap."""
    absent = [one is None for one in values]
    return pa.array(absent, pa.bool_()) if any(absent) else None


def rows_of(arrow_type: pa.DataType, inner: pa.Array, size: int) -> pa.Array:
    """Return `inner` cut into lists of `size` elements each."""
    offsets = pa.array(np.arange(0, len(inner) + 1, size, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, inner, type=arrow_type)
