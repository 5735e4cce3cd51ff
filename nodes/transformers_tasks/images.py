"""Tasks on pictures: labels, objects, depth, segments, zero-shot labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftline.errors import ModelError
from weftline.nodes.classify import independent, labels_of, probable_labels, to_probabilities
from weftline.nodes.contract import Batch, ConfigError, Outputs, StepContext
from weftline.nodes.detections import Detections
from weftline.nodes.device_tensors import as_torch
from weftline.nodes.hugging_face import (
    DEPTH_ESTIMATION,
    IMAGE_CLASSIFICATION,
    OBJECT_DETECTION,
    OBJECT_SEGMENTATION,
    PICTURES_AND_TEXTS,
    SEMANTIC_SEGMENTATION,
    check_tokenizer,
    kind_of,
)
from weftline.nodes.ports import Ports, port
from weftline.nodes.transformers_tasks.task import (
    Model,
    Task,
    TransformersConfig,
    check_hypothesis,
    check_labels,
    check_preprocessor,
    check_threshold,
    check_top_k,
    label_outputs,
    label_ports,
)

THRESHOLD = 0.5
"""Default of option `threshold`, as in transformers."""

SEGMENT_THRESHOLD, SEGMENT_OVERLAP = 0.9, 0.5
"""Default of option `threshold` for segments, and least share of a mask that no other covers, as in transformers."""

SUBTASKS = ("semantic", "instance", "panoptic")

PHOTO = "This is a photo of {}."
"""Default of option `hypothesis`, as in transformers."""


class ImageTask(Task):
    """A task whose inputs are prepared by an image processor."""

    processor = "AutoImageProcessor"
    post: str = ""
    """Method of the image processor that converts outputs; '' for none."""

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        if self.post and not hasattr(self._processor, self.post):
            raise ModelError(f"the image processor of {model.shown} has no {self.post}, which task {self.name} needs")

    @classmethod
    def check_files(cls, folder: Path, shown: str) -> None:
        check_preprocessor(folder, shown, "image_processor", cls.processor)

    def warm_up(self) -> None:
        self.run(Batch({"image": [np.zeros((64, 64, 3), np.uint8)]}))

    def _prepared(self, images: Sequence[Any]) -> dict[str, Sequence[Any]]:
        """Return the arguments of the network for pictures uint8[H, W, 3]: for each, an array or tensor of every item.

        All pictures are prepared in one call.
        """
        found = self._processor(images=[as_torch(image) for image in images], input_data_format="channels_last")
        return {"pixel_values": found["pixel_values"]}

    def _prepared_alone(self, images: Sequence[Any]) -> dict[str, Sequence[Any]]:
        """Return the same for a processor that would pad the smaller pictures of one call, which changes answers."""
        found = [
            self._processor(images=[as_torch(image)], input_data_format="channels_last", return_tensors="pt")
            for image in images
        ]
        return {name: [one[name][0] for one in found] for name in found[0]}

    @property
    def _processor(self) -> Any:
        return self.model.processor

    @property
    def _post(self) -> Any:
        return getattr(self._processor, self.post)


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
        labels = () if found is None else probable_labels(found, config.model)
        return Ports((port("image", "image", about="the picture"),), label_ports(labels))

    def run(self, batch: Batch) -> Outputs:
        rows: list[Any] = [None] * len(batch)
        for items, output in self.model.grouped(self._prepared(batch["image"])):
            for item, row in zip(items, output.logits.float().cpu().numpy(), strict=True):
                rows[item] = row
        return label_outputs(self._labels, to_probabilities(np.stack(rows), self._independent), self.config.top_k)


class ObjectDetection(ImageTask):
    """Boxes around objects. Pictures of one size, after the processor resized them, share a call."""

    name = "object-detection"
    auto_class = "AutoModelForObjectDetection"
    kinds = (OBJECT_DETECTION,)
    expected = "a model that finds objects (...ForObjectDetection)"
    options = ("threshold",)
    post = "post_process_object_detection"

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        self._labels = labels_of(model.config, model.shown)

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        labels_of(found, shown)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        check_threshold(config)
        about = "boxes, classes and scores, most confident first"
        return Ports((port("image", "image", about="the picture"),), (port("detections", "detections", about=about),))

    def run(self, batch: Batch) -> Outputs:
        threshold = THRESHOLD if self.config.threshold is None else self.config.threshold
        detections: list[Any] = [None] * len(batch)
        for items, output in self.model.grouped(self._prepared_alone(batch["image"])):
            sizes = [tuple(batch["image"][item].shape[:2]) for item in items]
            found = self._post(output, threshold, sizes)
            for item, size, one in zip(items, sizes, found, strict=True):
                detections[item] = self._detections(one, size)
        return {"detections": detections}

    def _detections(self, found: Mapping[str, Any], size: tuple[int, ...]) -> Detections:
        """Return the objects of a picture of `size` (height, width), their boxes cut at its edges."""
        boxes, scores = (found[name].float().cpu().numpy() for name in ("boxes", "scores"))
        order = np.argsort(-scores, kind="stable")
        edges = np.array([size[1], size[0]] * 2, np.float32)
        classes = found["labels"].cpu().numpy().astype(np.int32)
        return Detections(np.clip(boxes[order], 0, edges), scores[order], classes[order], self._labels)


class DepthEstimation(ImageTask):
    """Depth of every pixel, in the unit of the model."""

    name = "depth-estimation"
    auto_class = "AutoModelForDepthEstimation"
    kinds = (DEPTH_ESTIMATION,)
    expected = "a model that measures depth (...ForDepthEstimation)"
    post = "post_process_depth_estimation"
    unused = ("neck.fusion_stage.layers.0.residual_layer1.",)  # the first layer has no residual

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        about = "depth of every pixel of the picture, in the unit of the model"
        return Ports((port("image", "image", about="the picture"),), (port("depth", "float32[H, W]", about=about),))

    def run(self, batch: Batch) -> Outputs:
        depths: list[Any] = [None] * len(batch)
        for items, output in self.model.grouped(self._prepared_alone(batch["image"])):
            sizes = [tuple(batch["image"][item].shape[:2]) for item in items]
            found = self._post(output, sizes)
            for item, size, one in zip(items, sizes, found, strict=True):
                depths[item] = one["predicted_depth"].float().reshape(size).cpu().numpy()
        return {"depth": depths}


class ImageSegmentation(ImageTask):
    """Segments of a picture: regions of one class, or single objects."""

    name = "image-segmentation"
    auto_class = "AutoModelForSemanticSegmentation"
    kinds = (SEMANTIC_SEGMENTATION, OBJECT_SEGMENTATION)
    expected = "a model of semantic segmentation (...ForSemanticSegmentation), Mask2Former, MaskFormer or DETR"
    options = ("threshold", "subtask")

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        self.subtask = config.subtask or _subtasks(model.config)[0]
        self.post = f"post_process_{self.subtask}_segmentation"
        super().__init__(config, model)
        self._labels = labels_of(model.config, model.shown)

    @classmethod
    def class_of(cls, found: Mapping[str, Any]) -> str:
        return "AutoModelForUniversalSegmentation" if kind_of(found)[1] is OBJECT_SEGMENTATION else cls.auto_class

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        labels_of(found, shown)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        check_threshold(config)
        known = SUBTASKS if found is None else _subtasks(found)
        if config.subtask not in (None, *known):
            raise ConfigError("subtask", f"{config.subtask!r:.40}", f"one that the model has: {', '.join(known)}")
        if config.threshold is not None and (config.subtask or known[0]) == "semantic":
            raise ConfigError("threshold", "classes of pixels have no scores", "no threshold", "leave it out")
        segments = (
            "the segments, largest first: label, class, id (its number in the map), share (of all pixels), and score "
            "where the segment is an object"
        )
        return Ports(
            (port("image", "image", about="the picture"),),
            (
                port("map", "int32[H, W]", about="segment of every pixel: its class, or an object's id, 0 for none"),
                port("segments", "json", about=segments),
            ),
        )

    def run(self, batch: Batch) -> Outputs:
        found: list[Any] = [None] * len(batch)
        for items, output in self.model.grouped(self._prepared_alone(batch["image"])):
            sizes = [tuple(batch["image"][item].shape[:2]) for item in items]
            for item, one in zip(items, self._segmented(output, sizes), strict=True):
                found[item] = one
        return {"map": [one for one, _ in found], "segments": [segments for _, segments in found]}

    def _segmented(
        self, output: Any, sizes: Sequence[tuple[int, ...]]
    ) -> list[tuple[np.ndarray, list[dict[str, Any]]]]:
        """Return the map and the segments of every picture, of `sizes` (height, width)."""
        if self.subtask == "semantic":
            maps = [one.cpu().numpy().astype(np.int32) for one in self._post(output, target_sizes=sizes)]
            return [(classes, self._classes(classes)) for classes in maps]
        threshold = SEGMENT_THRESHOLD if self.config.threshold is None else self.config.threshold
        found = self._post(output, threshold=threshold, overlap_mask_area_threshold=SEGMENT_OVERLAP, target_sizes=sizes)
        return [self._objects(one, size) for one, size in zip(found, sizes, strict=True)]

    def _classes(self, classes: np.ndarray) -> list[dict[str, Any]]:
        found, counts = np.unique(classes, return_counts=True)
        segments = [self._segment(int(one), int(one), int(count), classes) for one, count in zip(found, counts)]
        return sorted(segments, key=lambda segment: -segment["share"])

    def _objects(self, found: Mapping[str, Any], size: tuple[int, ...]) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Return the map and the segments of transformers' answer for a picture, numbered from 1, largest first."""
        marked, infos = found["segmentation"].cpu().numpy().reshape(size), found["segments_info"]
        counts = [int((marked == info["id"]).sum()) for info in infos]
        numbered, segments = np.zeros(size, np.int32), []
        for id, place in enumerate(sorted(range(len(infos)), key=lambda place: -counts[place]), 1):
            info = infos[place]
            numbered[marked == info["id"]] = id
            segment = self._segment(id, int(info["label_id"]), counts[place], marked)
            segments.append({**segment, "score": round(float(info["score"]), 6)})
        return numbered, segments

    def _segment(self, id: int, label: int, pixels: int, marked: np.ndarray) -> dict[str, Any]:
        share = round(pixels / marked.size, 6)
        return {"label": self._labels[label], "class": label, "id": id, "share": share}


def _subtasks(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the subtasks of a model of segmentation by its config.json, the usual one first."""
    return ("panoptic", "instance", "semantic") if kind_of(found)[1] is OBJECT_SEGMENTATION else ("semantic",)


class ZeroShotImageClassification(ImageTask):
    """Labels that the step names, scored by a model that compares pictures with texts.

    The texts' embeddings are computed once, when the step opens.
    """

    name = "zero-shot-image-classification"
    auto_class = "AutoModelForZeroShotImageClassification"
    processor = "AutoProcessor"
    kinds = (PICTURES_AND_TEXTS,)
    expected = "a model that compares pictures with texts (CLIPModel)"
    options = ("labels", "hypothesis")
    method = "get_image_features"

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        self._labels = config.labels or ()
        template = config.hypothesis or PHOTO
        tokens = model.processor.tokenizer(
            [template.format(label) for label in self._labels], padding=True, return_tensors="pt", verbose=False
        )
        self._check_lengths(tokens["attention_mask"].sum(dim=1).tolist())
        self._texts = _unit(model.compute("get_text_features", tokens)).cpu()

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        if config.labels is None:
            raise ConfigError("labels", "there are no labels", "a list of labels", "write labels")
        check_labels(config.labels)
        check_hypothesis(config)
        return Ports((port("image", "image", about="the picture"),), label_ports(config.labels))

    @classmethod
    def check_files(cls, folder: Path, shown: str) -> None:
        super().check_files(folder, shown)
        check_tokenizer(folder, shown)

    def run(self, batch: Batch) -> Outputs:
        rows: list[Any] = [None] * len(batch)
        scale = self.model.network.logit_scale.detach().float().exp().cpu()
        for items, output in self.model.grouped(self._prepared(batch["image"])):
            logits = _unit(output).cpu() @ self._texts.T * scale
            for item, row in zip(items, logits.numpy(), strict=True):
                rows[item] = row
        return label_outputs(self._labels, to_probabilities(np.stack(rows), False), len(self._labels))

    def _check_lengths(self, tokens: Sequence[int]) -> None:
        """Raise ModelError for a label that the model cannot read whole. tokens: of each label's sentence."""
        limit = self.model.config["text_config"]["max_position_embeddings"]
        for label, count in zip(self._labels, tokens, strict=True):
            if count > limit:
                found = f"{label!r:.60} has {count} tokens with its hypothesis"
                raise ModelError(f"labels: {found}, and {self.model.shown} reads at most {limit}; shorten it")

    @property
    def _processor(self) -> Any:
        return self.model.processor.image_processor


def _unit(features: Any) -> Any:
    """Return float32 [rows, width] of length 1; transformers 5.0 returns the features, later ones an output."""
    import torch

    return torch.nn.functional.normalize(getattr(features, "pooler_output", features).float(), dim=-1)
