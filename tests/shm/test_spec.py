"""Sizes are computed in unbounded integers and capped before anything is allocated."""

import pytest

from weftline.errors import InputError
from weftline.shm.spec import ITEM_BYTES, RANK_MAX, TensorSpec, byte_size


def test_sizes_of_ordinary_tensors() -> None:
    assert byte_size("float32", (2, 3)) == 24
    assert byte_size("bfloat16", ()) == 2
    assert byte_size("uint8", (0, 5)) == 0
    assert TensorSpec("int64", (4,)).size_bytes == 32


@pytest.mark.parametrize(
    "dims",
    [(-1, -4), (2**32, 2**32), (0, 2**62), (1,) * (RANK_MAX + 1), (1.5,), (True,), ("3",)],
    ids=["negative", "overflow", "zero times huge", "rank", "fraction", "bool", "text"],
)
def test_hostile_shapes_are_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(InputError):
        byte_size("float32", dims)


def test_an_unknown_dtype_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(InputError, match="bfloat16"):
        byte_size("float31", (1,))


def test_item_bytes_agree_with_numpy() -> None:
    import numpy as np

    from weftline.shm.view import numpy_dtype

    for dtype, size in ITEM_BYTES.items():
        assert np.dtype(numpy_dtype(dtype)).itemsize == size
