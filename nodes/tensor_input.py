"""Conversion of arrays, numbers and nested lists to a port's tensor type."""

from __future__ import annotations

from typing import Any

import numpy as np

from weftline.errors import InputError
from weftline.nodes.ports import PortType
from weftline.nodes.values import array_dtype, describe, fits
from weftline.shm.spec import ITEM_BYTES, STAND_INS, byte_size
from weftline.shm.view import dtype_name


def to_tensor(type: PortType, raw: Any, bytes_max: int) -> np.ndarray:
    """Return `raw` as a row-major array of `type`; the very same array when it already is one.

    Arrays are not converted to another dtype, since that loses numbers silently; numbers and nested lists have no dtype
    of their own and take the port's, if it holds them exactly.
    """
    array = _from_array(type, raw) if array_dtype(raw) is not None else _from_numbers(type, raw)
    dtype = dtype_name(array.dtype)
    if dtype not in ITEM_BYTES:
        raise InputError(f"wants {type}, got an array of {dtype:.40}")
    if type.dtype is not None and dtype != STAND_INS.get(type.dtype, type.dtype):
        raise InputError(f"wants {type}, got {describe(array)}\n    fix: convert it, x.astype({type.dtype!r})")
    if type.dims is not None and not fits(type.dims, array.shape):
        raise InputError(f"wants {type}, got {describe(array)}")
    if byte_size(dtype, array.shape) > bytes_max:
        raise InputError(f"a tensor of {array.nbytes} bytes; the limit is {bytes_max}")
    return array


def _from_array(type: PortType, raw: Any) -> np.ndarray:
    if hasattr(raw, "detach"):
        raw = _from_torch(raw)
    dtype = dtype_name(raw.dtype)
    if dtype in STAND_INS:  # ml_dtypes' arrays: numpy proper knows these bits as unsigned integers
        raw = raw.view(STAND_INS[dtype])
    if not raw.dtype.isnative:
        raw = raw.astype(raw.dtype.newbyteorder("="))
    return raw if raw.flags.c_contiguous and raw.__class__ is np.ndarray else np.array(raw, order="C")


def _from_torch(tensor: Any) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    stand_in = STAND_INS.get(array_dtype(tensor) or "")
    if stand_in is None:
        return tensor.numpy()
    import torch

    return tensor.view(getattr(torch, stand_in)).numpy()


def _from_numbers(type: PortType, raw: Any) -> np.ndarray:
    try:
        array = np.asarray(raw)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"wants {type}, got lists of unequal lengths, or something else than numbers") from None
    if array.dtype.kind not in "biufc":
        raise InputError(f"wants {type}, got {describe(raw)}")
    if type.dtype is None or type.dtype in STAND_INS:
        return array
    if array.dtype.kind == "f" and np.dtype(type.dtype).kind in "fc":
        return array.astype(type.dtype)
    with np.errstate(all="ignore"):
        converted = array.astype(type.dtype)
        if not np.array_equal(converted.astype(array.dtype), array):
            raise InputError(f"wants {type}, got numbers that {type.dtype} does not hold exactly")
    return converted
