"""Crop node: one image region for each detection, for a `map:` step.

    see:      {node: yolo, model: yolo11n.pt, inputs: {image: photo}}
    cut:      {node: crop, size: [224, 224], inputs: {image: photo, detections: see.detections}}
    classify: {node: onnx, model: breeds.onnx, inputs: {image: cut.crops}, map: image}

Without `size` a crop is a view of the picture. The worker that shares it copies the crop's own pixels once, and nothing
for a crop of whole rows. With `size` all crops have one shape, so that the next step's batch of them is one array.

On a GPU the picture and its crops stay there. With `size` torch resizes them as Pillow does on the host, with a filter
as wide as the crop is to shrink; levels differ by at most 1 of 255, or by some more where a side shrinks more than
64-fold.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from weftline.node import (
    Batch,
    BatchNode,
    ConfigError,
    Detections,
    Outputs,
    Port,
    Ports,
    PortType,
    StepContext,
    as_torch,
    list_of,
    port,
)

if TYPE_CHECKING:
    import torch

SIDE_MAX = 16_384
"""Longest side that crops are resized to, in pixels."""

SHRINK_MAX = 64
"""Largest factor by which torch shrinks a side at once: on a GPU its filter must fit a core's shared memory."""

Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class CropConfig:
    """Options of `crop`.

    margin:     border around each box, as a share of its width and height; less at the picture's edges.
    size:       [height, width] in pixels that every crop is resized to, ignoring its proportions; None: not resized.
    items_max:  most crops of one picture; the most confident objects come first.
    min_pixels: objects of fewer pixels, margin included, are left out.
    """

    margin: float = 0.0
    size: tuple[int, int] | None = None
    items_max: int = 64
    min_pixels: int = 1


class Crop(BatchNode):
    """Crops detected objects from their picture."""

    Config: ClassVar[type[Any]] = CropConfig
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    @classmethod
    def ports(cls, config: CropConfig, step: StepContext) -> Ports:
        _check(config)
        crop = PortType("tensor", "uint8", (*config.size, 3)) if config.size is not None else PortType("image")
        return Ports(
            inputs=(port("image", "image"), port("detections", "detections")),
            outputs=(
                Port("crops", list_of(crop), about="a picture of each object, most confident first"),
                port("boxes", "json", about="for each crop: name, score, and box as [x1, y1, x2, y2] in whole pixels"),
            ),
        )

    @classmethod
    def device_ports(cls, config: CropConfig, ports: Ports) -> frozenset[str]:
        with_torch = importlib.util.find_spec("torch") is not None  # needed to crop on a GPU only
        return frozenset({"image", "crops"} if with_torch else ())

    def run(self, batch: Batch) -> Outputs:
        chosen = [self._chosen(*pair) for pair in zip(batch["image"], batch["detections"], strict=True)]
        size = self.config.size
        return {
            "crops": [
                _cut(image, boxes, size) if isinstance(image, np.ndarray) else _cut_torch(as_torch(image), boxes, size)
                for image, (boxes, _) in zip(batch["image"], chosen, strict=True)
            ],
            "boxes": [about for _, about in chosen],
        }

    def _chosen(self, image: Any, found: Detections) -> tuple[list[Box], list[dict[str, Any]]]:
        """Return the boxes to crop from one picture, in whole pixels, and a description of each."""
        config: CropConfig = self.config
        boxes: list[Box] = []
        about: list[dict[str, Any]] = []
        for place, name in enumerate(found.labels):
            if len(boxes) == config.items_max:
                break
            x1, y1, x2, y2 = box = _whole(found.boxes[place], config.margin, image.shape[1], image.shape[0])
            if (x2 - x1) * (y2 - y1) < config.min_pixels:
                continue
            boxes.append(box)
            about.append({"name": name, "score": round(float(found.scores[place]), 4), "box": list(box)})
        return boxes, about


def _check(config: CropConfig) -> None:
    if not 0 <= config.margin <= 10:
        raise ConfigError("margin", f"{config.margin}", "a share of the box from 0 to 10, such as 0.1")
    if config.size is not None and not all(1 <= side <= SIDE_MAX for side in config.size):
        raise ConfigError("size", f"{list(config.size)}", f"[height, width] in pixels, each from 1 to {SIDE_MAX}")
    for option in ("items_max", "min_pixels"):
        if getattr(config, option) < 1:
            raise ConfigError(option, f"{getattr(config, option)}", "a whole number from 1")


def _whole(box: np.ndarray, margin: float, width: int, height: int) -> Box:
    """Return the box in whole pixels with its margin, clipped to the picture; empty if nothing is left."""
    if not np.isfinite(box).all():
        return (0, 0, 0, 0)
    x1, y1, x2, y2 = map(float, box)
    across, down = (x2 - x1) * margin, (y2 - y1) * margin
    left, top = max(math.floor(x1 - across), 0), max(math.floor(y1 - down), 0)
    right, bottom = min(math.ceil(x2 + across), width), min(math.ceil(y2 + down), height)
    return (left, top, right, bottom) if right > left and bottom > top else (0, 0, 0, 0)


def _cut(image: np.ndarray, boxes: Sequence[Box], size: tuple[int, int] | None) -> list[np.ndarray]:
    crops = [image[y1:y2, x1:x2] for x1, y1, x2, y2 in boxes]
    return crops if size is None else [_resized(crop, *size) for crop in crops]


def _resized(crop: np.ndarray, height: int, width: int) -> np.ndarray:
    if crop.shape[:2] == (height, width):
        return crop
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(crop))
    return np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))


def _cut_torch(image: torch.Tensor, boxes: Sequence[Box], size: tuple[int, int] | None) -> list[torch.Tensor]:
    """Return crops on the picture's device: each in memory of its own, or with `size` adjacent in one tensor."""
    import torch

    crops = [image[y1:y2, x1:x2] for x1, y1, x2, y2 in boxes]
    if size is None:
        return [crop.contiguous() for crop in crops]
    whole = torch.empty((len(crops), *size, 3), dtype=torch.uint8, device=image.device)
    for target, crop in zip(whole, crops, strict=True):
        target.copy_(_resized_torch(crop, *size))
    return list(whole)


def _resized_torch(crop: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize uint8 [H, W, 3] to uint8 [height, width, 3], rounded to the nearest level."""
    from torch.nn.functional import interpolate

    if tuple(crop.shape[:2]) == (height, width):
        return crop
    levels = crop.permute(2, 0, 1)[None].float()
    while levels.shape[2] > SHRINK_MAX * height or levels.shape[3] > SHRINK_MAX * width:
        step = [max(-(-side // SHRINK_MAX), last) for side, last in zip(levels.shape[2:], (height, width), strict=True)]
        levels = interpolate(levels, step, mode="bilinear", antialias=True)
    levels = interpolate(levels, (height, width), mode="bilinear", antialias=True)
    return levels[0].permute(1, 2, 0).round_().clamp_(0, 255).byte()
