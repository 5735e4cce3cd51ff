"""The function steps of the small examples: plain Python, its ports read from the annotations.

A pipeline names one as `node: function` with `function: functions.py:label`. `Annotated[np.ndarray, "image"]` says both
what a type checker wants to know and what the port carries.
"""

from typing import Annotated

import numpy as np
from PIL import Image

SIDE_PX = 32
"""What the shape classifier looks at: a square of this many pixels a side."""

SHAPES = ("circle", "square", "triangle", "star")
"""The shape classifier's classes, in the order of its scores."""


def shrink(photo: Annotated[np.ndarray, "image"]) -> Annotated[np.ndarray, "float32[3, 32, 32]"]:
    """Return a picture, uint8 [H, W, 3], as the shape classifier wants it: float32 [3, 32, 32], 0 to 1.

    The picture should show one object and little around it; its sides are squeezed to a square.
    """
    small = Image.fromarray(np.ascontiguousarray(photo)).resize((SIDE_PX, SIDE_PX), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(small, np.float32).transpose(2, 0, 1) / np.float32(255))


def label(scores: Annotated[np.ndarray, "float32[4]"]) -> str:
    """Return the name of the likeliest shape."""
    return SHAPES[int(scores.argmax())]


def cosine(
    one: Annotated[np.ndarray, "float32[D]"], other: Annotated[np.ndarray, "float32[D]"]
) -> Annotated[float, "json"]:
    """Return the cosine of the angle between two embeddings: 1 for the same direction, 0 for unrelated ones."""
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    if lengths == 0:
        raise ValueError("an embedding of length 0 has no direction")
    return float(one @ other) / lengths
