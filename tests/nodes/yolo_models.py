"""Folders of YOLO models of ultralytics' own architectures in their smallest size, with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from weftline.nodes.yolo_file import quiet_ultralytics
from weftline.nodes.yolo_tasks import TASKS

SIDE = 96
SUFFIXES = {"detect": "", "segment": "-seg", "pose": "-pose", "obb": "-obb", "classify": "-cls"}


def network_of(task: str, cache: Path, family: str = "yolo11", names: int = 3, **options: Any) -> Any:
    """Return a network of ultralytics' yaml for a task, with weights that give different answers.

    options: keys of the yaml to replace.
    """
    quiet_ultralytics(cache, offline=True)
    from ultralytics.nn import tasks

    torch.set_num_threads(1)
    torch.manual_seed(0)
    architecture = {**tasks.yaml_model_load(f"{family}n{SUFFIXES[task]}.yaml"), **options}
    for key in ("yaml_file", "channels"):
        architecture.pop(key, None)
    network = getattr(tasks, TASKS[task].network)(architecture, ch=3, nc=names, verbose=False)
    return random_weights(network)


def random_weights(network: Any) -> Any:
    """Give a network weights whose answers differ, and names; return it in eval mode."""
    with torch.no_grad():
        for parameter in network.model[:-1].parameters():  # pictures that differ reach the last layer
            if parameter.ndim == 4:
                torch.nn.init.kaiming_normal_(parameter)
        for parameter in network.model[-1].parameters():  # untrained scores are all alike
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for branch in getattr(network.model[-1], "cv2", []):  # short distances from the middle: boxes in the picture
            bins = branch[-1].bias.view(4, -1)
            bins.sub_(torch.arange(float(bins.shape[1])))
    network.names = {place: f"thing {place}" for place in range(network.yaml["nc"])}
    return network.eval()


def save_yolo(folder: Path, task: str, family: str = "yolo11", **options: Any) -> Path:
    """Save a weftline-yolo folder; options: keys of the yaml to replace."""
    network = network_of(task, folder.parent / "cache", family, **options)
    architecture = {key: value for key, value in network.yaml.items() if key not in ("yaml_file", "channels")}
    config = {
        "format": "weftline-yolo", "architecture": architecture, "image_size": SIDE, "confidence": 0.001, "iou": 0.5,
        "names": {str(place): name for place, name in network.names.items()},
    }  # fmt: skip
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in network.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pictures() -> list[np.ndarray]:
    """Return pictures uint8[H, W, 3] of different sizes, two of them of one size."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for h, w in ((60, 90), (96, 96), (200, 50), (60, 90))]


def predicted(network: Any, images: list[np.ndarray], task: str, **options: Any) -> list[Any]:
    """Return the results of ultralytics' own predictor, with squares as inputs."""
    from ultralytics.models import yolo

    names = {
        "detect": "detect.DetectionPredictor", "segment": "segment.SegmentationPredictor", "pose": "pose.PosePredictor",
        "obb": "obb.OBBPredictor", "classify": "classify.ClassificationPredictor",
    }  # fmt: skip
    module, name = names[task].split(".")
    settings = {
        "conf": 0.001, "iou": 0.5, "imgsz": SIDE, "rect": False, "save": False, "verbose": False, "device": "cpu",
        "retina_masks": True, **options,
    }  # fmt: skip
    predictor = getattr(getattr(yolo, module), name)(overrides=settings)
    predictor.setup_model(network, verbose=False)
    return [one for image in images for one in predictor(image[..., ::-1].copy())]
