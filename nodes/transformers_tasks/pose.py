"""Task keypoint-detection: keypoints of objects by ViTPose, top-down: a detector found the objects before."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftline.nodes.classify import labels_of
from weftline.nodes.contract import Batch, ConfigError, Outputs, StepContext
from weftline.nodes.detections import Detections
from weftline.nodes.device_tensors import as_torch
from weftline.nodes.hugging_face import POSE
from weftline.nodes.ports import Ports, port
from weftline.nodes.shapes import POINTS_MAX, points_json
from weftline.nodes.transformers_tasks.images import ImageTask
from weftline.nodes.transformers_tasks.task import (
    ROWS_MAX,
    Model,
    TransformersConfig,
    check_labels,
    check_threshold,
)

ITEMS_MAX = 64
"""Default of option `items_max`."""

COORDINATE_MAX = 1e6
"""Largest accepted coordinate of a box, in pixels."""


@dataclass(frozen=True, slots=True)
class Crop:
    """A box of one picture to look at: item of the batch, place in the item's answer, and x, y, width, height."""

    item: int
    place: int
    box: list[float]


class KeypointDetection(ImageTask):
    """Keypoints of detected objects. Boxes of all pictures of a batch share calls of at most ROWS_MAX."""

    name = "keypoint-detection"
    auto_class = "VitPoseForPoseEstimation"
    kinds = (POSE,)
    expected = "a model that marks keypoints of objects (VitPoseForPoseEstimation)"
    options = ("labels", "threshold", "items_max", "dataset")
    post = "post_process_pose_estimation"

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        self._points = labels_of(model.config, model.shown)
        self._dataset = (config.dataset or 0) if _experts(model.config) > 1 else None

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        if not 2 <= len(labels_of(found, shown)) <= POINTS_MAX:
            raise ConfigError("model", f"{shown} has {len(labels_of(found, shown))} keypoints", f"2 to {POINTS_MAX}")
        if importlib.util.find_spec("scipy") is None:
            fix = "pip install scipy"
            raise ConfigError("model", "ViTPose's image processor needs package scipy, which is not installed", "", fix)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        check_threshold(config)
        _check_boxes(config, "detections" in step.wired)
        _check_dataset(config, found)
        about = (
            "for each object: name and score of its detection, box as [x1, y1, x2, y2], and points: name, x, y and "
            "score of every keypoint, in pixels"
        )
        return Ports(
            (
                port("image", "image", about="the picture"),
                port("detections", "detections", optional=True, about="the objects; not wired: the whole picture"),
            ),
            (port("keypoints", "json", about=about),),
        )

    def run(self, batch: Batch) -> Outputs:
        answers: list[list[dict[str, Any]]] = []
        crops: list[Crop] = []
        for item, (image, found) in enumerate(zip(batch["image"], batch.get("detections"), strict=True)):
            edges, about = _whole(image) if found is None else self._chosen(found)
            boxes = [_usable(own) for own in edges.tolist()]
            crops += [Crop(item, place, box) for place, box in enumerate(boxes) if box]
            shown = np.round(edges.astype(np.float64), 2).tolist()
            answers.append([{**one, "box": box, "points": []} for one, box in zip(about, shown, strict=True)])
        for crop, points in self._found(batch["image"], crops):
            answers[crop.item][crop.place]["points"] = points
        return {"keypoints": answers}

    def _chosen(self, found: Detections) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Return the boxes x1 y1 x2 y2 of the detections to look at, and the name and score of each."""
        wanted = self.config.labels
        places = [place for place, label in enumerate(found.labels) if wanted is None or label in wanted]
        places = places[: self.config.items_max or ITEMS_MAX]
        about = [
            {"name": found.names[found.classes[place]], "score": round(float(found.scores[place]), 4)}
            for place in places
        ]
        return found.boxes[places], about

    def _found(self, images: Sequence[Any], crops: Sequence[Crop]) -> Iterator[tuple[Crop, list[dict[str, Any]]]]:
        """Yield the keypoints of every crop."""
        for start in range(0, len(crops), ROWS_MAX):
            part = crops[start : start + ROWS_MAX]
            output = self.model(self._cut(images, part))
            output.heatmaps = output.heatmaps.float()
            (found,) = self._post(output, [[crop.box for crop in part]], threshold=self.config.threshold)
            for crop, one in zip(part, found, strict=True):
                names = [self._points[label] for label in one["labels"].tolist()]
                yield crop, points_json(names, one["keypoints"].numpy(), one["scores"].numpy())

    def _cut(self, images: Sequence[Any], crops: Sequence[Crop]) -> dict[str, Any]:
        """Return the arguments of the network for crops, which are in the order of their pictures."""
        import torch

        boxes: dict[int, list[list[float]]] = {}
        for crop in crops:
            boxes.setdefault(crop.item, []).append(crop.box)
        pixels = [
            self._processor(
                images=[as_torch(images[item])], boxes=[own], input_data_format="channels_last", return_tensors="pt"
            )["pixel_values"]
            for item, own in boxes.items()
        ]
        inputs = {"pixel_values": torch.cat(pixels)}
        if self._dataset is not None:
            inputs["dataset_index"] = torch.full((len(crops),), self._dataset)
        return inputs


def _whole(image: Any) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Return the box of a whole picture, and nothing about its object."""
    return np.array([[0, 0, image.shape[1], image.shape[0]]], np.float32), [{}]


def _usable(edges: Sequence[float]) -> list[float]:
    """Return a box x1 y1 x2 y2 as x, y, width and height; [] for one that is empty, not finite or far away."""
    x1, y1, x2, y2 = edges
    if not all(abs(edge) <= COORDINATE_MAX for edge in edges) or min(x2 - x1, y2 - y1) < 0 or max(x2 - x1, y2 - y1) < 1:
        return []
    return [x1, y1, x2 - x1, y2 - y1]


def _check_boxes(config: TransformersConfig, wired: bool) -> None:
    for option in ("labels", "items_max"):
        if getattr(config, option) is not None and not wired:
            fix = "wire detections, or leave the option out"
            raise ConfigError(option, "input detections is not wired", "detections to choose from", fix)
    if config.labels is not None:
        check_labels(config.labels)
    if config.items_max is not None and not 1 <= config.items_max <= ROWS_MAX * 16:
        raise ConfigError("items_max", f"{config.items_max}", f"a count from 1 to {ROWS_MAX * 16}")


def _check_dataset(config: TransformersConfig, found: Mapping[str, Any] | None) -> None:
    """Raise ConfigError unless option `dataset` is an expert of the model."""
    if config.dataset is None or found is None:
        return
    experts = _experts(found)
    if experts < 2:
        raise ConfigError("dataset", "the model has no experts for data sets", "no dataset", "leave it out")
    if not 0 <= config.dataset < experts:
        raise ConfigError("dataset", f"{config.dataset}", f"0 to {experts - 1}, one of the model's {experts} experts")


def _experts(found: Mapping[str, Any]) -> int:
    """Return the number of experts of a ViTPose model by its config.json, 1 for a model without."""
    inner = found.get("backbone_config")
    count = inner.get("num_experts") if isinstance(inner, Mapping) else None
    return count if type(count) is int else 1
