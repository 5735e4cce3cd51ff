"""Model of torch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp), for blocks above 10 MiB.

A segment is what cudaMalloc returned, a multiple of 2 MiB. A request takes the smallest free block that is large
enough, and splits it if more than 1 MiB is left; else a new segment. Free neighbours of a segment are joined. Only
segments that are free as a whole are returned to the device, by `empty_cache`, or when cudaMalloc fails.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

MIB = 1 << 20
GRAIN = 2 * MIB
LEFT_MIN = MIB


@dataclass(eq=False)
class Block:
    size: int
    free: bool = False


class CachingAllocator:
    """held: bytes of segments, what other processes see as taken.   peak: the most of it."""

    def __init__(self) -> None:
        self.segments: list[list[Block]] = []
        self.peak = 0

    @property
    def held(self) -> int:
        return sum(block.size for segment in self.segments for block in segment)

    def allocate(self, size: int) -> Block:
        size = -(-size // 512) * 512
        fitting = [
            (block.size, at, place)
            for at, segment in enumerate(self.segments)
            for place, block in enumerate(segment)
            if block.free and block.size >= size
        ]
        if not fitting:
            block = Block(-(-size // GRAIN) * GRAIN)
            self.segments.append([block])
            self.peak = max(self.peak, self.held)
            return block
        _, at, place = min(fitting)
        block = self.segments[at][place]
        if block.size - size > LEFT_MIN:
            self.segments[at].insert(place + 1, Block(block.size - size, free=True))
            block.size = size
        block.free = False
        return block

    def release(self, block: Block) -> None:
        block.free = True
        for segment in self.segments:
            for at in reversed(range(len(segment) - 1)):
                if segment[at].free and segment[at + 1].free:
                    segment[at].size += segment.pop(at + 1).size

    def empty_cache(self) -> None:
        self.segments = [segment for segment in self.segments if not all(block.free for block in segment)]


class ModelTensor:
    """Tensor of the model, as far as `TorchKvMemory` uses one: its block is free when no view of it is left."""

    device = torch.device("cuda:0")

    def __init__(self, allocator: CachingAllocator, shape: tuple[int, ...], memory: object = None) -> None:
        self.allocator, self.shape, self.memory = allocator, shape, memory

    def new_empty(self, *shape: int) -> ModelTensor:
        class Memory:
            pass

        block, memory, size = self.allocator.allocate(2 * shape[0] * shape[1] * shape[2]), Memory(), shape
        weakref.finalize(memory, self.allocator.release, block)
        return ModelTensor(self.allocator, size, memory)

    def transpose(self, first: int, second: int) -> ModelTensor:
        sizes = list(self.shape)
        sizes[first], sizes[second] = sizes[second], sizes[first]
        return ModelTensor(self.allocator, tuple(sizes), self.memory)

    def __getitem__(self, places: tuple[slice, slice]) -> ModelTensor:
        heads, slots, width = self.shape
        return ModelTensor(self.allocator, (heads, len(range(slots)[places[1]]), width), self.memory)

    def __setitem__(self, places: object, value: object) -> None:
        """Copy: the model has no contents."""
