"""Output values as files: PNG, WAV, NPY, and pictures with what was found in them: boxes, masks, keypoints."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator, Mapping
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np

from weftline.errors import WeftlineError
from weftline.nodes.detections import Detections
from weftline.nodes.drawing import draw_label, draw_result, is_cover, is_drawable
from weftline.nodes.ports import AUDIO_HZ, PortType
from weftline.pipelines.placement.plan import Plan, PlannedOutput

COLOURS = ((230, 60, 60), (40, 120, 230), (20, 150, 70), (230, 140, 0), (150, 70, 200), (0, 150, 160))
"""Frames, by class; dark enough for white letters on them."""

SAVED_SUFFIXES = {"image": ".png", "audio": ".wav", "tensor": ".npy", "bytes": ".bin", "detections": ".json"}
"""The file that each kind of output becomes; text and json are printed and stay where they are."""


def make_folder(folder: Path) -> None:
    """Make the folder that outputs go to, before anything is computed for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeftlineError(f"--save {folder}: cannot make this folder: {error.strerror}") from None


def save_outputs(plan: Plan, inputs: Mapping[str, Any], outputs: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Write what is no text or json into `folder`, and return the file of each output that has one.

    Detections become json. NAME.png beside it is the picture they were found in, with frames, where that picture is an
    input of the pipeline; so it is for maps, masks, keypoints and oriented boxes. `inputs` holds the decoded inputs.
    Each element of a list has a file of its own, NAME.0.png and so on, and is returned as NAME.0.
    """
    saved = {}
    for output in plan.outputs:
        picture = picture_of(plan, output, inputs)
        for name, value, type in _values(output, outputs.get(output.name)):
            kind = _kind(type, value)
            drawn = picture is not None and _is_drawn(value, picture)
            suffix = SAVED_SUFFIXES.get(kind, ".png" if drawn else "")
            if not suffix:
                continue
            path = folder / f"{name}{suffix}"
            try:
                if kind in SAVED_SUFFIXES:
                    _write(kind, value, path)
                if picture is not None and drawn:
                    _write("image", annotated(picture, value), folder / f"{name}.png")
            except OSError as error:
                raise WeftlineError(f"cannot write {path}: {error.strerror}") from None
            saved[name] = path
    return saved


def _is_drawn(value: Any, picture: np.ndarray) -> bool:
    return isinstance(value, Detections) or is_drawable(value, *picture.shape[:2])


def element_name(name: str, place: int) -> str:
    """Return what an element of a list is called as a file: no output's name has a dot."""
    return f"{name}.{place}"


def _values(output: PlannedOutput, value: Any) -> Iterator[tuple[str, Any, PortType]]:
    """Yield an output, or each element of a list, with its name and type; nothing where it is absent."""
    if output.type.item is not None and isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield element_name(output.name, place), one, output.type.item
    elif value is not None:
        yield output.name, value, output.type


def _kind(type: PortType, value: Any) -> str:
    if type.kind != "any":
        return type.kind
    return "detections" if isinstance(value, Detections) else "tensor" if isinstance(value, np.ndarray) else "json"


def _write(kind: str, value: Any, path: Path) -> None:
    if kind == "image":
        from PIL import Image

        Image.fromarray(value).save(path)
    elif kind == "audio":
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, AUDIO_HZ, len(value), "NONE", "not compressed"))
            file.writeframes((np.clip(value, -1, 1) * 32767).round().astype("<i2").tobytes())
    elif kind == "tensor":
        np.save(path, value, allow_pickle=False)
    elif kind == "detections":
        path.write_text(json.dumps(value.to_json(), ensure_ascii=False, indent=2) + "\n", "utf-8")
    else:
        path.write_bytes(value)


def picture_of(plan: Plan, output: PlannedOutput, inputs: Mapping[str, Any]) -> np.ndarray | None:
    """Return the picture whose pixels an output's boxes count, or None when it is no input of the pipeline."""
    if output.wire.step is None:
        return None
    reads = [one for one in plan.step(output.wire.step).inputs if one.type.kind == "image"]
    if len(reads) != 1 or reads[0].wire.step is not None:
        return None
    picture = inputs.get(reads[0].wire.port)
    return picture if isinstance(picture, np.ndarray) else None


def annotated(picture: np.ndarray, *results: Any) -> np.ndarray:
    """Return a copy of the picture, uint8[H, W, 3], with what was found in it drawn.

    Detections have a frame and a label each, the surest on top. They lie above masks and maps, and below keypoints and
    oriented boxes. Other results are not drawn.
    """
    from PIL import Image

    image = Image.fromarray(picture)
    height, width = picture.shape[:2]
    shapes = [one for one in results if is_drawable(one, height, width)]
    for one in filter(is_cover, shapes):
        image = draw_result(image, one, height, width, COLOURS)
    for one in results:
        if isinstance(one, Detections):
            _frame(image, one)
    for one in filterfalse(is_cover, shapes):
        image = draw_result(image, one, height, width, COLOURS)
    return np.asarray(image)


def _frame(image: Any, found: Detections) -> None:
    """Draw frames and labels into a PIL image."""
    from PIL import ImageDraw, ImageFont

    width, height = image.size
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(max(11, min(height, width) // 32))
    line = max(2, min(height, width) // 200)
    for index in reversed(range(len(found))):
        box = np.nan_to_num(found.boxes[index].astype(np.float64), posinf=max(height, width), neginf=0)
        left, right = sorted(np.clip(box[[0, 2]], 0, width - 1).tolist())
        top, bottom = sorted(np.clip(box[[1, 3]], 0, height - 1).tolist())
        colour = COLOURS[int(found.classes[index]) % len(COLOURS)]
        draw.rectangle((left, top, right, bottom), outline=colour, width=line)
        label = f"{found.labels[index]} {float(found.scores[index]):.2f}"
        draw_label(draw, label, (left, top), colour, font, width)
