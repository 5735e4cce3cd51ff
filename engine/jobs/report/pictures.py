"""Thumbnails with detections, and waveforms, for the report."""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.nodes.detections import Detections

if TYPE_CHECKING:
    from PIL import Image

SIDE_MAX = 240
"""Longest side of a picture, in pixels."""

FRAMES_MAX = 12
"""Most frames drawn into a picture: the surest."""

LABEL_CHARS_MAX = 24
JPEG_QUALITY = 80
FONT_PX = 11

FRAME_COLOURS = ((214, 54, 54), (36, 108, 216), (18, 138, 66), (205, 112, 0), (138, 66, 190), (0, 134, 144))
"""By class; dark enough for white letters on them."""

WAVE_WIDTH, WAVE_HEIGHT = 240, 60
WAVE_COLOUR = (45, 105, 170)


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded thumbnail: its file, its type for browsers, and its size in pixels."""

    data: bytes
    mime: str
    width: int
    height: int


def is_picture(array: np.ndarray) -> bool:
    """Whether an array is a picture, uint8[H, W, 3], rather than any tensor."""
    return array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3 and min(array.shape[:2]) > 0


def thumbnail(picture: np.ndarray, found: Detections | None = None) -> Picture:
    """Return a picture, uint8[H, W, 3], with no side above SIDE_MAX; with frames for what was found in it."""
    from PIL import Image

    height, width = picture.shape[:2]
    scale = min(1.0, SIDE_MAX / max(height, width))
    step = max(1, int(0.25 / scale))  # only every so many pixels of a very large picture are looked at
    image = Image.fromarray(np.ascontiguousarray(picture[::step, ::step]))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    if image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    if found is not None:
        _frame(image, found, (size[0] / width, size[1] / height))
    return _encoded(image)


def waveform(samples: np.ndarray) -> Picture:
    """Return the outline of a recording, float[samples] in -1 to 1, as a picture."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WAVE_WIDTH, WAVE_HEIGHT), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    middle, reach = (WAVE_HEIGHT - 1) / 2, WAVE_HEIGHT / 2 - 1
    edges = np.linspace(0, len(samples), WAVE_WIDTH + 1).astype(int)
    for x, (start, end) in enumerate(pairwise(edges.tolist())):
        piece = samples[start : max(end, start + 1)]
        low, high = (float(piece.min()), float(piece.max())) if len(piece) else (0.0, 0.0)
        top, bottom = middle - np.clip(high, -1, 1) * reach, middle - np.clip(low, -1, 1) * reach
        draw.line((x, float(top), x, float(bottom)), fill=WAVE_COLOUR)
    return _encoded(image)


def _frame(image: Image.Image, found: Detections, scale: tuple[float, float]) -> None:
    """Draw frames and labels, the surest on top."""
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_PX)
    width, height = image.size
    for index in reversed(range(min(len(found), FRAMES_MAX))):
        box = np.nan_to_num(found.boxes[index].astype(np.float64), posinf=1e9, neginf=0)
        left, right = sorted(np.clip(box[[0, 2]] * scale[0], 0, width - 1).tolist())
        top, bottom = sorted(np.clip(box[[1, 3]] * scale[1], 0, height - 1).tolist())
        colour = FRAME_COLOURS[int(found.classes[index]) % len(FRAME_COLOURS)]
        draw.rectangle((left, top, right, bottom), outline=colour, width=2)
        text = f"{found.labels[index][:LABEL_CHARS_MAX]} {float(found.scores[index]):.2f}".replace("\n", " ")
        text = text.encode("latin-1", "replace").decode("latin-1")  # letters that Pillow's own font may have
        _, _, wide, tall = draw.textbbox((0, 0), text, font=font)
        at_x = max(0.0, min(left, width - wide - 3))
        at_y = top - tall - 3 if top >= tall + 3 else top
        draw.rectangle((at_x, at_y, at_x + wide + 3, at_y + tall + 2), fill=colour)
        draw.text((at_x + 2, at_y), text, fill=(255, 255, 255), font=font)


def _encoded(image: Image.Image) -> Picture:
    """Return a picture as PNG or JPEG, whichever is smaller: drawings and photographs differ."""
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("image/png", {"optimize": True}),
        ("image/jpeg", {"quality": JPEG_QUALITY}),
    )
    files = []
    for mime, options in kinds:
        file = io.BytesIO()
        image.save(file, mime.removeprefix("image/"), **options)
        files.append((file.tell(), mime, file.getvalue()))
    _, mime, data = min(files)
    return Picture(data, mime, *image.size)
