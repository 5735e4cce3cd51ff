"""The bundled detector as files: a folder of config.json and model.safetensors, and what it takes to run it.

The format is called weftline-yolo. config.json holds the ultralytics architecture (a model yaml as a dictionary), the
class names, the input size and the thresholds; model.safetensors holds every tensor of the model's state dict. Neither
can run code when it is read. Weights may be stored as float16; they are always loaded as float32.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.nms import non_max_suppression

FORMAT = "weftline-yolo"
STRIDE = 32
"""Coarsest stride of the architecture; the input size is a multiple of it."""
PADDING = 114
"""Grey level around a picture that is not square, as in ultralytics."""


@dataclass(frozen=True, slots=True)
class Detector:
    """A loaded model with its config.

    names:      class names by index.
    image_size: side of the square input in pixels.
    confidence: least score of a detection that is reported.
    iou:        overlap above which the weaker of two detections of one class is dropped.
    """

    model: DetectionModel
    names: tuple[str, ...]
    image_size: int
    confidence: float
    iou: float


def load_detector(folder: Path) -> Detector:
    """Read a weftline-yolo folder. Raises ValueError that names the file and what is wrong with it."""
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    problems = list(_problems(config))
    if problems:
        raise ValueError(f"{config_path}: " + "; ".join(problems))
    model = DetectionModel(dict(config["architecture"]), ch=3, nc=len(config["names"]), verbose=False)
    weights = {name: t.float() if t.is_floating_point() else t for name, t in load_file(weights_path).items()}
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{weights_path}: does not fit the architecture in {config_path.name}: {error}") from error
    names = tuple(config["names"][str(index)] for index in range(len(config["names"])))
    return Detector(model.eval(), names, config["image_size"], config["confidence"], config["iou"])


def save_detector(folder: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write a weftline-yolo folder: convolution weights as float16, the small rest (batch norm, biases) as it is.

    Raises ValueError when a weight is not finite as float16.
    """
    stored = {}
    for name, tensor in weights.items():
        halved = tensor.is_floating_point() and tensor.ndim > 1
        stored[name] = (tensor.half() if halved else tensor).contiguous()
        if tensor.is_floating_point() and not bool(torch.isfinite(stored[name]).all()):
            raise ValueError(f"{name}: not finite in {stored[name].dtype}; train on, or store float32")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": FORMAT})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in {"format": FORMAT, **config}.items()]
    (folder / "config.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def letterbox(image: NDArray[np.uint8], side: int) -> tuple[NDArray[np.uint8], float, tuple[int, int]]:
    """Fit uint8 [H, W, 3] into a square of `side` px, as ultralytics does before inference.

    Returns the square, the scale it was resized by, and (left, top) of the picture inside it in pixels.
    """
    height, width = image.shape[:2]
    scale = min(side / height, side / width)
    inner = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = (round((side - length) / 2 - 0.1) for length in inner)
    square = np.full((side, side, 3), PADDING, np.uint8)
    square[top : top + inner[1], left : left + inner[0]] = cv2.resize(image, inner, interpolation=cv2.INTER_LINEAR)
    return square, scale, (left, top)


def to_input(squares: Sequence[NDArray[np.uint8]]) -> torch.Tensor:
    """Stack RGB squares uint8 [S, S, 3] into the model's input: float32 [N, 3, S, S] in 0..1."""
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).float().div_(255)


def detect(detector: Detector, images: Sequence[NDArray[np.uint8]]) -> list[torch.Tensor]:
    """Return per RGB image a float32 [D, 6] of x0, y0, x1, y1 in its own pixels, score, class index; best first."""
    return detect_at(detector, images, detector.confidence, (detector.iou,))[0]


@torch.no_grad()
def detect_at(
    detector: Detector, images: Sequence[NDArray[np.uint8]], confidence: float, ious: Sequence[float]
) -> list[list[torch.Tensor]]:
    """Return what `detect` does once per IoU threshold of `ious`, for one run of the model."""
    fitted = [letterbox(image, detector.image_size) for image in images]
    raw = detector.model(to_input([square for square, _, _ in fitted]))[0]
    answers = []
    for iou in ious:
        # Suppression works in place, and by default gives up on a slow machine and loses detections.
        found: list[torch.Tensor] = non_max_suppression(raw.clone(), confidence, iou, max_time_img=math.inf)
        for boxes, image, (_, scale, (left, top)) in zip(found, images, fitted, strict=True):
            boxes[:, [0, 2]] = ((boxes[:, [0, 2]] - left) / scale).clamp(0, image.shape[1])
            boxes[:, [1, 3]] = ((boxes[:, [1, 3]] - top) / scale).clamp(0, image.shape[0])
        answers.append(found)
    return answers


def _problems(config: Mapping[str, Any]) -> list[str]:
    wanted = {"architecture": dict, "names": dict, "image_size": int, "confidence": float, "iou": float}
    if config.get("format") != FORMAT:
        return [f"format is {config.get('format')!r}, expected {FORMAT!r}"]
    wrong = [
        f"{key} is {config.get(key)!r}, expected a {kind.__name__}"
        for key, kind in wanted.items()
        if not isinstance(config.get(key), kind)
    ]
    if wrong:
        return wrong
    indices = [str(index) for index in range(len(config["names"]))]
    if list(config["names"]) != indices:
        wrong.append(f"names has keys {list(config['names'])}, expected {indices}")
    if config["architecture"].get("nc") != len(indices):
        wrong.append(f"architecture.nc is {config['architecture'].get('nc')}, but there are {len(indices)} names")
    if config["image_size"] <= 0 or config["image_size"] % STRIDE:
        wrong.append(f"image_size is {config['image_size']}, expected a positive multiple of {STRIDE}")
    wrong += [f"{key} is {config[key]}, expected 0 to 1" for key in ("confidence", "iou") if not 0 <= config[key] <= 1]
    return wrong
