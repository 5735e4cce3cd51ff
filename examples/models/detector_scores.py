"""How good a detector is: average precision, and the share of scenes whose contents it names exactly.

The second is what a user of the pipeline meets: one missed or doubled object makes the answer to "how many?" wrong.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from ultralytics.utils.metrics import ap_per_class, box_iou

from examples.models.detector_weights import Detector, detect_at
from examples.models.scenes import Picture, picture

IOU_LEVELS = np.linspace(0.5, 0.95, 10)
CONFIDENCES = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
IOUS = (0.45, 0.5, 0.6, 0.7)
FLOOR = 0.001
"""Least score that counts in an average precision, as in ultralytics' own validation."""
CHUNK = 25


def score(detector: Detector, split: str, count: int) -> dict[str, float]:
    """Score the first `count` scenes of a split: mAP50, mAP50-95, and exact scenes at the detector's thresholds."""
    hits: list[NDArray[np.bool_]] = []
    found: list[torch.Tensor] = []
    truth: list[NDArray[np.int64]] = []
    exact = 0
    for drawn, (boxes,) in _detected(detector, split, count, FLOOR, (detector.iou,)):
        classes = _classes(detector, drawn)
        hits.append(_hits(boxes, drawn.boxes, classes))
        found.append(boxes)
        truth.append(classes)
        exact += _exact(boxes, classes, detector.confidence)
    guesses = torch.cat(found).numpy()
    ap = ap_per_class(np.concatenate(hits), guesses[:, 4], guesses[:, 5], np.concatenate(truth))[5]
    return {
        "scenes": count,
        "objects": int(sum(map(len, truth))),
        "map50": round(float(ap[:, 0].mean()), 4),
        "map50_95": round(float(ap.mean()), 4),
        "exact_scenes": round(exact / count, 4),
        "confidence": detector.confidence,
        "iou": detector.iou,
    }


def choose_thresholds(detector: Detector, count: int) -> tuple[float, float]:
    """Return the confidence and IoU threshold with most exact scenes of the 'choose' split; ties go to the middle."""
    exact: Counter[tuple[float, float]] = Counter()
    for drawn, answers in _detected(detector, "choose", count, min(CONFIDENCES), IOUS):
        for (iou, boxes), confidence in itertools.product(zip(IOUS, answers, strict=True), CONFIDENCES):
            exact[confidence, iou] += _exact(boxes, _classes(detector, drawn), confidence)
    most = max(exact.values())
    best = sorted(pair for pair, right in exact.items() if right == most)
    for iou in IOUS:
        print(f"iou {iou}: " + ", ".join(f"{c}: {exact[c, iou] / count:.3f}" for c in CONFIDENCES))
    return best[len(best) // 2]


def _detected(
    detector: Detector, split: str, count: int, confidence: float, ious: Sequence[float]
) -> Iterator[tuple[Picture, tuple[torch.Tensor, ...]]]:
    """Yield each picture of a split with its detections at each IoU threshold."""
    for begin in range(0, count, CHUNK):
        drawn = [picture(split, index) for index in range(begin, min(count, begin + CHUNK))]
        answers = detect_at(detector, [p.image for p in drawn], confidence, ious)
        yield from zip(drawn, zip(*answers, strict=True), strict=True)


def _classes(detector: Detector, drawn: Picture) -> NDArray[np.int64]:
    return np.asarray([detector.names.index(thing.name) for thing in drawn.things], np.int64)


def _exact(boxes: torch.Tensor, classes: NDArray[np.int64], confidence: float) -> bool:
    kept = boxes[boxes[:, 4] > confidence, 5]
    return sorted(kept.int().tolist()) == sorted(classes.tolist())


def _hits(boxes: torch.Tensor, true_boxes: NDArray[np.float32], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool [D, 10]: whether each detection is the best match of a true object at each IoU level."""
    hits = np.zeros((len(boxes), len(IOU_LEVELS)), bool)
    if not len(boxes) or not len(classes):
        return hits
    overlap = box_iou(torch.from_numpy(true_boxes), boxes[:, :4]).numpy()
    overlap = overlap * (classes[:, None] == boxes[:, 5].numpy()[None, :])
    for level, least in enumerate(IOU_LEVELS):
        pairs = np.argwhere(overlap >= least)
        pairs = pairs[np.argsort(-overlap[pairs[:, 0], pairs[:, 1]], kind="stable")]
        taken: set[int] = set()
        for target, guess in pairs.tolist():
            if target not in taken and not hits[guess, level]:
                hits[guess, level] = True
                taken.add(target)
    return hits
