"""Colours, backgrounds and camera effects of rendered scenes: why two pictures of the same things differ.

A colour is three floats, red, green and blue in 0..255. A canvas is float32 [H, W, 3] in the same units. Everything is
drawn from the random generator given, so equal generators give equal results.
"""

import colorsys
import io
import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

CONTRAST_MIN = 32.0
"""Least distance in CIELAB (delta E 1976) between an object and each background colour; 2 is just noticeable."""

RGB = tuple[float, float, float]
Floats = NDArray[np.float32]

# Hue in degrees, saturation, value: within these a person gives the colour its name.
_HSV = {
    "red": ((-12, 8), (0.68, 1.0), (0.52, 1.0)),
    "green": ((94, 152), (0.55, 1.0), (0.37, 1.0)),
    "blue": ((204, 248), (0.6, 1.0), (0.48, 1.0)),
    "yellow": ((47, 63), (0.62, 1.0), (0.82, 1.0)),
}
_PURE: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (220, 20, 60), (180, 0, 0), (139, 0, 0), (200, 0, 0), (214, 39, 40), (255, 50, 50)),
    "green": ((0, 128, 0), (0, 255, 0), (0, 100, 0), (34, 139, 34), (50, 205, 50), (44, 160, 44), (0, 200, 0)),
    "blue": ((0, 0, 255), (0, 0, 139), (0, 0, 205), (30, 144, 255), (65, 105, 225), (31, 119, 180), (0, 0, 180)),
    "yellow": ((255, 255, 0), (255, 215, 0), (240, 220, 40), (255, 235, 59), (230, 200, 0)),
}
BACKGROUNDS = ("plain", "gradient", "texture", "stripes", "checks", "noise")


def fill(name: str, rng: random.Random, plain: bool) -> RGB:
    """Draw a colour that a person calls `name`; in a plain picture mostly one of the usual pure ones."""
    if rng.random() < (0.8 if plain else 0.25):
        return rng.choice(_PURE[name])
    return _hsv(*(rng.uniform(*bounds) for bounds in _HSV[name]))


def _hsv(hue: float, saturation: float, value: float) -> RGB:
    red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value)
    return 255 * red, 255 * green, 255 * blue


def distance(one: RGB, other: RGB) -> float:
    """Return how different two colours look: delta E 1976, the distance in CIELAB."""
    return math.dist(_lab(one), _lab(other))


def _lab(colour: RGB) -> RGB:
    """sRGB (0..255) to CIELAB under D65: IEC 61966-2-1, then CIE 15."""
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour))
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def background(
    width: int, height: int, fills: Sequence[RGB], rng: random.Random, plain: bool, kind: str | None = None
) -> Floats:
    """Return float32 [H, W, 3] of a kind (one of `BACKGROUNDS`) in two colours that every fill stands out from."""
    if kind is None:
        kind = "plain" if plain else rng.choice(BACKGROUNDS)
    for _ in range(200):
        first, second = _ground(kind, rng, plain)
        middle = (first[0] + second[0]) / 2, (first[1] + second[1]) / 2, (first[2] + second[2]) / 2
        if all(distance(fill, ground) >= CONTRAST_MIN for fill in fills for ground in (first, middle, second)):
            break
    else:
        first = second = (250.0, 250.0, 250.0)
    share = _pattern(kind, width, height, rng)[..., None]
    return np.asarray(first, np.float32) * (1 - share) + np.asarray(second, np.float32) * share


def _ground(kind: str, rng: random.Random, plain: bool) -> tuple[RGB, RGB]:
    """Draw two background colours; checks and stripes stay pale, so that no cell of them is itself a named shape."""
    if plain and rng.random() < 0.75:
        grey = float(rng.choice((255, 255, 255, 0, 0, 128, 200, 240, rng.randrange(256))))
        return (grey, grey, grey), (grey, grey, grey)
    saturation = rng.uniform(0, {"checks": 0.3, "stripes": 0.45}.get(kind, 0.9)) * rng.choice((0.3, 1.0))
    hue, value = rng.uniform(0, 360), rng.uniform(0.1, 1.0)
    if kind in ("plain", "noise"):
        return _hsv(hue, saturation, value), _hsv(hue, saturation, max(0.0, value - 0.05))
    shift = rng.uniform(5, 60) if kind != "gradient" else rng.uniform(0, 180)
    other = min(1.0, max(0.05, value + rng.uniform(-0.4, 0.4)))
    return _hsv(hue, saturation, value), _hsv(hue + shift, saturation, other)


def _pattern(kind: str, width: int, height: int, rng: random.Random) -> Floats:
    """Return float32 [H, W] in 0..1: how much of the second colour each pixel shows."""
    angle, period = rng.uniform(0, math.pi), rng.uniform(10, 90)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    if kind in ("stripes", "checks") and rng.random() < 0.5:
        angle = 0.0
    along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    if kind == "plain":
        return np.zeros((height, width), np.float32)
    if kind == "gradient":
        return np.asarray((along - along.min()) / np.ptp(along), np.float32)
    if kind == "stripes":
        return np.asarray((along // period) % 2, np.float32)
    if kind == "checks":
        return np.asarray((along // period + across // period) % 2, np.float32)
    noise = np.random.default_rng(rng.getrandbits(64))
    cells = 1 if kind == "noise" else rng.choice((4, 8, 16, 32))
    total = np.zeros((height, width), np.float32)
    for octave in (cells, max(1, cells // 4)):
        grain = noise.random((height // octave + 2, width // octave + 2), dtype=np.float32)
        total += np.asarray(Image.fromarray(grain).resize((width, height), Image.Resampling.BICUBIC))
    return np.asarray(np.clip(total / 2, 0, 1), np.float32)


def finish(canvas: Floats, rng: random.Random, plain: bool) -> NDArray[np.uint8]:
    """Add what a camera would: uneven light, blur, grain, compression."""
    if plain:
        return np.asarray(np.clip(canvas + 0.5, 0, 255), np.uint8)
    if rng.random() < 0.3:
        canvas *= np.linspace(rng.uniform(0.85, 1), 1, canvas.shape[1], dtype=np.float32)[None, :, None]
    if rng.random() < 0.5:
        grain = np.random.default_rng(rng.getrandbits(64)).standard_normal(canvas.shape, dtype=np.float32)
        canvas += grain * np.float32(rng.uniform(1, 12))
    image = Image.fromarray(np.clip(canvas + 0.5, 0, 255).astype(np.uint8))
    if rng.random() < 0.4:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.0025 * max(image.size) + 0.3)))
    if rng.random() < 0.4:
        packed = io.BytesIO()
        image.save(packed, "JPEG", quality=rng.randint(45, 95))
        image = Image.open(packed)
    return np.array(image, np.uint8)
