"""Out-of-memory errors are recognised by class or message, and limit the size of the next batches."""

from __future__ import annotations

import pytest

from weftline.nodes.out_of_memory import FULL_BATCHES, BatchSizeLimit, is_out_of_memory


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


def test_each_failure_halves_the_limit_in_whole_units_down_to_one() -> None:
    limit = BatchSizeLimit(512, 16)
    assert [limit.out_of_memory(512), limit.size] == [True, 256]
    assert [limit.out_of_memory(100), limit.size] == [True, 48]
    assert [limit.out_of_memory(48), limit.size] == [True, 16]
    assert [limit.out_of_memory(16), limit.size] == [False, 16]
    assert [limit.out_of_memory(0), limit.size] == [False, 16], "a round without prompt tokens does not change it"
    assert limit.failures == 5


def test_without_a_unit_the_limit_goes_down_to_one() -> None:
    limit, sizes = BatchSizeLimit(8), []
    for _ in range(4):
        limit.out_of_memory(limit.size)
        sizes.append(limit.size)
    assert sizes == [4, 2, 1, 1]


def test_a_failed_batch_above_the_limit_counts_as_one_of_the_limit() -> None:
    limit = BatchSizeLimit(64, 16)
    limit.out_of_memory(64)
    assert [limit.out_of_memory(500), limit.size] == [True, 16]


def test_full_batches_double_it_up_to_the_configured_size() -> None:
    limit = BatchSizeLimit(100, 16)
    limit.out_of_memory(100)
    assert limit.size == 48
    assert not any(limit.succeeded(47) for _ in range(2 * FULL_BATCHES)), "there may be no memory for one more"
    assert [limit.succeeded(48) for _ in range(FULL_BATCHES)] == [False] * (FULL_BATCHES - 1) + [True]
    assert limit.size == 96
    assert [limit.succeeded(96) for _ in range(FULL_BATCHES)][-1] and limit.size == 100
    assert not limit.succeeded(100)


def test_a_failure_restarts_the_count_of_full_batches() -> None:
    limit = BatchSizeLimit(64, 16)
    limit.out_of_memory(64)
    for _ in range(FULL_BATCHES - 1):
        limit.succeeded(32)
    limit.out_of_memory(0)
    assert not limit.succeeded(32) and limit.size == 32


def test_batches_of_less_than_a_unit_are_not_halved() -> None:
    limit = BatchSizeLimit(8, 16)
    assert not limit.out_of_memory(8)
    assert (limit.size, limit.half(17), limit.half(16)) == (8, 16, 0)
