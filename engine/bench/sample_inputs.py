"""Synthetic inputs generated from the types of a pipeline's ports.

Texts are random words, pictures noise of 640 by 480, recordings three seconds of noise. Named sizes are 16, lists have
three elements, json is {}. The same seed generates the same inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.nodes.detections import Detections
from weftline.nodes.ports import AUDIO_HZ, PortType
from weftline.shm.spec import STAND_INS

if TYPE_CHECKING:  # workers import this module when they start
    from weftline.pipelines.placement.plan import Plan
    from weftline.pipelines.spec.graph import Input

WORDS = ("a", "quiet", "river", "carries", "small", "boats", "past", "seven", "children", "on", "the", "bridge")
TEXT_WORDS, IMAGE_SIZE, AUDIO_S, NAMED_SIZE, LIST_ITEMS, BYTES = 12, (640, 480), 3.0, 16, 3, 1000
"""Sizes: words, pixels (width, height), seconds, one dimension, elements, bytes."""


def sample_input(plan: Plan, given: Input, seed: int) -> Any:
    """Return a value for one input of a pipeline, within its limits of pixels and seconds."""
    draw = np.random.default_rng([seed, *given.name.encode()])
    pixels_max = given.pixels_max or plan.limits.pixels_max
    seconds_max = given.seconds_max or plan.limits.seconds_max
    return _value(plan.input_types[given.name], draw, pixels_max, seconds_max)


def sample_text(type: PortType) -> str:
    """Describe the sample of a type in a few words."""
    if type.kind == "list" and type.item is not None:
        return f"lists of {LIST_ITEMS}: {sample_text(type.item)}"
    return {
        "text": f"{TEXT_WORDS} words at random",
        "any": f"{TEXT_WORDS} words at random",
        "image": f"noise of {IMAGE_SIZE[0]}x{IMAGE_SIZE[1]}",
        "audio": f"{AUDIO_S:g} s of noise",
        "json": "{}",
        "bytes": f"{BYTES} bytes at random",
        "detections": f"{LIST_ITEMS} boxes",
    }.get(type.kind, f"numbers at random, {type.dtype or 'float32'}{list(_shape(type))}")


def _value(type: PortType, draw: np.random.Generator, pixels_max: int, seconds_max: float) -> Any:
    width, height = IMAGE_SIZE
    match type.kind:
        case "list" if type.item is not None:
            return [_value(type.item, draw, pixels_max, seconds_max) for _ in range(LIST_ITEMS)]
        case "text" | "any":
            return " ".join(WORDS[index] for index in draw.integers(0, len(WORDS), TEXT_WORDS))
        case "image":
            shrunk = min(1.0, (pixels_max / (width * height)) ** 0.5)
            shape = (max(int(height * shrunk), 1), max(int(width * shrunk), 1), 3)
            return draw.integers(0, 256, shape, np.uint8)
        case "audio":
            samples = max(int(min(AUDIO_S, seconds_max) * AUDIO_HZ), 1)
            return draw.uniform(-0.1, 0.1, samples).astype(np.float32)
        case "json":
            return {}
        case "bytes":
            return draw.bytes(BYTES)
        case "detections":
            return _detections(draw)
        case _:
            return sample_tensor(type, draw)


def sample_tensor(type: PortType, draw: np.random.Generator) -> np.ndarray:
    """Return a tensor of a type: floats from 0 to 1, integers from 0 to 9, which are valid indexes for most models."""
    dtype, shape = type.dtype or "float32", _shape(type)
    if dtype in STAND_INS:  # all bits zero is zero in each of them
        return np.zeros(shape, STAND_INS[dtype])
    kind = np.dtype(dtype).kind
    if kind == "b":
        return draw.random(shape) < 0.5
    return draw.integers(0, 10, shape).astype(dtype) if kind in "iu" else draw.random(shape).astype(dtype)


def _shape(type: PortType) -> tuple[int, ...]:
    dims = (NAMED_SIZE,) if type.dims is None else type.dims
    return tuple(dim if isinstance(dim, int) else NAMED_SIZE for dim in dims)


def _detections(draw: np.random.Generator) -> Detections:
    corner, size = draw.uniform(0, 200, (LIST_ITEMS, 2)), draw.uniform(20, 200, (LIST_ITEMS, 2))
    boxes = np.concatenate([corner, corner + size], axis=1).astype(np.float32)
    scores = np.sort(draw.uniform(0.5, 1, LIST_ITEMS).astype(np.float32))[::-1]
    return Detections(
        boxes, np.ascontiguousarray(scores), np.arange(LIST_ITEMS, dtype=np.int32), ("cup", "bowl", "jar")
    )
