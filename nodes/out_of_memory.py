"""Out-of-memory: which exceptions report it, and the batch size that is tried after it.

A batch for which there was no memory halves the limit, and FULL_BATCHES full batches without a failure double it again,
up to the configured size. The scheduler limits the items of a step's batch, and the LLM engine limits the prompt tokens
of a round. Splitting and repeating the failed batch itself is left to the callers. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FULL_BATCHES = 64
"""Full batches without a failure before a lowered limit is doubled. A try that fails costs one call and loses nothing:
its items run again in smaller batches."""

_WORDS = re.compile(
    r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|Failed to allocate memory|Available memory of \d+ is smaller|"
    r"bad_alloc|DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
"""Messages of failed allocations whose exception class does not identify them."""

_CLASSES = ("OutOfMemoryError", "DeviceOutOfMemory")
"""Class names of out-of-memory errors, torch's and our drivers'. Neither is imported."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of the host or of a device."""
    if isinstance(error, MemoryError) or any(cls.__name__ in _CLASSES for cls in type(error).__mro__):
        return True
    speaks = isinstance(error, RuntimeError | OSError) or type(error).__module__.startswith("onnxruntime")
    return speaks and _WORDS.search(str(error)) is not None


@dataclass(slots=True)
class BatchSizeLimit:
    """Largest batch to try, halved by out-of-memory errors and doubled by full batches.

    most:     the configured limit.
    unit:     the limit is halved in multiples of this; a batch no larger than one unit is not halved.
    size:     the limit now.
    failures: batches for which there was no memory.
    """

    most: int
    unit: int = 1
    size: int = field(init=False)
    failures: int = field(default=0, init=False)
    _full: int = field(default=0, init=False)  # full batches since the last failure or change

    def __post_init__(self) -> None:
        self.size = self.most

    def out_of_memory(self, size: int) -> bool:
        """Count a failed batch of `size`, and halve the limit; True if the limit changed."""
        self.failures += 1
        self._full = 0
        before = self.size
        self.size = min(before, self.half(min(size, before)) or before)
        return self.size != before

    def succeeded(self, size: int) -> bool:
        """Count a batch that ran, and double the limit after enough full ones; True if the limit changed."""
        if self.size == self.most or size < self.size:
            return False
        self._full += 1
        if self._full < FULL_BATCHES:
            return False
        self._full = 0
        self.size = min(self.most, 2 * self.size)
        return True

    def half(self, size: int) -> int:
        """Return half of a batch in whole units, at least one; 0 if it is no larger than a unit."""
        if size <= self.unit:
            return 0
        return max(1, size // 2 // self.unit) * self.unit
