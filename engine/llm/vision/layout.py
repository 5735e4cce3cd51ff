"""Layout of a picture or a video in the prompt, from its size alone: which tokens it takes up.

    fixed   every picture is resized to one size: n features
    grid    resized to a multiple of the patches, its shape kept: rows x columns features
    tiles   cut into tiles of one size, and the whole picture once more: for each tile its features between markers

    video, grid     parts of some frames each, all with a grid of one size: parts x rows x columns features
    video, frames   a text that counts them, and for each frame its time and the tokens of a picture of one tile

The numbers come from the settings of the model's own image processor and config.json, so that a picture that cannot fit
the context is refused before its pixels are processed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from weftline.engine.llm.vision.families import Family
from weftline.engine.llm.vision.prompt import ImageTokens
from weftline.errors import InputError, ModelError

ASPECT_MAX = 200
"""Largest ratio of a picture's sides, as in Qwen2-VL's image processor."""
CROPPED_ASPECT_MAX = 50
"""The same where the shorter side is resized to the model's before the picture is cut: pixels grow with the ratio."""
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"
"""Markers around a tile of Idefics3 and SmolVLM, and of the whole picture."""

Encode = Callable[[str], Sequence[int]]
"""From text to tokens, names of control tokens included."""


class ImageLayout(Protocol):
    """Maps the size of a picture to its tokens."""

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        """Return the tokens of a picture; InputError for a size that the model's processor does not support."""

    def features_of(self, height: int, width: int) -> int:
        """Return the number of features of a picture, without a tokenizer; InputError as above."""

    def largest(self, tokens_max: int) -> tuple[int, int]:
        """Return height and width of a picture with the most features of all below `tokens_max` tokens."""


@dataclass(frozen=True, slots=True)
class FixedLayout:
    """Every picture has `count` features."""

    placeholder: int
    count: int

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        count = self.features_of(height, width)
        return ImageTokens((self.placeholder,) * count, (range(count),))

    def features_of(self, height: int, width: int) -> int:
        _check_sides(height, width, CROPPED_ASPECT_MAX)
        return self.count

    def largest(self, tokens_max: int) -> tuple[int, int]:
        return 64, 64


@dataclass(frozen=True, slots=True)
class GridLayout:
    """A feature for each square of `side` pixels, of a picture resized to between `pixels_min` and `pixels_max`."""

    placeholder: int
    side: int
    pixels_min: int
    pixels_max: int

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        rows, columns = self._grid(height, width)
        count = rows * columns
        return ImageTokens((self.placeholder,) * count, (range(count),), (rows, columns))

    def features_of(self, height: int, width: int) -> int:
        return math.prod(self._grid(height, width))

    def largest(self, tokens_max: int) -> tuple[int, int]:
        squares = max(1, math.isqrt(min(self.pixels_max // self.side**2, tokens_max)))
        return squares * self.side, squares * self.side

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns after resizing; the smart resize of Qwen2-VL's image processor."""
        _check_sides(height, width, ASPECT_MAX)
        side = self.side
        rows, columns = round(height / side), round(width / side)
        pixels = rows * columns * side * side
        if pixels > self.pixels_max:
            shrink = math.sqrt(height * width / self.pixels_max)
            return max(1, math.floor(height / shrink / side)), max(1, math.floor(width / shrink / side))
        if pixels < self.pixels_min:
            grow = math.sqrt(self.pixels_min / (height * width))
            return math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows, columns


@dataclass(frozen=True, slots=True)
class TileLayout:
    """`count` features for each tile; `split` returns the rows and columns of tiles, 0 and 0 for a small picture."""

    placeholder: str
    count: int
    split: Callable[[int, int], tuple[int, int]]
    encode: Encode
    placeholder_id: int
    side_max: int

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        _check_sides(height, width, ASPECT_MAX)
        return self.tokens_of_tiles(*self.split(height, width))

    def tokens_of_tiles(self, rows: int, columns: int) -> ImageTokens:
        """Return the tokens of a picture of so many tiles, 0 and 0 for one that is not cut."""
        tokens = tuple(self.encode(self._text(rows, columns)))
        runs: list[range] = []
        for at, token in enumerate(tokens):
            if token != self.placeholder_id:
                continue
            if runs and runs[-1].stop == at:
                runs[-1] = range(runs[-1].start, at + 1)
            else:
                runs.append(range(at, at + 1))
        return ImageTokens(tokens, tuple(runs))

    def features_of(self, height: int, width: int) -> int:
        _check_sides(height, width, ASPECT_MAX)
        return (math.prod(self.split(height, width)) + 1) * self.count

    def largest(self, tokens_max: int) -> tuple[int, int]:
        side = self.side_max
        while side > 1 and len(self.tokens_of(side, side).tokens) > tokens_max:
            side //= 2
        return side, side

    def _text(self, rows: int, columns: int) -> str:
        features = self.placeholder * self.count
        whole = f"{FAKE}{GLOBAL}{features}{FAKE}"
        if not rows and not columns:
            return whole
        tiles = "".join(
            "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{features}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return f"{tiles}\n{whole}"


class VideoLayout(Protocol):
    """Maps the size of a video to its tokens.

    placeholder: the token that its tokens replace.
    """

    @property
    def placeholder(self) -> int: ...

    def parts_of(self, frames: int) -> list[range]:
        """Return the frames of each part."""

    def tokens_of(self, frames: int, height: int, width: int) -> list[ImageTokens]:
        """Return the tokens at each placeholder of a video; InputError for a size that is not supported.

        Each run is one part.
        """

    def features_of(self, frames: int, height: int, width: int) -> int:
        """Return the number of features of a video, without a tokenizer; InputError as above."""

    def times_of(self, frames: int, fps: float) -> list[int]:
        """Return the position in time of each part, after that of the first."""

    def text_of(self, frames: int, fps: float) -> str:
        """Return the text that stands for a video in the prompt, with a placeholder for each of `tokens_of`.

        '' where the chat template writes the one placeholder.
        """


@dataclass(frozen=True, slots=True)
class GridVideoLayout:
    """Videos of Qwen2-VL and Qwen2.5-VL: each part has `part_frames` frames, of which the last one is repeated.

    grid:              layout of a frame.
    tokens_per_second: distance of parts that are a second apart; None: all parts are 1 apart.
    pixels_max:        most pixels of all parts together, which limits those of a frame; None: no limit.
    """

    placeholder: int
    grid: GridLayout
    part_frames: int
    tokens_per_second: float | None = None
    pixels_max: int | None = None

    def parts_of(self, frames: int) -> list[range]:
        return [range(at, min(at + self.part_frames, frames)) for at in range(0, frames, self.part_frames)]

    def tokens_of(self, frames: int, height: int, width: int) -> list[ImageTokens]:
        one = self._grid_of(frames).tokens_of(height, width)
        each, parts = len(one.tokens), len(self.parts_of(frames))
        runs = tuple(range(at * each, (at + 1) * each) for at in range(parts))
        return [ImageTokens((self.placeholder,) * (each * parts), runs, one.grid)]

    def features_of(self, frames: int, height: int, width: int) -> int:
        return self._grid_of(frames).features_of(height, width) * len(self.parts_of(frames))

    def times_of(self, frames: int, fps: float) -> list[int]:
        """Return the positions of `Qwen2_5_VLModel.get_rope_index`, which computes them in float32."""
        count = len(self.parts_of(frames))
        if self.tokens_per_second is None:
            return list(range(count))
        distance = np.float32(self.tokens_per_second) * np.float32(self.part_frames / fps)
        return [int(time) for time in np.arange(count, dtype=np.float32) * distance]

    def text_of(self, frames: int, fps: float) -> str:
        return ""

    def _grid_of(self, frames: int) -> GridLayout:
        if self.pixels_max is None:
            return self.grid
        share = min(self.grid.pixels_max, self.pixels_max * self.part_frames // frames)
        return replace(self.grid, pixels_max=max(share, int(self.grid.pixels_min * 1.05)))


@dataclass(frozen=True, slots=True)
class FrameVideoLayout:
    """Videos of SmolVLM: each frame is a picture of one tile, with its time before it."""

    tiles: TileLayout

    @property
    def placeholder(self) -> int:
        return self.tiles.placeholder_id

    def parts_of(self, frames: int) -> list[range]:
        return [range(at, at + 1) for at in range(frames)]

    def tokens_of(self, frames: int, height: int, width: int) -> list[ImageTokens]:
        _check_sides(height, width, ASPECT_MAX)
        return [self.tiles.tokens_of_tiles(0, 0)] * frames

    def features_of(self, frames: int, height: int, width: int) -> int:
        _check_sides(height, width, ASPECT_MAX)
        return frames * self.tiles.count

    def times_of(self, frames: int, fps: float) -> list[int]:
        return [0] * frames

    def text_of(self, frames: int, fps: float) -> str:
        """Return the text of `SmolVLMProcessor.replace_video_token`, whose duration is the time of the last frame."""
        seconds = [at / fps for at in range(frames)]
        length = timedelta(seconds=int(seconds[-1]))
        intro = f"You are provided the following series of {in_words(frames)} frames from a {length} [H:MM:SS] video.\n"
        shown = (f"\nFrame from {int(at // 60):02d}:{int(at % 60):02d}:{self.tiles.placeholder}" for at in seconds)
        return f"{intro}{''.join(shown)}\n\n"


_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """Return a number from 0 to 999 in English words, as package num2words writes it."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens] + (f"-{_SMALL[rest]}" if rest else "")
    hundreds, rest = divmod(number, 100)
    return f"{_SMALL[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")


def _check_sides(height: int, width: int, aspect_max: int) -> None:
    """Raise InputError for a picture without pixels, or one that is too thin."""
    found = f"found a picture of {width} x {height} pixels"
    if min(height, width) < 1:
        raise InputError(f"{found}, expected at least one pixel")
    if max(height, width) > aspect_max * min(height, width):
        raise InputError(f"{found}, expected sides of a ratio of at most {aspect_max}")


def layout_of(family: Family, config: Any, processor: Any, placeholder: str, encode: Encode) -> ImageLayout:
    """Return the layout of a model. config: transformers'. processor: its image processor. encode: its tokenizer."""
    id, vision = int(config.image_token_id), config.vision_config
    if family.layout == "fixed":
        return FixedLayout(id, _fixed_count(config, processor))
    if family.layout == "grid":
        size = processor.size
        side = int(processor.patch_size) * int(processor.merge_size)
        return GridLayout(id, side, int(size["shortest_edge"]), int(size["longest_edge"]))
    patches = int(vision.image_size) // int(vision.patch_size)
    count = patches**2 // int(config.scale_factor) ** 2

    def split(height: int, width: int) -> tuple[int, int]:
        _, rows, columns = processor.get_number_of_image_patches(height, width, {})
        return rows, columns

    return TileLayout(placeholder, count, split, encode, id, int(processor.size["longest_edge"]))


def video_layout_of(family: Family, config: Any, processor: Any, layout: ImageLayout) -> VideoLayout:
    """Return the layout of a model's videos. processor: its video processor. layout: that of its pictures."""
    if isinstance(layout, TileLayout):
        return FrameVideoLayout(layout)
    size, frames = processor.size, int(processor.temporal_patch_size)
    side = int(processor.patch_size) * int(processor.merge_size)
    grid = GridLayout(int(config.video_token_id), side, int(size["shortest_edge"]), int(size["longest_edge"]))
    capped = bool(getattr(processor, "cap_pixels_per_frame", False))
    pixels_max = int(processor.max_video_tokens * side * side * 0.9) if capped else None
    per_second = getattr(config.vision_config, "tokens_per_second", None)
    return GridVideoLayout(grid.placeholder, grid, frames, per_second, pixels_max)


def _fixed_count(config: Any, processor: Any) -> int:
    """Return the features of a picture: patches, and the class token unless it is left out."""
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    try:
        height, width = int(size["height"]), int(size["width"])
    except (KeyError, TypeError):
        raise ModelError(f"its image processor resizes to {size}, expected a height and a width") from None
    patch = int(config.vision_config.patch_size)
    class_token = config.vision_config.model_type == "clip_vision_model"
    left_out = config.vision_feature_select_strategy == "default"
    return (height // patch) * (width // patch) + int(class_token) - int(left_out)
