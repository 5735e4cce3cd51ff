"""YOLO node: object detection, run by ultralytics.

ultralytics is licensed under AGPL-3.0 (or a commercial licence of Ultralytics): a service built on this node takes on
that licence's duties, among them offering its source to its users. Nothing else in Weftline depends on it.

On a GPU, letterboxing, inference and suppression run there, and detections are copied to the host in one transfer. The
letterbox arithmetic is ultralytics' LetterBox and scale_boxes, so that input matches training. On a GPU torch resizes
in float32, where OpenCV rounds to 11 bits: levels differ by at most 1 of 255.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from weftline.errors import ModelError
from weftline.node import Batch, BatchNode, ConfigError, Detections, OpenContext, Outputs, Ports, StepContext, port
from weftline.nodes.contract import model_error
from weftline.nodes.device_tensors import offload, stacked_group
from weftline.nodes.grouping import group_by_shape
from weftline.nodes.model_file import check_safetensors, find_model
from weftline.nodes.yolo_file import (
    STRIDE,
    WIDTH_MAX,
    Detector,
    load_folder,
    load_pickle,
    quiet_ultralytics,
    read_config,
)
from weftline.shm.device.names import is_gpu

if TYPE_CHECKING:
    import torch


PADDING = 114
"""Grey level around a picture that is not square, as in ultralytics."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Position of a picture of `height` x `width` px in its square: its size there, and its left top corner."""

    height: int
    width: int
    inner_height: int
    inner_width: int
    left: int
    top: int

    def to_picture(self, boxes: np.ndarray) -> np.ndarray:
        """Return float32 [objects, 4] boxes x1 y1 x2 y2 of the square in pixels of the picture, cut at its edges."""
        shift = np.array([self.left, self.top] * 2, np.float32)
        gain = np.array([self.inner_width / self.width, self.inner_height / self.height] * 2, np.float32)
        edge = np.array([self.width, self.height] * 2, np.float32)
        moved: np.ndarray = np.clip((boxes - shift) / gain, 0, edge)
        return moved.astype(np.float32)


def fit(height: int, width: int, side: int) -> Fit:
    """Return where a picture of `height` x `width` px goes in a square of `side` px: as large as it fits, centred."""
    scale = min(side / height, side / width)
    inner_height, inner_width = max(round(height * scale), 1), max(round(width * scale), 1)
    left, top = round((side - inner_width) / 2 - 0.1), round((side - inner_height) / 2 - 0.1)
    return Fit(height, width, inner_height, inner_width, left, top)


def letterbox(image: np.ndarray, side: int, out: np.ndarray) -> Fit:
    """Write uint8[H, W, 3] `image` into `out`, uint8[side, side, 3], and return where it lies there."""
    import cv2

    place = fit(image.shape[0], image.shape[1], side)
    size = (place.inner_width, place.inner_height)
    out.fill(PADDING)
    inside = out[place.top : place.top + place.inner_height, place.left : place.left + place.inner_width]
    inside[...] = image if image.shape[1::-1] == size else cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
    return place


def letterbox_torch(images: torch.Tensor, side: int, out: torch.Tensor) -> Fit:
    """Write uint8 [n, H, W, 3] `images` into `out`, and return where they lie there; nothing waits for the device.

    out: float32 [n, 3, side, side], which gets levels from 0 to 255.
    """
    import torch

    place = fit(images.shape[1], images.shape[2], side)
    size = (place.inner_height, place.inner_width)
    levels = images.permute(0, 3, 1, 2).float()
    if tuple(levels.shape[2:]) != size:
        levels = torch.nn.functional.interpolate(levels, size, mode="bilinear", align_corners=False).round_()
    out.fill_(PADDING)
    out[:, :, place.top : place.top + place.inner_height, place.left : place.left + place.inner_width] = levels
    return place


SUPPRESSION_MAX_S = 3600.0
"""Time for non-maximum suppression. ultralytics' own 50 ms a picture silently drops detections on a slow machine."""

DETECTIONS_MAX = 30_000
"""Most candidates of one picture in ultralytics' suppression, and so the most detections."""


@dataclass(frozen=True, slots=True)
class YoloConfig:
    """Options of `yolo`. ultralytics, which runs the model, is licensed under AGPL-3.0.

    model:          a weftline-yolo folder (model.safetensors and config.json), or ultralytics weights (.pt), relative
                    to the pipeline file; a plain name such as yolo11n.pt is also looked for where ultralytics keeps
                    its own, and fetched by it.
    confidence:     minimum score of a detection; None: the model's own, or 0.25.
    iou:            overlap above which the weaker of two detections of a class is dropped; None: the model's own.
    detections_max: most detections of one picture, up to 30 000.
    image_size:     side of the letterbox square, a multiple of 32 up to 8192; None: the model's own.
    trust_pickle:   a .pt file is a pickle, which can run any code when it is loaded. True: this one is trusted.
    """

    model: str
    confidence: float | None = None
    iou: float | None = None
    detections_max: int = 300
    image_size: int | None = None
    trust_pickle: bool = False


class Yolo(BatchNode):
    """Detects objects in pictures. It runs on ultralytics, which is AGPL-3.0: its duties apply to your service."""

    Config: ClassVar[type[Any]] = YoloConfig
    extra: ClassVar[str] = "yolo"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (16, 2.0)

    _detector: Detector | None = None
    _side: int
    _device: str  # as torch calls it
    _on_device: bool  # on a GPU, where pictures may lie

    @classmethod
    def ports(cls, config: YoloConfig, step: StepContext) -> Ports:
        path = find_model(config.model, step.base_dir)
        if path is not None and path.is_dir():
            if not (path / "config.json").is_file():
                inside = sorted(one.name for one in path.glob("*.pt"))
                fix = f"name the file, {config.model}/{inside[0]}" if inside else ""
                raise ConfigError("model", f"the folder {config.model} has no config.json", _EXPECTED, fix)
            try:
                read_config(path, config.model)
                if not (path / "model.safetensors").is_file():
                    raise ModelError(f"the folder {config.model} has no model.safetensors")
                check_safetensors(path / "model.safetensors", f"{config.model}/model.safetensors")
            except ModelError as error:
                raise ConfigError("model", str(error)) from None
        else:
            _check_pt_option(config, path)
        _check_numbers(config)
        return Ports(
            inputs=(port("image", "image", about="the picture"),),
            outputs=(port("detections", "detections", about="boxes, classes and scores, most confident first"),),
        )

    @classmethod
    def device_ports(cls, config: YoloConfig, ports: Ports) -> frozenset[str]:
        return frozenset({"image"})

    def open(self, context: OpenContext) -> None:
        try:
            self.ports(self.config, StepContext(context.base_dir))
        except ConfigError as error:
            raise model_error(error) from None
        path = find_model(self.config.model, context.base_dir)
        quiet_ultralytics(context.cache_dir, offline=path is not None)
        context.progress("reading weights", 0.1)
        if path is not None and path.is_dir():
            self._detector = load_folder(path, self.config.model)
        else:
            self._detector = load_pickle(self.config.model, path, self.config.image_size or 0)
        import torch

        torch.set_num_threads(max(context.threads, 1))
        context.progress("folding normalisation into convolutions", 0.8)
        self._device, self._on_device = context.framework_device, is_gpu(context.device)
        self._detector.network.fuse(verbose=False)
        self._detector.network.to(self._device).requires_grad_(False)
        self._side = self.config.image_size or self._detector.image_size

    def warm_up(self) -> None:
        self._find([np.zeros((self._side, self._side, 3), np.uint8)])
        if self._on_device:
            import torch

            self._find([torch.zeros((self._side // 2, self._side, 3), dtype=torch.uint8, device=self._device)])

    def run(self, batch: Batch) -> Outputs:
        return {"detections": self._find(batch["image"])}

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        offload(self._opened.network)
        return True

    def wake(self) -> None:
        self._opened.network.to(self._device)

    def close(self) -> None:
        self._detector = None

    def _find(self, images: Sequence[Any]) -> list[Detections]:
        import torch

        here = all(isinstance(image, np.ndarray) for image in images)
        with torch.inference_mode():
            pixels, fits = self._fitted(images) if here else self._fitted_there(images)
            found = self._suppress(self._opened.network(pixels.div_(255)))
            rows = torch.cat(found).cpu().numpy()  # all pictures' in one copy
        ends = np.cumsum([len(one) for one in found])[:-1]
        return [self._detections(part, place) for part, place in zip(np.split(rows, ends), fits, strict=True)]

    def _fitted(self, images: Sequence[np.ndarray]) -> tuple[Any, list[Fit]]:
        """Return float32 [items, 3, side, side] of levels 0 to 255 on the device, and where each picture lies there."""
        import torch

        squares = np.empty((len(images), self._side, self._side, 3), np.uint8)
        fits = [letterbox(image, self._side, square) for image, square in zip(images, squares, strict=True)]
        return torch.from_numpy(squares).to(self._device).permute(0, 3, 1, 2).float(), fits

    def _fitted_there(self, images: Sequence[Any]) -> tuple[Any, list[Fit]]:
        """Return the same of pictures of which some lie on the device: all at once where they are of one size."""
        import torch

        items = range(len(images))
        pixels = torch.empty((len(images), 3, self._side, self._side), device=self._device)
        if len(group_by_shape([images], len(images))) == 1:
            whole = stacked_group(images, items, None, self._device)
            return pixels, [letterbox_torch(whole, self._side, pixels)] * len(images)
        rows = [stacked_group(images, [item], None, self._device) for item in items]
        return pixels, [letterbox_torch(rows[item], self._side, pixels[item : item + 1]) for item in items]

    @property
    def _opened(self) -> Detector:
        if self._detector is None:
            raise RuntimeError("the node is not open")
        return self._detector

    def _suppress(self, raw: Any) -> list[Any]:
        from ultralytics.utils.nms import non_max_suppression

        config, detector = self.config, self._opened
        found: list[Any] = non_max_suppression(
            raw,
            detector.confidence if config.confidence is None else config.confidence,
            detector.iou if config.iou is None else config.iou,
            max_det=config.detections_max,
            nc=len(detector.names),
            max_time_img=SUPPRESSION_MAX_S,
            end2end=bool(getattr(detector.network, "end2end", False)),
        )
        return found

    def _detections(self, rows: np.ndarray, place: Fit) -> Detections:
        """Return float32 [objects, 6] rows of box, score and class as Detections of the original picture."""
        order = np.argsort(-rows[:, 4], kind="stable")
        boxes = place.to_picture(rows[order, :4])
        return Detections(boxes, rows[order, 4].copy(), rows[order, 5].astype(np.int32), self._opened.names)


_EXPECTED = "a weftline-yolo folder, or ultralytics weights (.pt)"


def _check_pt_option(config: YoloConfig, path: Path | None) -> None:
    if not config.model.endswith(".pt"):
        found = f"there is no {config.model}" if path is None else f"{config.model} is neither a folder nor a .pt file"
        raise ConfigError("model", found, _EXPECTED)
    if path is None and "/" in config.model:
        raise ConfigError("model", f"there is no file {config.model}", fix="paths are relative to the pipeline file")
    if not config.trust_pickle:
        found = f"{config.model} is a pickle: loading it can run any code that was put in it"
        fix = "set trust_pickle: true if you trust where it came from, or use a weftline-yolo folder"
        raise ConfigError("model", found, "a folder with model.safetensors and config.json", fix)


def _check_numbers(config: YoloConfig) -> None:
    for option in ("confidence", "iou"):
        value = getattr(config, option)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(option, f"{value}", "from 0 to 1")
    if not 1 <= config.detections_max <= DETECTIONS_MAX:
        raise ConfigError("detections_max", f"{config.detections_max}", f"a count from 1 to {DETECTIONS_MAX}")
    size = config.image_size
    if size is not None and (not STRIDE <= size <= WIDTH_MAX or size % STRIDE):
        raise ConfigError("image_size", f"{size}", f"a multiple of {STRIDE} up to {WIDTH_MAX}")
