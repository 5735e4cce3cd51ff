"""Zero-copy tensor views of shared memory.

numpy sees every dtype it has, and the stand-in of the ones it has not (bfloat16 as uint16, float8 as uint8; see
`shm.spec.STAND_INS`). torch sees the true dtype. A view of a read-only arena is read-only: numpy raises on a write,
torch does not check and the process ends with SIGSEGV, which is why a node that writes into its inputs must say so.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.shm.arena import HostArena
from weftline.shm.block import Place
from weftline.shm.spec import STAND_INS, TensorSpec

if TYPE_CHECKING:
    import torch


@cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype that holds `dtype`'s bits."""
    return np.dtype(STAND_INS.get(dtype, dtype))


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return `dtype.name`, remembered: numpy works it out anew every time, at the cost of a whole small message."""
    return str(dtype.name)


def numpy_view(arena: HostArena, place: Place, spec: TensorSpec) -> np.ndarray:
    """Return the tensor at `place` as an array; ValueError when spec and place disagree or leave the arena."""
    place.check_inside(arena.size_bytes)
    if spec.size_bytes != place.size_bytes:
        raise ValueError(f"{spec} takes {spec.size_bytes} bytes, its place has {place.size_bytes}")
    return np.ndarray(spec.shape, numpy_dtype(spec.dtype), arena.buffer, place.offset)


def bytes_view(arena: HostArena, place: Place) -> memoryview:
    """Return the bytes at `place`, not copied; ValueError when they leave the arena."""
    place.check_inside(arena.size_bytes)
    return memoryview(arena.buffer)[place.offset : place.offset + place.size_bytes]


def torch_view(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    """Return `array` as a torch tensor on the same bytes; `dtype` names the true dtype behind a stand-in."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, dtype)) if dtype in STAND_INS else tensor


def offset_in(arena: HostArena, array: np.ndarray) -> int | None:
    """Return where in `arena` a contiguous array's bytes begin, or None when they lie elsewhere."""
    base = np.frombuffer(arena.buffer, np.uint8, 1).ctypes.data
    start = array.ctypes.data - base
    inside = start >= 0 and start + array.nbytes <= arena.size_bytes
    return start if inside and array.flags.c_contiguous else None
