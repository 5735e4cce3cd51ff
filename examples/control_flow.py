"""The function steps of control_flow.yaml: plain Python, each a few lines."""

import colorsys
from collections import Counter
from typing import Annotated

import numpy as np

from weftline import Detections

HUES = {"red": 0, "orange": 30, "yellow": 55, "green": 130, "blue": 220, "purple": 280}
"""Where each colour lies on the circle of hues, in degrees."""

COLOURLESS_MAX = 0.15
"""Least saturation, from 0 to 1, of what has a colour."""


def colour(crop: Annotated[np.ndarray, "image"]) -> str:
    """Return the name of a picture's colour: the one nearest to the hue of its most colourful third."""
    pixels = crop.reshape(-1, 3).astype(np.float32) / 255
    spread = np.ptp(pixels, axis=1)
    red, green, blue = np.median(pixels[spread >= np.quantile(spread, 2 / 3)], axis=0).tolist()
    hue, saturation, _ = colorsys.rgb_to_hsv(red, green, blue)
    if saturation < COLOURLESS_MAX:
        return "grey"
    return min(HUES, key=lambda name: abs((hue * 360 - HUES[name] + 180) % 360 - 180))


def kind(question: str) -> str:
    """Return what a question asks for: 'count', 'colours', or 'other'."""
    words = question.lower().replace("?", "").split()
    if words[:2] == ["how", "many"] and {"objects", "things", "shapes"} & {*words}:
        return "count"
    return "colours" if words and words[0] in ("which", "what") and {"colours", "colors"} & {*words} else "other"


def listed(colours: Annotated[list[str] | None, "list[text]"] = None) -> str:
    """Return the colours as a sentence; None stands for a step that was skipped, since there was nothing to look at."""
    if not colours:
        return "There is nothing to see."
    counts = sorted(Counter(colours).items(), key=lambda item: (-item[1], item[0]))
    return "I see " + ", ".join(f"{name} ({count})" for name, count in counts) + "."


def counted(detections: Detections) -> str:
    """Return how many objects there are, as a sentence."""
    return f"There are {len(detections)} objects."
