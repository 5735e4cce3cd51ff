"""transformers' image and video processors of a model: from pixels to the vision encoder's inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weftline.engine.llm.vision.prompt import Inputs
from weftline.errors import ModelError
from weftline.nodes.hugging_face import reason_without_path

_NAMES = {
    "pixel_values": "pixel_values",
    "image_grid_thw": "image_grid_thw",
    "pixel_attention_mask": "pixel_attention_mask",
    "pixel_values_videos": "pixel_values",
    "video_grid_thw": "image_grid_thw",
}
"""Outputs of processors, and the inputs of the vision encoder that they are; others are not needed."""


class ImageProcessor:
    """A model's image processor. Floats get `dtype`, which is the model's."""

    def __init__(self, processor: Any, dtype: torch.dtype) -> None:
        self._processor = processor
        self._dtype = dtype

    def __call__(self, pixels: np.ndarray) -> Sequence[Inputs]:
        """Return the encoder's inputs of a picture, uint8 [H, W, 3], in a list."""
        picture = torch.tensor(pixels)
        found = self._processor(images=[picture], input_data_format="channels_last", return_tensors="pt")
        return [_converted(found, self._dtype)]


class VideoProcessor:
    """A model's video processor. All frames are used: sampling is the caller's."""

    def __init__(self, processor: Any, dtype: torch.dtype) -> None:
        if getattr(processor, "cap_pixels_per_frame", False) is None:
            processor.cap_pixels_per_frame = False  # its default in transformers 5.23, which warns of another one
        self._processor = processor
        self._dtype = dtype

    def __call__(self, frames: np.ndarray) -> Sequence[Inputs]:
        """Return the encoder's inputs of each part of a video, uint8 [frames, H, W, 3]; each has its own memory."""
        video = torch.tensor(frames).permute(0, 3, 1, 2)
        found = _converted(self._processor(videos=[video], do_sample_frames=False, return_tensors="pt"), self._dtype)
        grid = found.get("image_grid_thw")
        if grid is None:  # a tile for each frame, [1, frames, ...]
            return [{name: value[:, at : at + 1].clone() for name, value in found.items()} for at in range(len(frames))]
        count, one = int(grid[0, 0]), torch.cat([torch.ones_like(grid[:, :1]), grid[:, 1:]], 1)
        patches = found["pixel_values"].chunk(count)
        return [{"pixel_values": part.clone(), "image_grid_thw": one} for part in patches]


def _converted(found: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    given = {known: found[name] for name, known in _NAMES.items() if name in found}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def load_processor(source: str | Path, shown: str, video: bool = False) -> Any:
    """Load the image processor of a model, or its video processor; ModelError where that fails."""
    from transformers import AutoImageProcessor, AutoVideoProcessor

    maker = AutoVideoProcessor if video else AutoImageProcessor
    try:
        return maker.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of errors
        reason = reason_without_path(error, source, shown)
        kind = "video" if video else "image"
        raise ModelError(f"model {shown}: its {kind} processor cannot be loaded: {reason}") from None


def settings_of(processor: Any, model_type: str) -> bytes:
    """Return the hash of a processor's settings and of the form of its implementation."""
    settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(f"{model_type} {type(processor).__name__} {settings}".encode()).digest()
