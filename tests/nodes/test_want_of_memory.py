"""Want of memory is known by its class, or by the words of those who have none for it."""

from __future__ import annotations

import pytest

from weftline.nodes.want_of_memory import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class DeviceOutOfMemory(Exception):
    """Named as our drivers'."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), OutOfMemoryError("anything"), DeviceOutOfMemory("allocate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError("std::bad_alloc"),
    ],
)  # fmt: skip
def test_these_say_that_there_was_no_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("CUDA out of memory"), OSError(12, "no")])
def test_these_say_something_else(error: Exception) -> None:
    assert not is_out_of_memory(error)
