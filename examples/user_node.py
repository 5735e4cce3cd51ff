"""A node and a function step of your own: copy this file and change what it computes.

A function (`compare_sharpness`) is enough for most things. A class (`Sharpen`) is for what has options, loads something
once, or answers a whole batch faster than item by item. user_node.yaml uses both.

    weftline check examples/user_node.yaml        # reads ports and options, runs nothing
    weftline run examples/user_node.yaml --input photo=@examples/data/photo.png --save demo-out
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from weftline.node import Batch, BatchNode, ConfigError, OpenContext, Outputs, Ports, StepContext, port

RADIUS_MAX_PX = 16
"""Largest blur; beyond it the edges would get halos wider than what they outline."""


@dataclass(frozen=True, slots=True)
class SharpenConfig:
    """Options of `Sharpen`: each field is a key of the step, its docstring the key's documentation."""

    amount: float = 1.0
    """How much of the detail is added back: 0 changes nothing, 1 doubles it."""

    radius_px: int = 2
    """Detail is what a blur of this radius removes, in pixels."""


class Sharpen(BatchNode):
    """Makes a picture crisper by unsharp masking: picture + amount * (picture - blurred picture)."""

    Config: ClassVar[type[Any]] = SharpenConfig
    heavy: ClassVar[bool] = True  # wants cores of its own
    batch_default: ClassVar[tuple[int, float]] = (4, 1.0)  # items_max, wait_max_ms, where a step says nothing

    _weights: np.ndarray

    @classmethod
    def ports(cls, config: SharpenConfig, step: StepContext) -> Ports:
        """Say what the step takes and gives. This runs when a pipeline is checked, so nothing is loaded here."""
        if config.amount < 0:
            raise ConfigError("amount", f"{config.amount}", "0 or more")
        if not 1 <= config.radius_px <= RADIUS_MAX_PX:
            raise ConfigError("radius_px", f"{config.radius_px}", f"1 to {RADIUS_MAX_PX}")
        return Ports(
            inputs=(port("image", "image", about="the picture to sharpen"),),
            outputs=(port("image", "image", about="the picture, sharpened; of the same size"),),
        )

    def open(self, context: OpenContext) -> None:
        """Load what `run` needs, once, inside the worker; a model's framework is imported here and not above."""
        context.progress("computing the blur", 0.5)
        self._weights = gaussian(self.config.radius_px)

    def warm_up(self) -> None:
        """Pay for first-time costs before the first request comes."""
        self._sharpen(np.zeros((8, 8, 3), np.uint8))

    def run(self, batch: Batch) -> Outputs:
        """Return one picture per item. Pictures differ in size here, so they cannot be stacked into one array.

        The inputs are read-only views of shared memory. An exception in place of a picture would fail that item alone.
        """
        return {"image": [self._sharpen(image) for image in batch["image"]]}

    def _sharpen(self, image: np.ndarray) -> np.ndarray:
        picture = image.astype(np.float32)
        sharp: np.ndarray = picture + self.config.amount * (picture - blur(picture, self._weights))
        return sharp.round().clip(0, 255).astype(np.uint8)


def gaussian(radius_px: int) -> np.ndarray:
    """Return float32 [2 * radius_px + 1] weights that sum to 1; the standard deviation is half the radius."""
    places = np.arange(-radius_px, radius_px + 1, dtype=np.float32)
    weights: np.ndarray = np.exp(-0.5 * (places / (radius_px / 2)) ** 2)
    weights /= weights.sum()
    return weights


def blur(picture: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return float32 [H, W, C] blurred along both axes; beyond the border the border's own pixels go on."""
    radius = len(weights) // 2
    for axis in (0, 1):
        margin = [(radius, radius) if axis == other else (0, 0) for other in range(3)]
        wide = np.pad(picture, margin, mode="edge")
        size = picture.shape[axis]
        picture = np.zeros_like(picture)
        for shift, weight in enumerate(weights):
            picture += weight * np.moveaxis(np.moveaxis(wide, axis, 0)[shift : shift + size], 0, axis)
    return picture


def compare_sharpness(before: Annotated[np.ndarray, "image"], after: Annotated[np.ndarray, "image"]) -> dict:
    """Return the mean step between neighbouring pixels, 0 to 255, of two pictures: a plain function step.

    Its ports are its parameters and, since the return annotation is one type, one output called `output`.
    """
    return {"before": mean_step(before), "after": mean_step(after)}


def mean_step(image: np.ndarray) -> float:
    picture = image.astype(np.int16)
    steps = [np.abs(np.diff(picture, axis=axis)).mean() if picture.shape[axis] > 1 else 0.0 for axis in (0, 1)]
    return round(float(sum(steps)) / 2, 2)
