"""Output values as files: PNG, WAV, NPY, and pictures with detections drawn in."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.cli.show import finite
from weftline.errors import WeftlineError
from weftline.nodes.detections import Detections
from weftline.nodes.ports import AUDIO_HZ, PortType
from weftline.pipelines.placement.plan import Plan, PlannedOutput

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

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

    Detections become json, and beside it NAME.png: the picture they were found in, with frames, where that picture is
    an input of the pipeline. `inputs` holds the decoded inputs. Each element of a list has a file of its own,
    NAME.0.png and so on, and is returned as NAME.0.
    """
    saved = {}
    for output in plan.outputs:
        for name, value, type in _values(output, outputs.get(output.name)):
            kind = _kind(type, value)
            if kind not in SAVED_SUFFIXES:
                continue
            path = folder / f"{name}{SAVED_SUFFIXES[kind]}"
            try:
                _write(kind, value, path)
                picture = picture_of(plan, output, inputs) if kind == "detections" else None
                if picture is not None:
                    _write("image", annotated(picture, value), folder / f"{name}.png")
            except OSError as error:
                raise WeftlineError(f"cannot write {path}: {error.strerror}") from None
            saved[name] = path
    return saved


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
        path.write_text(json.dumps(finite(value.to_json()), ensure_ascii=False, indent=2) + "\n", "utf-8")
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


def annotated(picture: np.ndarray, found: Detections) -> np.ndarray:
    """Return a copy of the picture, uint8[H, W, 3], with a frame and a label for each detection, surest on top."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = picture.shape[:2]
    image = Image.fromarray(picture)
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
        _label(draw, label, (left, top), colour, font, width)
    return np.asarray(image)


def _label(
    draw: ImageDraw.ImageDraw,
    text: str,
    corner: tuple[float, float],
    colour: tuple[int, int, int],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    width: int,
) -> None:
    """Write `text` above a frame's upper left corner, moved inside the picture where it would leave it."""
    _, _, text_wide, text_tall = draw.textbbox((0, 0), text, font=font)
    wide, tall = text_wide + 4, text_tall + 4
    left = max(0.0, min(corner[0], width - wide))
    top = corner[1] - tall if corner[1] >= tall else corner[1]
    draw.rectangle((left, top, left + wide, top + tall), fill=colour)
    draw.text((left + 2, top + 2), text, fill=(255, 255, 255), font=font)
