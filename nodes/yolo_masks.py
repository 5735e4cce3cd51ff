"""Masks of task segment: from a network's prototypes to the map and the segments of a picture.

The masks are those of ultralytics with `retina_masks`: in the size of the picture. They are computed for some objects
at a time, so that memory is bounded however many objects there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.errors import InputError
from weftline.nodes.detections import Detections
from weftline.nodes.shapes import encode_mask

if TYPE_CHECKING:
    import torch

PIXELS_MAX = 16_000_000
"""Most pixels of the masks that are computed at once, unless one mask has more."""

OBJECTS_MAX = 1000
"""Most objects of one picture in task segment."""

TEXT_BYTES_MAX = 8 << 20
"""Most bytes of the run lengths of one picture."""


def with_masks(
    found: Detections, coefficients: torch.Tensor, prototypes: torch.Tensor, height: int, width: int
) -> dict[str, Any]:
    """Return the outputs of task segment for a picture. Objects without a pixel are left out, as in ultralytics.

    coefficients: float32 [objects, masks]. prototypes: float32 [masks, height, width] of the network.

    InputError: the masks are too finely structured.
    """
    kept: list[int] = []
    segments: list[dict[str, Any]] = []
    masks: list[dict[str, Any]] = []
    marked, text_bytes = np.zeros((height, width), np.int32), 0
    for place, mask in enumerate(_masks(found.boxes, coefficients, prototypes, height, width)):
        inside = _inside(found.boxes[place])
        pixels = int(np.count_nonzero(mask[inside]))
        if not pixels:
            continue
        kept.append(place)
        own = marked[inside]
        own[(mask[inside] > 0) & (own == 0)] = len(kept)
        masks.append(encode_mask(mask, inside))
        text_bytes += len(masks[-1]["counts"])
        if text_bytes > TEXT_BYTES_MAX:
            fix = "raise `confidence` or lower `detections_max`"
            raise InputError(f"the masks take more than {TEXT_BYTES_MAX >> 20} MiB as run lengths\n    fix: {fix}")
        segments.append(_segment(found, place, len(kept), pixels / marked.size))
    visible = Detections(found.boxes[kept], found.scores[kept], found.classes[kept], found.names)
    segments.sort(key=lambda one: -float(one["share"]))
    return {"detections": visible, "map": marked, "segments": segments, "masks": masks}


def _inside(box: np.ndarray) -> tuple[slice, slice]:
    """Return the rows and columns that a box x1 y1 x2 y2 touches."""
    x1, y1, x2, y2 = box.tolist()
    return slice(math.floor(y1), math.ceil(y2)), slice(math.floor(x1), math.ceil(x2))


def _segment(found: Detections, place: int, id: int, share: float) -> dict[str, Any]:
    return {
        "label": found.names[found.classes[place]], "class": int(found.classes[place]), "id": id,
        "share": round(share, 6), "score": round(float(found.scores[place]), 6),
    }  # fmt: skip


def _masks(
    boxes: np.ndarray, coefficients: torch.Tensor, prototypes: torch.Tensor, height: int, width: int
) -> Iterator[np.ndarray]:
    """Yield the mask of each object, uint8 [height, width] of 0 and 1, cut at its box x1 y1 x2 y2 in the picture."""
    import torch
    from ultralytics.utils.ops import process_mask_native

    edges = torch.from_numpy(boxes).to(coefficients.device)
    enlarged = 16 * prototypes.shape[1] * prototypes.shape[2]  # ultralytics enlarges them up to 4 times per side
    step = max(1, PIXELS_MAX // (height * width + enlarged))
    for start in range(0, len(boxes), step):
        part = slice(start, start + step)
        yield from process_mask_native(prototypes, coefficients[part], edges[part], (height, width)).cpu().numpy()
