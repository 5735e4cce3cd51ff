"""Tasks on pictures: image-classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftline.nodes.classify import independent, probable_labels, to_probabilities
from weftline.nodes.contract import Batch, Outputs, StepContext
from weftline.nodes.device_tensors import as_torch
from weftline.nodes.hugging_face import IMAGE_CLASSIFICATION
from weftline.nodes.ports import Ports, port
from weftline.nodes.transformers_tasks.task import (
    Model,
    Task,
    TransformersConfig,
    check_preprocessor,
    check_top_k,
    label_outputs,
    label_ports,
)

class ImageTask(Task):
    """A task whose inputs are prepared by an image processor."""

    processor = "AutoImageProcessor"

    @classmethod
    def check_files(cls, folder: Path, shown: str) -> None:
        check_preprocessor(folder, shown, "image_processor", cls.processor)

    def warm_up(self) -> None:
        self.run(Batch({"image": [np.zeros((64, 64, 3), np.uint8)]}))

    def _pixels(self, images: Sequence[Any], **options: Any) -> Sequence[Any]:
        """Return the processor's pixels of pictures uint8[H, W, 3]: for each an array or tensor [channels, h, w]."""
        prepared = self.model.processor(
            images=[as_torch(image) for image in images], input_data_format="channels_last", **options
        )
        found: Sequence[Any] = prepared["pixel_values"]
        return found


class ImageClassification(ImageTask):
    """Labels of a whole picture."""

    name = "image-classification"
    auto_class = "AutoModelForImageClassification"
    kinds = (IMAGE_CLASSIFICATION,)
    expected = "a model that labels pictures (...ForImageClassification)"
    options = ("top_k",)

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        self._labels, self._independent = probable_labels(model.config, model.shown), independent(model.config)

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        probable_labels(found, shown)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        check_top_k(config)
        return Ports((port("image", "image", about="the picture"),), label_ports())

    def run(self, batch: Batch) -> Outputs:
        rows: list[Any] = [None] * len(batch)
        for items, output in self.model.grouped("pixel_values", self._pixels(batch["image"])):
            for item, row in zip(items, output.logits.float().cpu().numpy(), strict=True):
                rows[item] = row
        return label_outputs(self._labels, to_probabilities(np.stack(rows), self._independent), self.config.top_k)
