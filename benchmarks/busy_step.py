"""A step that computes for a known time: multiplications of matrices, so many for a call and so many for an item."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from weftline.node import Batch, BatchNode, OpenContext, Outputs, Ports, StepContext, port

SIDE = 96


@dataclass(frozen=True, slots=True)
class BusyConfig:
    """Options of `Busy`: multiplications for a call, and for each item in it."""

    call: int = 10
    item: int = 1


class Busy(BatchNode):
    """Passes texts on after work that keeps one core busy."""

    Config: ClassVar[type[Any]] = BusyConfig
    heavy: ClassVar[bool] = True

    @classmethod
    def ports(cls, config: BusyConfig, step: StepContext) -> Ports:
        return Ports((port("value", "text"),), (port("value", "text"),))

    def open(self, context: OpenContext) -> None:
        self._matrix = np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32) / SIDE

    def run(self, batch: Batch) -> Outputs:
        multiply(self._matrix, self.config.call + self.config.item * len(batch))
        return {"value": list(batch["value"])}


def multiply(matrix: np.ndarray, times: int) -> None:
    product = matrix
    for _ in range(times):
        product = matrix @ product


def multiplications(ms: float) -> int:
    """Return how many take so long on an idle core."""
    matrix = np.ones((SIDE, SIDE), np.float32) / SIDE
    multiply(matrix, 500)
    took_ms = []
    for _ in range(5):
        start = time.perf_counter()
        multiply(matrix, 500)
        took_ms.append((time.perf_counter() - start) * 1000)
    return max(1, round(ms / (min(took_ms) / 500)))


def values(count: int, first: int) -> Sequence[str]:
    return [f"text {number}" for number in range(first, first + count)]
