"""YOLO weights: the weftline-yolo folder, or a trusted ultralytics pickle; and the task of a model by its file.

A weftline-yolo folder holds model.safetensors, every tensor of the state dict, and config.json:

    {"format": "weftline-yolo", "architecture": {an ultralytics model yaml}, "names": {"0": "red circle", ...},
     "image_size": 320, "confidence": 0.25, "iou": 0.5}

The last layer of the architecture determines the task. A model of task classify needs no confidence and iou; a model of
task pose may name its keypoints: "keypoints": ["nose", ...].

The architecture is data, but ultralytics evaluates parts of it, so everything in it is checked first.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftline.errors import MissingPackage, ModelError
from weftline.nodes.model_file import folder_bytes, load_into, load_weights, pickled_classes
from weftline.nodes.model_limits import parse_json, read_bytes
from weftline.nodes.model_size import least_yolo_weights, size_mismatch
from weftline.nodes.shapes import POINTS_MAX
from weftline.nodes.yolo_tasks import CLASSIFY, HEADS, NETWORKS, POSE, YoloTask, default_points

FORMAT = "weftline-yolo"
STRIDE = 32
"""Coarsest stride of the architectures: the side of the input is a multiple of it."""

CHANNELS = 3
CONFIG_BYTES_MAX = 1 << 20
LAYERS_MAX, REPEATS_MAX, WIDTH_MAX, CLASSES_MAX = 256, 1_024, 8192, 10_000
"""Largest accepted architecture: YOLO11x has 24 layers and 1024 channels, Objects365 has 365 classes."""

_MODULE = re.compile(r"^((nn\.|torchvision\.ops\.)?[A-Z][A-Za-z0-9]*|v10Detect)$")
_ACTIVATION = re.compile(r"^(torch\.)?nn\.[A-Z][A-Za-z0-9]*\(\)$")
_WORD = re.compile(r"^[A-Za-z][A-Za-z0-9_]*$")


CONFIDENCE, IOU, IMAGE_SIZE = 0.25, 0.7, 640
"""Defaults of models that have none of their own, as in ultralytics."""


@dataclass(frozen=True, slots=True)
class YoloFolder:
    """A folder's config.json.

    names:           by class index; confidence, iou: default thresholds.
    points:          names of the keypoints, for task pose.
    """

    task: YoloTask
    architecture: Mapping[str, Any]
    names: tuple[str, ...]
    image_size: int
    confidence: float
    iou: float
    points: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class YoloModel:
    """An opened model: its network in eval mode, and what it was trained for.

    transforms: torchvision's preparation of a picture that a model of task classify was trained with, or None.
    """

    task: YoloTask
    network: Any
    names: tuple[str, ...]
    image_size: int
    confidence: float = CONFIDENCE
    iou: float = IOU
    points: tuple[str, ...] = ()
    transforms: Any = None


def read_config(folder: Path, shown: str) -> YoloFolder:
    """Return the contents of config.json in `folder`; raise ModelError with everything that is wrong."""
    try:
        config = parse_json(read_bytes(folder / "config.json", CONFIG_BYTES_MAX))
    except OSError as error:
        raise ModelError(f"{shown}/config.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{shown}/config.json {error}") from None
    wrong = list(_problems(config))
    if wrong:
        raise ModelError(f"{shown}/config.json: {'; '.join(wrong)}")
    names = tuple(config["names"][str(index)] for index in range(len(config["names"])))
    task = HEADS[_head(config["architecture"])]
    points = tuple(config.get("keypoints", ()))
    if task is POSE and not points:
        points = default_points(names, config["architecture"]["kpt_shape"][0])
    return YoloFolder(
        task, config["architecture"], names, config["image_size"], config.get("confidence", CONFIDENCE),
        config.get("iou", IOU), points,
    )  # fmt: skip


def check_described(folder: Path, shown: str) -> None:
    """Raise ModelError for a config.json of a network that is far larger than the folder's weights, by an estimate.

    Opening the model compares the exact numbers.
    """
    config = read_config(folder, shown)
    wrong = size_mismatch(least_yolo_weights(config.architecture), folder_bytes(folder), packed=True)
    if wrong:
        raise ModelError(f"{shown}/config.json {wrong}\n    fix: fetch config.json and the weights of one model")


def _head(architecture: Any) -> str:
    """Return the class of an architecture's last layer, '' where it has none."""
    try:
        return str(architecture["head"][-1][2])
    except (KeyError, IndexError, TypeError):
        return ""


def _problems(config: Any) -> Iterator[str]:
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else type(config).__name__
        yield f"format is {found!r:.40}, expected {FORMAT!r}"
        return
    names, size = config.get("names"), config.get("image_size")
    if not isinstance(names, dict) or not 0 < len(names) <= CLASSES_MAX:
        yield f"names is not an object with 1 to {CLASSES_MAX} class names"
    elif set(names) != {str(i) for i in range(len(names))} or not all(isinstance(n, str) for n in names.values()):
        yield 'names has other keys than "0", "1" and so on, or names that are no text'
    elif not isinstance(config.get("architecture"), dict) or config["architecture"].get("nc") != len(names):
        yield f"architecture is missing, or its nc is not {len(names)}, the number of names"
    if type(size) is not int or not STRIDE <= size <= WIDTH_MAX or size % STRIDE:
        yield f"image_size is {size!r:.40}, expected a multiple of {STRIDE} up to {WIDTH_MAX}"
    task = HEADS.get(_head(config.get("architecture")))
    for key in ("confidence", "iou"):
        if task is CLASSIFY and key not in config:
            continue
        if not isinstance(config.get(key), int | float) or not 0 <= config[key] <= 1:
            yield f"{key} is {config.get(key)!r:.40}, expected 0 to 1"
    if isinstance(config.get("architecture"), dict):
        yield from _architecture_problems(config["architecture"])
        yield from _point_problems(config, task)


def _point_problems(config: Mapping[str, Any], task: YoloTask | None) -> Iterator[str]:
    """Yield what is wrong with the number and names of a model's keypoints."""
    shape, points = config["architecture"].get("kpt_shape"), config.get("keypoints")
    if task is not POSE:
        if points is not None:
            yield "keypoints are named, but the model has none"
        return
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int for size in shape)):
        yield f"architecture.kpt_shape is {shape!r:.40}, expected [keypoints, 2 or 3]"
    elif not 1 <= shape[0] <= POINTS_MAX or shape[1] not in (2, 3):
        yield f"architecture.kpt_shape is {shape!r:.40}, expected 1 to {POINTS_MAX} keypoints of 2 or 3 numbers"
    elif points is not None and not (
        isinstance(points, list) and len(points) == shape[0] and all(isinstance(name, str) for name in points)
    ):
        yield f"keypoints is no list of {shape[0]} names"


def _architecture_problems(architecture: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of an architecture that are not plain layers: names and arguments reach Python's eval."""
    activation = architecture.get("activation")
    if activation is not None and not (isinstance(activation, str) and _ACTIVATION.fullmatch(activation)):
        yield f"architecture.activation is {activation!r:.40}, expected a class such as nn.SiLU()"
    parts = [architecture.get(part) or [] for part in ("backbone", "head")]
    if not all(isinstance(part, list) for part in parts):
        yield "architecture.backbone or .head is no list of layers"
        return
    layers = [layer for part in parts for layer in part]
    if not 0 < len(layers) <= LAYERS_MAX:
        yield f"architecture has {len(layers)} layers, expected 1 to {LAYERS_MAX}"
        return
    for place, layer in enumerate(layers):
        if (
            not isinstance(layer, list)
            or len(layer) != 4
            or not isinstance(layer[2], str)
            or not _MODULE.fullmatch(layer[2])
        ):
            yield f"architecture layer {place} is not [from, repeats, Module, arguments]"
        elif layer[2] == "TorchVision":
            yield f"architecture layer {place} is TorchVision, which fetches weights from the network"
        elif not (type(layer[1]) is int and 1 <= layer[1] <= LAYERS_MAX) or not _plain([layer[0], layer[3]]):
            yield f"architecture layer {place} has repeats or arguments that are no small numbers or words"
    repeats = sum(layer[1] for layer in layers if isinstance(layer, list) and len(layer) == 4 and type(layer[1]) is int)
    if repeats > REPEATS_MAX:
        yield f"architecture repeats its layers {repeats} times, expected at most {REPEATS_MAX}"
    if architecture.get("channels", CHANNELS) != CHANNELS:
        yield f"architecture.channels is {architecture['channels']!r:.40}, expected {CHANNELS}: red, green and blue"
    if _head(architecture) not in HEADS:
        yield f"architecture ends in layer {_head(architecture)!r:.40}, expected one of {', '.join(HEADS)}"
    for key, value in architecture.items():
        if key not in ("backbone", "head", "activation") and not _plain(value, 4):
            yield f"architecture.{key:.40} is no small number, word or list of them"


def _plain(value: Any, depth: int = 3) -> bool:
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return abs(value) <= WIDTH_MAX
    if isinstance(value, str):
        return bool(_WORD.fullmatch(value)) and len(value) < 64
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and _plain(part, depth - 1) for key, part in value.items())
    return isinstance(value, list) and depth > 0 and len(value) < 256 and all(_plain(part, depth - 1) for part in value)


def quiet_ultralytics(folder: Path, offline: bool) -> None:
    """Configure ultralytics before its import: settings in `folder`, no automatic installation.

    ultralytics reads these at import and nowhere else offers them; they are set in the worker's process alone. Offline,
    it neither looks for updates nor reports its use.
    """
    config = folder / "ultralytics"
    config.mkdir(parents=True, exist_ok=True)
    wanted = {"YOLO_CONFIG_DIR": str(config), "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}
    if offline:
        wanted |= {"YOLO_OFFLINE": "true"}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def task_of_pickle(path: Path) -> tuple[str, YoloTask | None]:
    """Return the class of the model in an ultralytics file, and its task; '' and None where they are not found.

    The file is searched for the name, not unpickled.
    """
    named = pickled_classes(path) or []
    models = [name.rpartition(".")[2] for name in named if name.startswith("ultralytics.nn.tasks.")]
    return (models[0], NETWORKS.get(models[0])) if models else ("", None)


def load_folder(folder: Path, shown: str) -> YoloModel:
    """Return the model in a weftline-yolo folder."""
    config = read_config(folder, shown)
    state = load_weights(folder / "model.safetensors", f"{shown}/model.safetensors")
    network_class = getattr(_ultralytics(), config.task.network)
    try:
        _check_network_size(config, state, f"{shown}/config.json")
        network = network_class(_copied(config.architecture), ch=CHANNELS, nc=len(config.names), verbose=False)
    except ModelError:
        raise
    except Exception as error:  # a wrong architecture breaks anywhere in its construction
        raise ModelError(f"{shown}/config.json: the architecture cannot be built: {error!s:.200}") from None
    load_into(network, state, f"{shown}/model.safetensors")
    return YoloModel(
        config.task, network.eval(), config.names, config.image_size, config.confidence, config.iou, config.points
    )


def _check_network_size(config: YoloFolder, state: Mapping[str, Any], shown: str) -> None:
    """Raise ModelError unless the layers have as many numbers as the weights. They are built without memory."""
    import torch

    with torch.device("meta"):
        layers, _ = _ultralytics().parse_model(_copied(config.architecture), ch=CHANNELS, verbose=False)
    built = sum(tensor.numel() for tensor in layers.state_dict().values())
    stored = sum(tensor.numel() for tensor in state.values())
    if built != stored:
        raise ModelError(f"{shown} describes a network of {built} numbers, and its weights have {stored}")


def _copied(architecture: Mapping[str, Any]) -> Any:
    """Return a copy of an architecture: ultralytics modifies its argument."""
    return copy.deepcopy(architecture)


def load_pickle(model: str, path: Path | None, task: YoloTask, image_size: int) -> YoloModel:
    """Load a model for `task` from ultralytics' pickle format, which executes code. Only for trusted files."""
    tasks = _ultralytics()
    try:
        network, _ = tasks.load_checkpoint(str(path or model))
    except Exception as error:
        raise ModelError(f"{model} cannot be opened by ultralytics: {error!s:.200}") from None
    kind = type(network).__name__
    if NETWORKS.get(kind) is not task:
        raise ModelError(f"{model} is a {kind:.80}, expected a {task.network}, which {task.about}")
    if network.yaml.get("channels", CHANNELS) != CHANNELS:
        raise ModelError(f"{model} has inputs of {network.yaml['channels']} channels, expected {CHANNELS}")
    names = tuple(str(network.names[index]) for index in range(len(network.names)))
    trained = getattr(network, "args", {}).get("imgsz", IMAGE_SIZE)
    return YoloModel(
        task,
        network.eval(),
        names,
        image_size or (trained if isinstance(trained, int) else IMAGE_SIZE),
        points=_points_of(network, names) if task is POSE else (),
        transforms=getattr(network, "transforms", None) if task is CLASSIFY else None,
    )


def _points_of(network: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a pose network's keypoints: those that it was trained with, where it stores them."""
    count = int(network.kpt_shape[0])
    known = getattr(network, "kpt_names", None)
    first = next(iter(known.values()), ()) if isinstance(known, dict) else ()
    return tuple(map(str, first)) if len(first) == count else default_points(names, count)


def _ultralytics() -> Any:
    try:
        from ultralytics.nn import tasks
    except ImportError:
        raise MissingPackage("ultralytics", "yolo") from None
    return tasks
