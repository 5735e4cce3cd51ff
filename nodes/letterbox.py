"""Letterbox: a picture resized into the middle of a square, and coordinates of the square back in the picture.

The arithmetic is ultralytics' LetterBox, scale_boxes and scale_coords, so that input matches training. On a GPU torch
resizes in float32, where OpenCV rounds to 11 bits: levels differ by at most 1 of 255.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


PADDING = 114
"""Grey level around a picture that is not square, as in ultralytics."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Position of a picture of `height` x `width` px in its square: its size there, and its left top corner."""

    height: int
    width: int
    inner_height: int
    inner_width: int
    left: int
    top: int

    def to_picture(self, boxes: np.ndarray) -> np.ndarray:
        """Return float32 [objects, 4] boxes x1 y1 x2 y2 of the square in pixels of the picture, cut at its edges."""
        return self.points_to_picture(boxes.reshape(-1, 2, 2)).reshape(-1, 4)

    def points_to_picture(self, points: np.ndarray) -> np.ndarray:
        """Return float32 [..., 2] points x y of the square in pixels of the picture, moved inside its edges."""
        edge = np.array([self.width, self.height], np.float32)
        moved: np.ndarray = np.clip((points - self._shift) / self._gain, 0, edge)
        return moved.astype(np.float32)

    def centred_to_picture(self, boxes: np.ndarray) -> np.ndarray:
        """Return float32 [objects, 4] boxes of centre, width and height in pixels of the picture; they are not cut."""
        moved = np.concatenate([(boxes[:, :2] - self._shift) / self._gain, boxes[:, 2:] / self._gain], 1)
        return moved.astype(np.float32)

    @property
    def _shift(self) -> np.ndarray:
        return np.array([self.left, self.top], np.float32)

    @property
    def _gain(self) -> np.ndarray:
        return np.array([self.inner_width / self.width, self.inner_height / self.height], np.float32)


def fit(height: int, width: int, side: int) -> Fit:
    """Return where a picture of `height` x `width` px goes in a square of `side` px: as large as it fits, centred."""
    scale = min(side / height, side / width)
    inner_height, inner_width = max(round(height * scale), 1), max(round(width * scale), 1)
    left, top = round((side - inner_width) / 2 - 0.1), round((side - inner_height) / 2 - 0.1)
    return Fit(height, width, inner_height, inner_width, left, top)


def letterbox(image: np.ndarray, side: int, out: np.ndarray) -> Fit:
    """Write uint8[H, W, 3] `image` into `out`, uint8[side, side, 3], and return where it lies there."""
    import cv2

    place = fit(image.shape[0], image.shape[1], side)
    size = (place.inner_width, place.inner_height)
    out.fill(PADDING)
    inside = out[place.top : place.top + place.inner_height, place.left : place.left + place.inner_width]
    inside[...] = image if image.shape[1::-1] == size else cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
    return place


def letterbox_torch(images: torch.Tensor, side: int, out: torch.Tensor) -> Fit:
    """Write uint8 [n, H, W, 3] `images` into `out`, and return where they lie there; nothing waits for the device.

    out: float32 [n, 3, side, side], which gets levels from 0 to 255.
    """
    import torch

    place = fit(images.shape[1], images.shape[2], side)
    size = (place.inner_height, place.inner_width)
    levels = images.permute(0, 3, 1, 2).float()
    if tuple(levels.shape[2:]) != size:
        levels = torch.nn.functional.interpolate(levels, size, mode="bilinear", align_corners=False).round_()
    out.fill_(PADDING)
    out[:, :, place.top : place.top + place.inner_height, place.left : place.left + place.inner_width] = levels
    return place
