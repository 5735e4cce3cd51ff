"""Device memory that a resize of KV memory takes and returns, at the size of a card: 64 tensors of bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.llm.gpu.caching_allocator import GRAIN, MIB, CachingAllocator, ModelTensor
from weftline.engine.llm.attention import LayerPages
from weftline.engine.llm.kv_memory import torch_allocator
from weftline.engine.llm.runner import Runner
from weftline.shm.device.growable import GrowableMemory

LAYERS, HEADS, WIDTH, PAGE = 32, 8, 128, 16
PAGE_MIB = 2 * LAYERS * HEADS * WIDTH * PAGE * 2 / MIB


def moved(sizes_mib: Iterable[int], monkeypatch: pytest.MonkeyPatch, empties: bool) -> tuple[list[int], int]:
    """Resize a runner's pages whose tensors move; return the MiB that it holds after each size, and the peak.

    empties: whether torch's cache is emptied when the runner asks for it.
    """
    allocator = CachingAllocator()
    monkeypatch.setattr(torch.cuda, "empty_cache", allocator.empty_cache if empties else lambda: None)
    like: Any = ModelTensor(allocator, (0,))
    layers = [LayerPages(None, kv_heads=HEADS, widths=(WIDTH, WIDTH)) for _ in range(LAYERS)]  # type: ignore[arg-type]
    first, *others = [round(size / PAGE_MIB) for size in sizes_mib]
    for layer in layers:
        layer.bind(first * PAGE, torch_allocator(like))
    runner: Any = SimpleNamespace(
        graphs=None, _kv_driver=None, page_tokens=PAGE, pages=first, _layers=layers, device=like.device
    )
    held, allocator.peak = [allocator.held // MIB], 0
    for pages in others:
        Runner.resize(runner, pages)
        allocator.empty_cache()  # as the next caller that needs memory does
        held.append(allocator.held // MIB)
    return held, allocator.peak // MIB


class Chunks:
    """Driver that counts the mapped memory, and holds none."""

    device = "cuda:0"

    def __init__(self) -> None:
        self.mapped = self.peak = 0

    def granularity(self) -> int:
        return GRAIN

    def reserve(self, size_bytes: int) -> int:
        return 1 << 40

    def create(self, size_bytes: int) -> int:
        return 1

    def map(self, memory: int, size_bytes: int, writable: bool, at: int) -> int:
        self.mapped += size_bytes
        self.peak = max(self.peak, self.mapped)
        return at

    def unmap(self, address: int, size_bytes: int, reserved: bool) -> None:
        self.mapped -= size_bytes

    def release(self, memory: int) -> None:
        pass

    def unreserve(self, address: int, size_bytes: int) -> None:
        pass


def in_place(sizes_mib: Iterable[int]) -> tuple[list[int], int]:
    """Return the same of memory that grows in place."""
    driver: Any = Chunks()
    first, *others = sizes_mib
    memories = [GrowableMemory(driver, 128 << 30, first * MIB // 64) for _ in range(64)]
    held = []
    for size in (first, *others):
        driver.peak = 0
        for memory in memories:
            memory.resize(size * MIB // 64)
        held.append(driver.mapped // MIB)
    return held, driver.peak // MIB


def test_a_cache_that_is_not_emptied_keeps_what_a_shrink_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = moved([40_000, 35_008], monkeypatch, empties=False)
    assert held[0] - held[1] <= 2 * 80  # of 4 992: each layer's memory becomes the next one's
    held, peak = moved([32_000, 40_000], monkeypatch, empties=False)
    assert peak > 70_000  # and none of it is large enough for the next one's


def test_tensors_that_move_return_what_a_shrink_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    held, peak = moved([40_000, 35_008, 40_000], monkeypatch, empties=True)
    assert held[0] - held[1] >= 4_900 and held[2] == held[0]
    assert peak <= held[2] + 2 * 626  # keys and values of one layer exist twice


def test_memory_in_place_returns_a_shrink_and_grows_without_more() -> None:
    held, peak = in_place([40_000, 35_008])
    assert held[0] - held[1] >= 4_900
    held, peak = in_place([32_000, 40_000])
    assert held[1] <= peak <= 40_000 + 64 * GRAIN // MIB
