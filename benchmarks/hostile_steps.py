"""Steps of benchmarks/ingress_hostile_limits.py: answers many times their requests, decoded inputs, sequences."""

from collections import Counter

import numpy as np

import weftline
from weftline.node import Detections


def grows(x: "uint8[N]") -> "uint8[M]":  # noqa: F821 - port types are no names
    """Return 8 MB."""
    return np.full(8 << 20, x[0] if len(x) else 0, np.uint8)


def shape_of(x: "image") -> "json":  # noqa: F821
    """Return the sizes of a picture."""
    return list(x.shape)


def length_of(x: "audio") -> "json":  # noqa: F821
    """Return the number of samples of a recording."""
    return len(x)


def document(x: "uint8[N]") -> "json":  # noqa: F821
    """Return JSON of 20 MB."""
    return [{"name": "circle", "box": [1.5, 2.5, 3.5, 4.5]}] * 400_000


def found(x: "uint8[N]") -> "detections":  # noqa: F821
    """Return 100 000 detections."""
    boxes = np.tile(np.float32([1.5, 2.5, 3.5, 4.5]), (100_000, 1))
    return Detections(boxes, np.full(100_000, 0.5, np.float32), np.zeros(100_000, np.int32), ("circle",))


class Turns:
    """Return the number of a request in its sequence."""

    def __init__(self) -> None:
        self._turns: Counter[str] = Counter()

    def __call__(self, x: "uint8[N]") -> "json":  # noqa: F821
        part = weftline.current().sequence
        self._turns[part.id] += 1
        return self._turns[part.id]

    def end_sequence(self, id: str) -> None:
        del self._turns[id]
