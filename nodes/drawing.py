"""Drawing of results into their picture: maps of segments, masks, keypoints and oriented boxes.

A result carries no type, so it is recognised by its form: an int32 map of the picture's size, or a list of dicts with
`counts`, `points` or `corners`, as `weftline.nodes.shapes` writes them. Parts of a list that are no such shapes are not
drawn; values come from any node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weftline.nodes.shapes import COCO_POINTS, decode_mask

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

OBJECTS_MAX = 300
"""Most objects of a list that are drawn."""

OPACITY = 0.45
"""Share of the colour where a mask covers a picture."""

SCORE_MIN = 0.25
"""Least score of a keypoint that is drawn, as in ultralytics."""

COORDINATE_MAX = 1e6
LABEL_CHARS_MAX = 24

LIMBS = (
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10),
    (1, 2), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6),
)  # fmt: skip
"""Lines between COCO's 17 keypoints of a person."""

Colour = tuple[int, int, int]
Colours = Sequence[Colour]


def is_drawable(value: Any, height: int, width: int) -> bool:
    """Return True for a result that can be drawn into its picture of `height` x `width` px."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype == np.int32 and value.shape == (height, width))
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, Mapping) and _form(one) for one in value[:OBJECTS_MAX])


def is_cover(value: Any) -> bool:
    """Return True for a drawable result that covers pixels: a map or masks."""
    return isinstance(value, np.ndarray) or _form(value[0]) == "counts"


def _form(one: Mapping[str, Any]) -> str:
    """Return the key that holds the shape of an object, '' for none."""
    return next((key for key, kind in _FORMS.items() if isinstance(one.get(key), kind)), "")


_FORMS: Mapping[str, type] = {"counts": str, "points": list, "corners": list}


def draw_result(
    image: Image.Image, value: Any, height: int, width: int, colours: Colours, objects_max: int = OBJECTS_MAX
) -> Image.Image:
    """Return `image` with a drawable result of its original, which has `height` x `width` px; it may be drawn into."""
    if isinstance(value, np.ndarray):
        return _covered(image, _shrunk(value, image), colours)
    objects = value[:objects_max]
    masks = [one for one in objects if _form(one) == "counts"]
    if masks:
        image = _covered(image, _merged(masks, image, height, width), colours)
    _draw_lines(image, objects, (image.width / width, image.height / height), colours)
    return image


def _shrunk(array: np.ndarray, image: Image.Image) -> np.ndarray:
    """Return the pixels of [H, W] that lie under those of `image`."""
    rows = np.arange(image.height) * array.shape[0] // image.height
    columns = np.arange(image.width) * array.shape[1] // image.width
    shrunk: np.ndarray = array[rows[:, None], columns]
    return shrunk


def _merged(masks: Sequence[Mapping[str, Any]], image: Image.Image, height: int, width: int) -> np.ndarray:
    """Return a map of masks in the size of `image`, numbered from 1, the first on top."""
    marked = np.zeros((image.height, image.width), np.int32)
    for place in reversed(range(len(masks))):
        try:
            marked[_shrunk(decode_mask(masks[place], height, width), image)] = place + 1
        except ValueError:
            continue
    return marked


def _covered(image: Image.Image, marked: np.ndarray, colours: Colours) -> Image.Image:
    """Return `image` with the colour of its number over every pixel that is not 0 in the map."""
    from PIL import Image

    pixels = np.asarray(image).astype(np.float32)
    wheel = np.array(colours, np.float32)
    covered = marked != 0
    pixels[covered] += OPACITY * (wheel[(marked[covered] - 1) % len(wheel)] - pixels[covered])
    return Image.fromarray(pixels.round().astype(np.uint8))


def _draw_lines(
    image: Image.Image, objects: Sequence[Mapping[str, Any]], scale: tuple[float, float], colours: Colours
) -> None:
    """Draw corners as frames with labels, and keypoints as dots and limbs, the first object on top."""
    from PIL import ImageDraw, ImageFont

    draw, font = ImageDraw.Draw(image), ImageFont.load_default(max(11, min(image.size) // 32))
    line = max(2, min(image.size) // 200)
    for place in reversed(range(len(objects))):
        one, colour = objects[place], colours[place % len(colours)]
        if _form(one) == "corners":
            corners = [corner for pair in one["corners"][:4] if (corner := _place(pair, scale))]
            if len(corners) == 4:
                draw.line([*corners, corners[0], corners[1]], fill=colour, width=line, joint="curve")
                top = min(corners, key=lambda corner: corner[1])
                if text := _label(one):
                    draw_label(draw, text, top, colour, font, image.width)
        elif _form(one) == "points":
            _draw_points(draw, one["points"], scale, colour, line)


def _label(one: Mapping[str, Any]) -> str:
    """Return an object's name and score, in letters that Pillow's own font has."""
    score = one.get("score")
    text = f"{str(one.get('name', ''))[:LABEL_CHARS_MAX]} {score:.2f}" if _number(score) else str(one.get("name", ""))
    return text[: LABEL_CHARS_MAX + 8].replace("\n", " ").encode("latin-1", "replace").decode("latin-1")


def _draw_points(
    draw: ImageDraw.ImageDraw, points: Sequence[Any], scale: tuple[float, float], colour: Colour, line: int
) -> None:
    places = list(_places(points, scale))
    if _is_person(points):
        for start, end in ((places[first], places[second]) for first, second in LIMBS):
            if start and end:
                draw.line([start, end], fill=colour, width=line)
    for dot in places:
        if dot:
            draw.ellipse((dot[0] - line, dot[1] - line, dot[0] + line, dot[1] + line), fill=colour)


def _is_person(points: Sequence[Any]) -> bool:
    """Return True for COCO's 17 keypoints of a person."""
    first = points[0] if points else None
    return len(points) == len(COCO_POINTS) and isinstance(first, Mapping) and str(first.get("name")).lower() == "nose"


def _places(points: Sequence[Any], scale: tuple[float, float]) -> Iterator[tuple[float, float] | None]:
    """Yield where each keypoint is drawn; None where it is not."""
    for point in points:
        if not isinstance(point, Mapping) or not _number(point.get("score", 1.0)) or point.get("score", 1) < SCORE_MIN:
            yield None
        else:
            yield _place((point.get("x"), point.get("y")), scale)


def _place(pair: Any, scale: tuple[float, float]) -> tuple[float, float] | None:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(_number, pair)):
        return None
    return pair[0] * scale[0], pair[1] * scale[1]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) <= COORDINATE_MAX


def draw_label(
    draw: ImageDraw.ImageDraw,
    text: str,
    corner: tuple[float, float],
    colour: Colour,
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
