"""A tensor that is not read yet: it will be read straight into the place where the first step finds it.

Bytes that somebody else could still change or take away (a client's shared memory) are copied exactly once this way,
into an arena, and looked at only there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weftline.shm.spec import TensorSpec
from weftline.shm.view import numpy_dtype


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """A dense tensor and how to get its bytes.

    read_into: fills a buffer of exactly `spec.size_bytes`, called once, in the thread that submits the request;
               InputError when the bytes are not there any more.
    """

    spec: TensorSpec
    read_into: Callable[[memoryview], None]

    def read(self) -> np.ndarray:
        """Return the tensor as an array of its own; a dtype numpy has not as its stand-in."""
        array: np.ndarray = np.empty(self.spec.shape, numpy_dtype(self.spec.dtype))
        self.read_into(array.reshape(-1).data.cast("B"))
        return array
