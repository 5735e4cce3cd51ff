"""YOLO node: objects, masks, keypoints, oriented boxes and labels of pictures, run by ultralytics.

ultralytics is licensed under AGPL-3.0 (or a commercial licence of Ultralytics): a service built on this node takes on
that licence's duties, among them offering its source to its users. Nothing else in Weftline depends on it.

On a GPU, letterboxing, inference and suppression run there, and detections are copied to the host in one transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.errors import InputError, ModelError
from weftline.node import Batch, BatchNode, ConfigError, OpenContext, Outputs, Ports, StepContext, port
from weftline.nodes.contract import model_error
from weftline.nodes.device_tensors import offload, stacked_group
from weftline.nodes.grouping import group_by_shape
from weftline.nodes.hugging_face import check_kind, read_json
from weftline.nodes.letterbox import Fit, letterbox, letterbox_torch
from weftline.nodes.model_file import check_safetensors, find_model, stored_bytes
from weftline.nodes.transformers_tasks.task import TOP_K, label_outputs
from weftline.nodes.yolo_file import (
    STRIDE,
    WIDTH_MAX,
    YoloModel,
    check_described,
    load_folder,
    load_pickle,
    quiet_ultralytics,
    read_config,
    task_of_pickle,
)
from weftline.nodes.yolo_masks import OBJECTS_MAX, with_masks
from weftline.nodes.yolo_tasks import (
    CLASSIFY,
    DETECT,
    NETWORKS,
    OBB,
    POSE,
    SEGMENT,
    TASKS,
    Answer,
    YoloTask,
    detected,
    with_angles,
    with_keypoints,
)
from weftline.shm.device.names import is_gpu

SUPPRESSION_MAX_S = 3600.0
"""Time for non-maximum suppression. ultralytics' own 50 ms a picture silently drops detections on a slow machine."""

DETECTIONS_MAX = 30_000
"""Most candidates of one picture in ultralytics' suppression, and so the most detections."""

ORIENTED_MAX = 4096
"""The same for oriented boxes, which are compared all with all: the comparison takes 64 MiB for each of its numbers."""

ASPECT_MAX = 32
"""Largest ratio of a picture's sides in task classify: what is further from its middle is cut off before it grows."""

_DETECTION_OPTIONS = ("confidence", "iou", "detections_max")
_LABEL_OPTIONS = ("top_k",)


@dataclass(frozen=True, slots=True)
class YoloConfig:
    """Options of `yolo`. ultralytics, which runs the model, is licensed under AGPL-3.0.

    model:          a weftline-yolo folder (model.safetensors and config.json), or ultralytics weights (.pt), relative
                    to the pipeline file; a plain name such as yolo11n.pt is also looked for where ultralytics keeps
                    its own, and fetched by it.
    task:           'detect', 'segment', 'pose', 'obb' (oriented boxes) or 'classify'; None: that of the model, by its
                    file, or where that is not on this machine by its name: yolo11n-seg.pt, -pose, -obb, -cls.
    confidence:     minimum score of a detection; None: the model's own, or 0.25. Tasks other than classify have this
                    option, iou and detections_max.
    iou:            overlap above which the weaker of two detections of a class is dropped; None: the model's own.
    detections_max: most detections of one picture, up to 30 000, in task segment up to 1000 and in task obb up to
                    4096; None: 300.
    top_k:          classify: most labels in `scores`; None: 5.
    image_size:     side of the square that the network sees, a multiple of 32 up to 8192; None: the model's own.
    trust_pickle:   a .pt file is a pickle, which can run any code when it is loaded. True: this one is trusted.
    """

    model: str
    task: str | None = None
    confidence: float | None = None
    iou: float | None = None
    detections_max: int | None = None
    top_k: int | None = None
    image_size: int | None = None
    trust_pickle: bool = False


class Yolo(BatchNode):
    """Runs YOLO models on pictures. It runs on ultralytics, which is AGPL-3.0: its duties apply to your service."""

    Config: ClassVar[type[Any]] = YoloConfig
    extra: ClassVar[str] = "yolo"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (16, 2.0)

    _model: YoloModel | None = None
    _side: int
    _device: str  # as torch calls it
    _on_device: bool  # on a GPU, where pictures may lie
    _transforms: Any = None  # torchvision's preparation, for task classify

    @classmethod
    def ports(cls, config: YoloConfig, step: StepContext) -> Ports:
        task = _checked_task(config, step.base_dir)
        _check_numbers(config, task)
        return Ports(inputs=(port("image", "image", about="the picture"),), outputs=task.outputs)

    @classmethod
    def device_ports(cls, config: YoloConfig, ports: Ports) -> frozenset[str]:
        return frozenset() if ports.outputs == CLASSIFY.outputs else frozenset({"image"})

    @classmethod
    def model_bytes(cls, config: YoloConfig, step: StepContext) -> int:
        return stored_bytes(config.model, step.base_dir)

    def open(self, context: OpenContext) -> None:
        try:
            task = _checked_task(self.config, context.base_dir)
            _check_numbers(self.config, task)
        except ConfigError as error:
            raise model_error(error) from None
        path = find_model(self.config.model, context.base_dir)
        quiet_ultralytics(context.cache_dir, offline=path is not None)
        context.progress("reading weights", 0.1)
        if path is not None and path.is_dir():
            model = load_folder(path, self.config.model)
        else:
            model = load_pickle(self.config.model, path, task, self.config.image_size or 0)
        import torch

        torch.set_num_threads(max(context.threads, 1))
        context.progress("folding normalisation into convolutions", 0.8)
        self._model, self._side = model, self.config.image_size or model.image_size
        self._device, self._on_device = context.framework_device, is_gpu(context.device)
        model.network.fuse(verbose=False)
        model.network.to(self._device).requires_grad_(False)
        if task is CLASSIFY:
            self._transforms = _transforms(model.transforms, self._side)
        elif getattr(model.network, "end2end", False):  # its head selects the best ones, before any threshold
            model.network.model[-1].max_det = self._detections_max

    def warm_up(self) -> None:
        self.run(Batch({"image": [np.zeros((self._side, self._side, 3), np.uint8)]}))
        if self._on_device and self._opened.task is not CLASSIFY:
            import torch

            self._answers([torch.zeros((self._side // 2, self._side, 3), dtype=torch.uint8, device=self._device)])

    def run(self, batch: Batch) -> Outputs:
        if self._opened.task is CLASSIFY:
            return self._labelled(batch["image"])
        answers = self._answers(batch["image"])
        return {
            one.name: [answer if isinstance(answer, Exception) else answer[one.name] for answer in answers]
            for one in self._opened.task.outputs
        }

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        offload(self._opened.network)
        return True

    def wake(self) -> None:
        self._opened.network.to(self._device)

    def close(self) -> None:
        self._model = None

    def _labelled(self, images: Sequence[Any]) -> Outputs:
        """Return the outputs of task classify."""
        import torch
        from PIL import Image

        pictures = [self._transforms(Image.fromarray(np.ascontiguousarray(_middle(image)))) for image in images]
        with torch.inference_mode():
            output = self._opened.network(torch.stack(pictures).to(self._device))
        rows = (output[0] if isinstance(output, tuple | list) else output).float().cpu().numpy()
        return label_outputs(self._opened.names, rows, self.config.top_k or TOP_K)

    def _answers(self, images: Sequence[Any]) -> list[Answer | InputError]:
        """Return the outputs of the other tasks for each picture."""
        import torch

        here = all(isinstance(image, np.ndarray) for image in images)
        with torch.inference_mode():
            pixels, fits = self._fitted(images) if here else self._fitted_there(images)
            output = self._opened.network(pixels.div_(255))
            found = [rows[rows[:, 4].argsort(descending=True, stable=True)] for rows in self._suppress(output)]
            if self._opened.task is SEGMENT:
                return self._segmented(found, _prototypes(output), fits)
            rows = torch.cat(found).cpu().numpy()  # all pictures' in one copy
        ends = np.cumsum([len(one) for one in found])[:-1]
        return [self._answer(part, place) for part, place in zip(np.split(rows, ends), fits, strict=True)]

    def _answer(self, rows: np.ndarray, place: Fit) -> Answer:
        model = self._opened
        if model.task is POSE:
            return with_keypoints(rows, place, model.names, model.points)
        if model.task is OBB:
            return with_angles(rows, place, model.names)
        return {"detections": detected(rows, place, model.names)}

    def _segmented(self, found: Sequence[Any], prototypes: Any, fits: Sequence[Fit]) -> list[Answer | InputError]:
        """Return the outputs of task segment: rows hold coefficients of the picture's prototypes."""
        answers: list[Answer | InputError] = []
        for rows, own, place in zip(found, prototypes, fits, strict=True):
            detections = detected(rows[:, :6].cpu().numpy(), place, self._opened.names)
            try:
                answers.append(with_masks(detections, rows[:, 6:], own, place.height, place.width))
            except InputError as error:
                answers.append(error)
        return answers

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
    def _opened(self) -> YoloModel:
        if self._model is None:
            raise RuntimeError("the node is not open")
        return self._model

    @property
    def _detections_max(self) -> int:
        return self.config.detections_max or DETECTIONS_DEFAULT

    def _suppress(self, output: Any) -> list[Any]:
        """Return the rows of every picture, float32 [objects, 6 + numbers of the task] on the device."""
        from ultralytics.utils.nms import non_max_suppression

        config, model = self.config, self._opened
        oriented = model.task is OBB
        found: list[Any] = non_max_suppression(
            output[0] if model.task is SEGMENT and isinstance(output[0], tuple) else output,
            model.confidence if config.confidence is None else config.confidence,
            model.iou if config.iou is None else config.iou,
            max_det=self._detections_max,
            nc=len(model.names),
            max_time_img=SUPPRESSION_MAX_S,
            max_nms=ORIENTED_MAX if oriented else DETECTIONS_MAX,
            rotated=oriented,
            end2end=bool(getattr(model.network, "end2end", False)),
        )
        return found


def _prototypes(output: Any) -> Any:
    """Return float32 [items, masks, height, width] of a segmentation network's output."""
    return output[0][1] if isinstance(output[0], tuple) else output[1]


def _transforms(trained: Any, side: int) -> Any:
    """Return torchvision's preparation for task classify: as trained where that is for `side`, else ultralytics' own.

    It resizes the shorter side to `side` and cuts the middle out.
    """
    from ultralytics.data.augment import classify_transforms

    size = getattr(trained.transforms[0], "size", None) if trained is not None else None
    return trained if size in (side, [side, side], (side, side)) else classify_transforms(side)


def _middle(image: np.ndarray) -> np.ndarray:
    """Return a picture without what is further from its middle than ASPECT_MAX allows."""
    height, width = image.shape[:2]
    top = max(height - ASPECT_MAX * width, 0) // 2
    left = max(width - ASPECT_MAX * height, 0) // 2
    return image[top : height - top, left : width - left]


_EXPECTED = "a weftline-yolo folder, or ultralytics weights (.pt)"
DETECTIONS_DEFAULT = 300
"""Default of option `detections_max`, as in ultralytics."""

_SUFFIXES: Mapping[str, YoloTask] = {"-seg": SEGMENT, "-pose": POSE, "-obb": OBB, "-cls": CLASSIFY}
_OTHER_SUFFIXES = ("-sem", "-depth")
"""Ends of the names of ultralytics' own models, for tasks that this node lacks."""


def _checked_task(config: YoloConfig, base_dir: Path) -> YoloTask:
    """Return the task of a step. ConfigError: it is no task, or not that of the model, or the model cannot be read."""
    if config.task is not None and config.task not in TASKS:
        raise ConfigError("task", f"{config.task!r:.40} is not a task of this node", f"one of {', '.join(TASKS)}")
    path = find_model(config.model, base_dir)
    found = _task_of_folder(config, path) if path is not None and path.is_dir() else _task_of_file(config, path)
    wanted = (found or DETECT) if config.task is None else TASKS[config.task]
    if found is not None and wanted is not found:
        fix = f"write task: {found.name}, or leave it out"
        raise ConfigError("task", f"{config.model} {found.about}", f"a model that {wanted.about}", fix)
    return wanted


def _task_of_folder(config: YoloConfig, path: Path) -> YoloTask:
    if not (path / "config.json").is_file():
        inside = sorted(one.name for one in path.glob("*.pt"))
        fix = f"name the file, {config.model}/{inside[0]}" if inside else ""
        raise ConfigError("model", f"the folder {config.model} has no config.json", _EXPECTED, fix)
    whole = read_json(path / "config.json", f"{config.model}/config.json")
    if isinstance(whole, dict) and "format" not in whole:  # of a Hugging Face model, whose node is named
        check_kind(whole, config.model, (), _EXPECTED)
    try:
        task = read_config(path, config.model).task
        if not (path / "model.safetensors").is_file():
            raise ModelError(f"the folder {config.model} has no model.safetensors")
        check_safetensors(path / "model.safetensors", f"{config.model}/model.safetensors")
        check_described(path, config.model)
    except ModelError as error:
        raise ConfigError("model", str(error)) from None
    return task


def _task_of_file(config: YoloConfig, path: Path | None) -> YoloTask | None:
    """Return the task of ultralytics weights, or None where neither the file nor, without it, its name shows it."""
    _check_pt_option(config, path)
    if path is None:
        return _task_of_name(config.model)
    kind, task = task_of_pickle(path)
    if kind and task is None:
        expected = f"one of {', '.join(NETWORKS)}"
        raise ConfigError("model", f"{config.model} is a {kind:.80}, which this node does not run", expected)
    return task


def _task_of_name(model: str) -> YoloTask | None:
    """Return the task of a model by the end of its name, as ultralytics names its own."""
    stem = Path(model).stem
    if stem.endswith(_OTHER_SUFFIXES):
        expected = f"a model for one of the tasks {', '.join(TASKS)}"
        raise ConfigError("model", f"{model} is a model for a task that this node lacks, by its name", expected)
    return next((task for suffix, task in _SUFFIXES.items() if stem.endswith(suffix)), None)


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


def _check_numbers(config: YoloConfig, task: YoloTask) -> None:
    for option in _DETECTION_OPTIONS if task is CLASSIFY else _LABEL_OPTIONS:
        if getattr(config, option) is not None:
            raise ConfigError(option, f"task {task.name} has no option {option}", "", "leave it out")
    for option in ("confidence", "iou"):
        value = getattr(config, option)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(option, f"{value}", "from 0 to 1")
    most = {SEGMENT: OBJECTS_MAX, OBB: ORIENTED_MAX}.get(task, DETECTIONS_MAX)
    if config.detections_max is not None and not 1 <= config.detections_max <= most:
        raise ConfigError("detections_max", f"{config.detections_max}", f"a count from 1 to {most}")
    if config.top_k is not None and config.top_k < 1:
        raise ConfigError("top_k", f"{config.top_k}", "a count from 1")
    size = config.image_size
    if size is not None and (not STRIDE <= size <= WIDTH_MAX or size % STRIDE):
        raise ConfigError("image_size", f"{size}", f"a multiple of {STRIDE} up to {WIDTH_MAX}")
