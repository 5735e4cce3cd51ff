"""Pictures of coloured shapes with known contents: what the bundled detector learns from and is judged on.

`render` draws things on a background and says where each one is. A third of the pictures are plain: pure colours, a
flat background, hard edges, as a few lines of drawing code would make them. The rest vary in colour, texture, light,
blur and compression. Three promises hold for every picture: each object lies wholly inside it, stands out from every
colour of the background (and, unless outlined, from any object that it touches), and has at least `VISIBLE_MIN` of its
area uncovered. Equal seeds give equal pictures. Training and judging draw from seeds that never meet: see `SEEDS`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from examples.models.language import Thing, scene
from examples.models.scene_looks import CONTRAST_MIN, RGB, Floats, background, distance, fill, finish

SEEDS = {"train": range(0, 1_000_000), "held_out": range(1_000_000, 1_100_000), "choose": range(1_100_000, 1_200_000)}
"""Seeds per split: 'train' to learn from, 'choose' to pick thresholds on, 'held_out' for the reported scores."""

DEMO_SEED = 5_000_205
"""Picked by eye among its neighbours, outside every split."""

SIDE_PX = (240, 640)
"""Shortest and longest side of a picture whose size is not asked for."""
ASPECT_MAX = 1.7
EXTENT = (0.09, 0.42)
"""An object's longer box side, as a share of the picture's shorter side."""
VISIBLE_MIN = 0.65
"""Least share of an object's area that nothing drawn later covers."""
SUPERSAMPLING = 4


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and the truth about it.

    image:   uint8 [H, W, 3], RGB.
    things:  N objects in drawing order: a later one may cover part of an earlier one.
    boxes:   float32 [N, 4], x0 y0 x1 y1 in pixels around the whole object, also where it is covered.
    visible: float32 [N], share of each object's area that is not covered.
    """

    image: NDArray[np.uint8]
    things: tuple[Thing, ...]
    boxes: Floats
    visible: Floats


@dataclass(frozen=True, slots=True)
class _Look:
    """What the objects of one picture have in common."""

    plain: bool
    overlap: bool
    outline: RGB | None
    extent_max: float


@dataclass(frozen=True, slots=True)
class _Stamp:
    """One object cut out: its place (left, top) and, over its box, coverage in 0..1 of its body and its outline."""

    left: int
    top: int
    body: Floats
    rim: Floats | None
    colour: RGB

    @property
    def window(self) -> tuple[slice, slice]:
        height, width = self.body.shape
        return slice(self.top, self.top + height), slice(self.left, self.left + width)


def picture(split: str, index: int, overlap: bool | None = None) -> Picture:
    """Return picture `index` of a split of `SEEDS`: a scene of 1 to 9 objects and its rendering."""
    rng = random.Random(SEEDS[split][index])
    return render(scene(rng), rng, overlap=overlap)


def render(
    things: Sequence[Thing],
    rng: random.Random,
    size: tuple[int, int] | None = None,
    plain: bool | None = None,
    ground: str | None = None,
    overlap: bool | None = None,
) -> Picture:
    """Draw `things`, each once, at random places.

    size:  (width, height) in pixels; drawn within `SIDE_PX` when None.
    plain: True for pure colours, a flat background and hard edges; None lets chance decide.
    ground: kind of background, one of `BACKGROUNDS`; None lets chance decide.
    overlap: whether objects may cover each other in part; None lets chance decide.
    Raises ValueError when the things do not fit even at the smallest extent.
    """
    width, height = size or _size(rng)
    crowd = 0.95 / math.sqrt(max(1, len(things)))
    look = _Look(
        plain=rng.random() < 0.33 if plain is None else plain,
        overlap=(rng.random() < 0.5) if overlap is None else overlap,
        outline=_outline(rng),
        extent_max=min(EXTENT[1], crowd) * rng.choice((1.0, 1.0, 0.75, 0.5)),
    )
    fills = [fill(thing.colour, rng, look.plain) for thing in things]
    canvas = background(width, height, fills, rng, look.plain, ground)
    for _ in range(20):
        placed = _place(things, fills, look, (width, height), rng)
        if placed is not None:
            stamps, visible = placed
            image = finish(_compose(canvas, stamps, look, rng), rng, look.plain)
            return Picture(image, tuple(things), _boxes(stamps), visible)
    raise ValueError(f"{len(things)} things do not fit into {width} x {height} px; draw fewer or enlarge the picture")


def demo_picture() -> Picture:
    """Return the picture of the README: 2 red circles and 4 other shapes, 640 x 480, all uncovered."""
    names = ("red circle", "red circle", "blue star", "green triangle", "yellow square", "blue circle")
    things = [Thing(*name.split()) for name in names]
    return render(things, random.Random(DEMO_SEED), (640, 480), plain=False, ground="texture")


def _size(rng: random.Random) -> tuple[int, int]:
    shortest, longest = SIDE_PX
    long = rng.randint(max(shortest, 280), longest)
    short = max(shortest, round(long / rng.uniform(1.0, ASPECT_MAX)))
    return (long, short) if rng.random() < 0.65 else (short, long)


def _outline(rng: random.Random) -> RGB | None:
    return rng.choices((None, (0, 0, 0), (255, 255, 255), (90, 90, 90)), weights=(70, 20, 5, 5))[0]


def _place(
    things: Sequence[Thing], fills: Sequence[RGB], look: _Look, size: tuple[int, int], rng: random.Random
) -> tuple[list[_Stamp], Floats] | None:
    """Find a place for each thing in turn, smaller after each miss; None when one finds none."""
    width, height = size
    owner = np.full((height, width), -1, np.int16)
    stamps: list[_Stamp] = []
    areas: list[int] = []
    for thing, colour in zip(things, fills, strict=True):
        share = rng.uniform(min(EXTENT[0] * 1.2, look.extent_max), look.extent_max)
        for _ in range(60):
            stamp = _stamp(thing.shape, colour, max(share, EXTENT[0]) * min(size), look, size, rng)
            if _fits(stamp, stamps, areas, owner, look):
                break
            share *= 0.96
        else:
            return None
        solid = stamp.body > 0.5
        owner[stamp.window][solid] = len(stamps)
        stamps.append(stamp)
        areas.append(int(solid.sum()))
    left = np.bincount(owner[owner >= 0], minlength=len(stamps))
    return stamps, (left / np.maximum(areas, 1)).astype(np.float32)


def _fits(new: _Stamp, stamps: Sequence[_Stamp], areas: Sequence[int], owner: NDArray[np.int16], look: _Look) -> bool:
    """Say whether `new` may be drawn over what is there: enough stays visible, no two of a colour melt together."""
    solid = Image.fromarray((new.body > 0.5).astype(np.uint8))
    near = np.asarray(solid.filter(ImageFilter.MaxFilter(5))) > 0
    for index in set(owner[new.window][near].tolist()) - {-1}:
        if not look.overlap:
            return False
        if new.rim is None and distance(new.colour, stamps[index].colour) < CONTRAST_MIN:
            return False
        left = int((owner == index).sum()) - int((owner[new.window][new.body > 0.5] == index).sum())
        if left < VISIBLE_MIN * areas[index]:
            return False
    return True


def _stamp(shape: str, colour: RGB, extent: float, look: _Look, size: tuple[int, int], rng: random.Random) -> _Stamp:
    """Cut out one shape whose longer side is `extent` px, somewhere inside a picture of `size`."""
    corners = _corners(shape, rng)
    corners -= corners.min(axis=0)
    corners *= (extent - 1) / corners.max()
    width, height = (math.ceil(v) + 1 for v in corners.max(axis=0).tolist())
    factor = 1 if look.plain else SUPERSAMPLING
    points = [(x * factor, y * factor) for x, y in (corners + 0.5).tolist()]
    rim_px = max(1, round(extent * rng.uniform(0.015, 0.05))) * factor
    cut = [Image.new("L", (width * factor, height * factor)) for _ in range(2)]
    ImageDraw.Draw(cut[0]).polygon(points, fill=255, outline=255)
    ImageDraw.Draw(cut[1]).polygon(points, fill=0, outline=255, width=rim_px)
    body, rim = (np.asarray(layer.reduce(factor), np.float32) / np.float32(255) for layer in cut)
    left, top = rng.randint(0, max(0, size[0] - width)), rng.randint(0, max(0, size[1] - height))
    return _Stamp(left, top, body, rim if look.outline else None, colour)


def _corners(shape: str, rng: random.Random) -> Floats:
    """Return float32 [K, 2]: the polygon of a shape, turned, in no particular scale."""
    turn = 0.0 if rng.random() < 0.4 else rng.uniform(0, 2 * math.pi)
    if shape == "triangle":
        apex = rng.choice((0.0, 0.0, 0.0, rng.uniform(-0.5, 0.5)))
        points = [(-0.5, 0.0), (0.5, 0.0), (apex, -rng.choice((0.866, 1.0, rng.uniform(0.7, 1.15))))]
    elif shape == "square":
        side = rng.choice((1.0, 1.0, rng.uniform(0.93, 1.07)))
        points = [(0.0, 0.0), (side, 0.0), (side, 1.0), (0.0, 1.0)]
    elif shape == "circle":
        points = [(math.cos(2 * math.pi * k / 72), math.sin(2 * math.pi * k / 72)) for k in range(72)]
    elif shape == "star":
        tips = rng.choices((5, 6), weights=(93, 7))[0]
        inner = rng.choice((0.382, 0.4, 0.5, rng.uniform(0.36, 0.52))) if tips == 5 else rng.uniform(0.5, 0.58)
        angles = [math.pi * (k / tips - 0.5) for k in range(2 * tips)]
        points = [((1, inner)[k % 2] * math.cos(a), (1, inner)[k % 2] * math.sin(a)) for k, a in enumerate(angles)]
    else:
        raise ValueError(f"unknown shape {shape!r}; known: circle, square, triangle, star")
    rotation = np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]], np.float32)
    return np.asarray(points, np.float32) @ rotation


def _compose(canvas: Floats, stamps: Sequence[_Stamp], look: _Look, rng: random.Random) -> Floats:
    """Draw the stamps over the canvas, in place, in order; a few are shaded from one side."""
    for stamp in stamps:
        paint = np.broadcast_to(np.asarray(stamp.colour, np.float32), (*stamp.body.shape, 3))
        if not look.plain and rng.random() < 0.3:
            slope = np.linspace(1 - rng.uniform(0, 0.2), 1 + rng.uniform(0, 0.1), stamp.body.shape[0], dtype=np.float32)
            paint = np.clip(paint * slope[:, None, None], 0, 255)
        if stamp.rim is not None and look.outline is not None:
            paint = paint + (np.asarray(look.outline, np.float32) - paint) * stamp.rim[..., None]
        under = canvas[stamp.window]
        under += (paint - under) * stamp.body[..., None]
    return canvas


def _boxes(stamps: Sequence[_Stamp]) -> Floats:
    boxes = []
    for stamp in stamps:
        rows, columns = np.nonzero(stamp.body > 0.5)
        boxes.append(
            (
                stamp.left + columns.min(),
                stamp.top + rows.min(),
                stamp.left + columns.max() + 1,
                stamp.top + rows.max() + 1,
            )
        )
    return np.asarray(boxes, np.float32).reshape(-1, 4)
