"""Tasks of YOLO models: the last layer of each, the outputs, and the conversion of a picture's rows.

A row of a network's output after suppression is float32: box of 4 numbers, score, class, and the numbers of its task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftline.nodes.classify import CONFIDENCE
from weftline.nodes.detections import Detections
from weftline.nodes.letterbox import Fit
from weftline.nodes.ports import Port, port
from weftline.nodes.shapes import COCO_POINTS, corners_of, keypoints_json, oriented_json, points_json

_DETECTIONS = port("detections", "detections", about="boxes, classes and scores, most confident first")
_MAP = port(
    "map", "int32[H, W]", about="object of every pixel: its place among the detections, from 1; 0 for none; where "
    "masks overlap, the most confident",
)  # fmt: skip
_SEGMENTS = port(
    "segments", "json", about="the masks, largest first: label, class, id (its number in the map), share (of all "
    "pixels) and score",
)  # fmt: skip
_MASKS = port("masks", "json", about="the whole mask of each detection as COCO's run lengths: size and counts")
_KEYPOINTS = port(
    "keypoints", "json", about="for each detection: name, score, box as [x1, y1, x2, y2], and points: name, x, y, and "
    "score where the model has one, in pixels",
)  # fmt: skip
_ORIENTED = port(
    "oriented", "json", about="for each detection: name, score, box as [cx, cy, width, height] in pixels, angle in "
    "radians from the x axis towards the y axis, and the 4 corners",
)  # fmt: skip
_UPRIGHT = port("detections", "detections", about="upright boxes around the oriented ones, cut at the picture's edges")
_LABELS = (
    port("label", "text", about="the likeliest label"),
    CONFIDENCE,
    port("scores", "json", about="the likeliest labels with their probabilities: label, score; highest first"),
)


@dataclass(frozen=True, slots=True)
class YoloTask:
    """One task of ultralytics.

    name:    value of option `task`.
    network: class of ultralytics.nn.tasks that builds a model for it.
    heads:   classes of the last layer of such models.
    about:   what such a model does, as a phrase.
    outputs: the output ports.
    """

    name: str
    network: str
    heads: tuple[str, ...]
    about: str
    outputs: tuple[Port, ...]


DETECT = YoloTask("detect", "DetectionModel", ("Detect", "v10Detect"), "finds objects", (_DETECTIONS,))
SEGMENT = YoloTask(
    "segment", "SegmentationModel", ("Segment", "Segment26"), "marks the pixels of objects",
    (_DETECTIONS, _MAP, _SEGMENTS, _MASKS),
)  # fmt: skip
POSE = YoloTask("pose", "PoseModel", ("Pose", "Pose26"), "marks keypoints of objects", (_DETECTIONS, _KEYPOINTS))
OBB = YoloTask("obb", "OBBModel", ("OBB", "OBB26"), "finds objects in oriented boxes", (_UPRIGHT, _ORIENTED))
CLASSIFY = YoloTask("classify", "ClassificationModel", ("Classify",), "labels whole pictures", _LABELS)

TASKS: Mapping[str, YoloTask] = {task.name: task for task in (DETECT, SEGMENT, POSE, OBB, CLASSIFY)}
"""The tasks by name."""

NETWORKS: Mapping[str, YoloTask] = {"WorldModel": DETECT, **{task.network: task for task in TASKS.values()}}
"""Classes of ultralytics.nn.tasks that this node runs."""

HEADS: Mapping[str, YoloTask] = {head: task for task in TASKS.values() for head in task.heads}


def default_points(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the names of the keypoints of a model that names none: COCO's where it finds persons with 17."""
    if tuple(names) == ("person",) and count == len(COCO_POINTS):
        return COCO_POINTS
    return tuple(map(str, range(count)))


Answer = Mapping[str, Any]
"""The outputs for one picture by port."""


def detected(rows: np.ndarray, place: Fit, names: tuple[str, ...]) -> Detections:
    """Return rows, most confident first, as Detections of the original picture."""
    return Detections(place.to_picture(rows[:, :4]), rows[:, 4].copy(), rows[:, 5].astype(np.int32), names)


def with_keypoints(rows: np.ndarray, place: Fit, names: tuple[str, ...], points: tuple[str, ...]) -> Answer:
    """Return the outputs of task pose: rows hold x and y of every keypoint, and a score in models that have one."""
    found = detected(rows, place, names)
    numbers = rows[:, 6:].reshape(len(rows), len(points), (rows.shape[1] - 6) // len(points))
    coordinates = place.points_to_picture(numbers[:, :, :2])
    scores = numbers[:, :, 2] if numbers.shape[2] > 2 else [None] * len(rows)
    listed = [points_json(points, own, score) for own, score in zip(coordinates, scores, strict=True)]
    return {"detections": found, "keypoints": keypoints_json(found, listed)}


def with_angles(rows: np.ndarray, place: Fit, names: tuple[str, ...]) -> Answer:
    """Return the outputs of task obb: boxes of rows are centre, width and height, and the last number is the angle."""
    boxes, angles = place.centred_to_picture(rows[:, :4]), rows[:, -1]
    corners = corners_of(boxes, angles)
    edges = np.array([place.width, place.height] * 2, np.float32)
    upright = np.clip(np.concatenate([corners.min(1), corners.max(1)], 1), 0, edges).astype(np.float32)
    found = Detections(upright, rows[:, 4].copy(), rows[:, 5].astype(np.int32), names)
    return {"detections": found, "oriented": oriented_json(found, boxes, angles)}
