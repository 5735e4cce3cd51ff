"""Shapes of objects beyond upright boxes, as JSON: keypoints, oriented boxes, and masks as run lengths.

Each list has one dict per object. Coordinates are pixels of the picture, angles are radians.

    keypoints   {name, score, box: [x1, y1, x2, y2], points: [{name, x, y, score}, ...]}
    oriented    {name, score, box: [cx, cy, width, height], angle, corners: [[x, y], ...]}
    masks       {size: [height, width], counts}

A mask is in the compressed run-length encoding of COCO, which pycocotools and other tools read: runs of 0 and 1 in
turn, column by column, starting with 0, each run as text of 5 bits per character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftline.nodes.detections import Detections

POINTS_MAX = 1000
"""Most keypoints of one object; whole-body models have 133."""

COCO_POINTS = (
    "nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow",
    "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle",
    "right_ankle",
)  # fmt: skip
"""Keypoints of a person in COCO's order."""


def points_json(
    names: Sequence[str], coordinates: np.ndarray, scores: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Return the keypoints of one object: name, x, y, and score where there are scores.

    coordinates: float [points, 2], x and y in pixels. scores: float [points].
    """
    rounded = np.round(coordinates.astype(np.float64), 2).tolist()
    points: list[dict[str, Any]] = [{"name": name, "x": x, "y": y} for name, (x, y) in zip(names, rounded, strict=True)]
    if scores is not None:
        for point, score in zip(points, np.round(scores.astype(np.float64), 4).tolist(), strict=True):
            point["score"] = score
    return points


def keypoints_json(found: Detections, points: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return port `keypoints`: each detection as a dict, with the keypoints of the object."""
    return [{**one, "points": list(own)} for one, own in zip(found.to_json(), points, strict=True)]


def oriented_json(found: Detections, boxes: np.ndarray, angles: np.ndarray) -> list[dict[str, Any]]:
    """Return port `oriented`: name, score, box as [cx, cy, width, height], angle, and corners.

    found:  the same objects with upright boxes. boxes: float [objects, 4]. angles: float [objects], in radians, from
            the x axis towards the y axis.
    """
    corners = np.round(corners_of(boxes, angles).astype(np.float64), 2).tolist()
    rounded = np.round(boxes.astype(np.float64), 2).tolist()
    return [
        {"name": one["name"], "score": one["score"], "box": box, "angle": round(float(angle), 6), "corners": four}
        for one, box, angle, four in zip(found.to_json(), rounded, angles, corners, strict=True)
    ]


def corners_of(boxes: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Return float [objects, 4, 2] corners of boxes [objects, 4] of centre, width and height, turned by `angles`."""
    along = np.stack([np.cos(angles), np.sin(angles)], -1) * boxes[:, 2:3] / 2
    across = np.stack([-np.sin(angles), np.cos(angles)], -1) * boxes[:, 3:4] / 2
    centre = boxes[:, :2]
    return np.stack(
        [centre + along + across, centre + along - across, centre - along - across, centre - along + across], 1
    )


def encode_mask(mask: np.ndarray, inside: tuple[slice, slice] | None = None) -> dict[str, Any]:
    """Return a mask, bool or uint8 [H, W] of 0 and 1, as COCO's compressed run lengths.

    inside: rows and columns outside of which the mask is 0; None: not known.
    """
    height, width = mask.shape
    rows, columns = inside or (slice(0, height), slice(0, width))
    part = mask[rows, columns].T
    padded = np.zeros((part.shape[0], part.shape[1] + 2), np.uint8)  # with a 0 at both ends of each column
    padded[:, 1:-1] = part
    x, y = np.divmod(np.flatnonzero(padded[:, 1:] != padded[:, :-1]), part.shape[1] + 1)
    edges = (x + columns.start) * height + y + rows.start
    joined = np.flatnonzero(edges[1:] == edges[:-1])  # a run that goes on at the top of the next column
    edges = np.delete(edges, np.concatenate([joined, joined + 1]))
    edges = edges[edges < height * width]
    counts = np.diff(np.concatenate([[0], edges, [height * width]]))
    return {"size": [height, width], "counts": _to_text(counts)}


def decode_mask(rle: Mapping[str, Any], height: int, width: int) -> np.ndarray:
    """Return a mask bool [height, width] from `encode_mask`'s form; ValueError unless it is one of that size."""
    size, text = rle.get("size"), rle.get("counts")
    if size != [height, width] or not isinstance(text, str) or not text.isascii() or len(text) > 8 * height * width + 8:
        raise ValueError(f"no run lengths of a mask of {height} x {width} pixels")
    counts = _from_text(text)
    if (counts < 0).any() or (counts > height * width).any() or counts.sum() != height * width:
        raise ValueError("the run lengths do not fill the mask")
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    mask: np.ndarray = flat.reshape(width, height).T
    return mask


_CHARS_MAX = 7
"""Most characters of one run: 35 bits."""


def _to_text(counts: np.ndarray) -> str:
    """Return run lengths as COCO's text: from the fourth on, the difference to the second last; 5 bits a character."""
    values = counts.astype(np.int64)
    values[3:] = counts[3:] - counts[1:-2]
    shifts = 5 * np.arange(_CHARS_MAX)
    bits = (values[:, None] >> shifts) & 31
    rest = values[:, None] >> (shifts + 5)
    more = np.where(bits & 16, rest != -1, rest != 0)
    written = np.concatenate([np.ones((len(values), 1), bool), np.logical_and.accumulate(more, 1)[:, :-1]], 1)
    text: bytes = ((bits | (more << 5)) + 48)[written].astype(np.uint8).tobytes()
    return text.decode("ascii")


def _from_text(text: str) -> np.ndarray:
    """Return the run lengths, int64, of COCO's text; ValueError for any other text."""
    codes = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - 48
    if not len(codes) or (codes < 0).any() or (codes > 63).any() or codes[-1] & 32:
        raise ValueError("no text of run lengths")
    last = np.flatnonzero(codes & 32 == 0)
    first = np.concatenate([[0], last[:-1] + 1])
    lengths = last - first + 1
    if lengths.max() > _CHARS_MAX:
        raise ValueError("a run length of too many characters")
    places = np.arange(len(codes)) - np.repeat(first, lengths)
    values = np.add.reduceat((codes & 31) << (5 * places), first)
    values -= np.where(codes[last] & 16, np.int64(1) << (5 * lengths), 0)
    values[1::2] = np.cumsum(values[1::2])
    values[2::2] = np.cumsum(values[2::2])
    return values
