"""Detections: the objects found in one image."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Detections:
    """Objects found in one image, highest score first.

    boxes:   float32 [objects, 4], x1 y1 x2 y2 in pixels of the image.
    scores:  float32 [objects], 0 to 1.
    classes: int32 [objects], index into `names`.
    names:   class names.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def labels(self) -> list[str]:
        """Class name of each object."""
        return [self.names[index] for index in self.classes]

    def to_json(self) -> list[dict[str, Any]]:
        """Return one dict per object: name, score, and box as [x1, y1, x2, y2] in pixels."""
        return [
            {"name": name, "score": round(float(score), 4), "box": [round(float(v), 2) for v in box]}
            for name, score, box in zip(self.labels, self.scores, self.boxes, strict=True)
        ]

    def describe(self) -> str:
        """Return '2 red circles, 1 blue star': most frequent first, then by name; 'nothing' without objects."""
        counts = sorted(Counter(self.labels).items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{n} {name}{'s' if n != 1 else ''}" for name, n in counts) or "nothing"
