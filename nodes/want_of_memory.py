"""Which exceptions say that there was no memory, of the host or of a device."""

from __future__ import annotations

import re

_WORDS = re.compile(
    r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|Failed to allocate memory|Available memory of \d+ is smaller|"
    r"bad_alloc|DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
"""How frameworks say that an allocation failed when their exception's class does not."""

_CLASSES = ("OutOfMemoryError", "DeviceOutOfMemory")
"""Classes of torch and of our drivers that say it, known by name."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had no memory; torch and ONNX Runtime are known by their words, not imported."""
    if isinstance(error, MemoryError) or any(cls.__name__ in _CLASSES for cls in type(error).__mro__):
        return True
    speaks = isinstance(error, RuntimeError | OSError) or type(error).__module__.startswith("onnxruntime")
    return speaks and _WORDS.search(str(error)) is not None
