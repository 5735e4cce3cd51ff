"""A task of the `transformers` node: its options, its ports, and one batched call of a model.

A task class is checked and has ports without its framework: config.json and the names of the folder's files are enough.
An instance holds an open model. Its answers for an item do not depend on the other items of a batch: inputs are padded
only where a mask makes padding without effect, and otherwise inputs of equal shape share a call.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.errors import MissingPackage, ModelError
from weftline.nodes.classify import CONFIDENCE, columns
from weftline.nodes.contract import Batch, ConfigError, OpenContext, Outputs, StepContext
from weftline.nodes.device_tensors import as_torch, offload
from weftline.nodes.grouping import group_by_shape
from weftline.nodes.hugging_face import (
    Kind,
    check_cached,
    check_kind,
    fetch_folder,
    find_folder,
    find_weights,
    load_network,
    local_or_hub,
    read_config,
    read_json,
    reason_without_path,
)
from weftline.nodes.model_file import find_model
from weftline.nodes.ports import Port, Ports, port
from weftline.nodes.precision import computing_in, round_weights
from weftline.nodes.tokenizer_trial import try_tokenizer

ROWS_MAX = 64
"""Most rows in one call of the model, where an item has several: windows of a long text, or candidate labels."""

TOP_K = 5
"""Default of option `top_k`, as in transformers."""

LABELS_MAX = 1000
"""Most candidate labels of one item."""

_REMOTE_CODE = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
"""Files that may name code beside a model in `auto_map`."""


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """Options of `transformers`.

    task:        one of transformers' tasks: image-classification, text-classification, token-classification,
                 question-answering, zero-shot-classification, feature-extraction, object-detection, depth-estimation,
                 zero-shot-image-classification, audio-classification, automatic-speech-recognition,
                 image-segmentation, keypoint-detection, summarization, translation or text-to-speech.
                 Each needs a model that was made for it; config.json names its class.
    model:       a model of transformers as a folder or hub name: safetensors only, no code from the model.
    precision:   number format of the network: 'float32', 'tf32' (GPUs only), 'bfloat16' or 'float16'.
    top_k:       image-, text- and audio-classification: most labels in `scores`; default 5.
    aggregation: token-classification: how tokens become entities, as in transformers: 'none' (each token), 'simple',
                 'first', 'average' or 'max'; default 'none'.
    labels:      zero-shot tasks: the candidate labels. zero-shot-classification reads them from its input `labels`
                 instead where that is wired. keypoint-detection: names of the detections to look at; default all.
    hypothesis:  zero-shot tasks: the sentence that a label is put into, with {} in its place; default 'This example is
                 {}.' for texts, 'This is a photo of {}.' for pictures.
    multi_label: zero-shot-classification: labels do not exclude each other, and each has a probability of its own;
                 default false.
    overflow:    text-classification, feature-extraction, summarization, translation: a text with more tokens than the
                 model reads: 'error' fails its item, 'end' and 'start' cut it there; default 'error'.
                 text-classification has 'windows' too, which reads all of it in overlapping windows: a label has the
                 mean of its scores, or the largest one where labels do not exclude each other. The other tasks on texts
                 always do so.
    threshold:   object-detection, image-segmentation of objects: minimum score; default 0.5 for detections, 0.9 for
                 segments. keypoint-detection: minimum score of a keypoint; default: all keypoints.
    items_max:   keypoint-detection: most objects of a picture, the most confident; default 64.
    dataset:     keypoint-detection: number of the data set whose expert a model with several uses; default 0.
    subtask:     image-segmentation: 'semantic' (the class of every pixel), 'instance' (objects) or 'panoptic' (objects,
                 and regions such as the sky); default: panoptic where the model marks objects, otherwise semantic.
    prefix:      summarization, translation: text before every input, such as 'translate English to German: '; default:
                 the one for the task in config.json, or none.
    tokens_max:  summarization, translation: most tokens of a result; default 128.
    speed:       text-to-speech: multiplies the model's speed, from 0.25 to 4; default 1.
    speaker:     text-to-speech: number of the speaker, where the model has several.
    seed:        text-to-speech: selects the random variation of a voice; default 0.
    """

    task: str
    model: str
    precision: str = "float32"
    top_k: int | None = None
    aggregation: str | None = None
    labels: tuple[str, ...] | None = None
    hypothesis: str | None = None
    multi_label: bool | None = None
    overflow: str | None = None
    threshold: float | None = None
    items_max: int | None = None
    dataset: int | None = None
    subtask: str | None = None
    prefix: str | None = None
    tokens_max: int | None = None
    speed: float | None = None
    speaker: int | None = None
    seed: int | None = None


class Model:
    """An open network and its processor.

    config: the network's config.json as a dict.
    shown:  its name in errors.
    """

    def __init__(self, task: type[Task], config: TransformersConfig, context: OpenContext) -> None:
        self.shown, self.device, self._precision = config.model, context.framework_device, config.precision
        self.network = load_network(_find_class(task, config.model, context), config.model, context, task.unused)
        self._method = task.method
        round_weights(self.network, config.precision)
        self.config: dict[str, Any] = self.network.config.to_dict()
        self.processor = _load_processor(task.processor, config.model, context)

    def __call__(self, inputs: Mapping[str, Any], **options: Any) -> Any:
        """Return transformers' output of one call of the task's method, with tensors on the device."""
        return self.compute(self._method, inputs, **options)

    def compute(self, method: str, inputs: Mapping[str, Any], **options: Any) -> Any:
        """Return the output of any method of the network, as `__call__` does."""
        import torch

        there = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        with torch.inference_mode(), computing_in(self._precision, self.device):
            return getattr(self.network, method)(**there, **options)

    def grouped(self, columns: Mapping[str, Sequence[Any]]) -> Iterator[tuple[list[int], Any]]:
        """Yield the positions of items of equal shapes, and the output of one call for them.

        columns: for each argument of the network, an array or torch tensor for every item.
        """
        import torch

        tensors = {name: [as_torch(row) for row in rows] for name, rows in columns.items()}
        for items in group_by_shape([*tensors.values()], len(next(iter(tensors.values())))):
            yield items, self({name: torch.stack([rows[item] for item in items]) for name, rows in tensors.items()})

    def sleep(self) -> None:
        """Move the weights to host memory."""
        offload(self.network)

    def wake(self) -> None:
        """Move the weights to the device."""
        self.network.to(self.device)


class Task(ABC):
    """One task. Its instance holds an open model.

    Class attributes:

    name:       value of option `task`, as transformers calls it.
    auto_class: class of transformers that loads the network.
    processor:  class of transformers that loads what prepares its inputs.
    kinds:      models that it runs; expected: the same as a phrase.
    options:    options of TransformersConfig that it reads, besides task, model and precision.
    method:     method of the network that computes a batch.
    unused:     name prefixes of tensors that inference does not use, and that published weights may lack.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    processor: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]]
    expected: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    method: ClassVar[str] = "__call__"
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        self.config, self.model = config, model
        self.check_config(model.config, model.shown)

    @classmethod
    def class_of(cls, found: Mapping[str, Any]) -> str:
        """Return the class of transformers that loads the network with this config.json."""
        return cls.auto_class

    @classmethod
    @abstractmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        """Return the ports. found: config.json; None while it is not on this machine. ConfigError: a wrong option."""

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        """Raise ConfigError about option `model` unless the task runs a model with this config.json."""

    @classmethod
    @abstractmethod
    def check_files(cls, folder: Path, shown: str) -> None:
        """Raise ConfigError about option `model` unless the files of the task's processor are in a local folder."""

    @abstractmethod
    def run(self, batch: Batch) -> Outputs:
        """Return the outputs of a batch."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run the model once."""


def check_model(task: type[Task], model: str, base_dir: Path) -> dict[str, Any] | None:
    """Return config.json, or None when it is not on this machine. ConfigError: no model for the task."""
    folder = find_folder(model, base_dir)
    if folder is None:
        return None
    found = read_config(folder, model)
    for file in _REMOTE_CODE:
        settings = read_json(folder / file, f"{model}/{file}")
        if isinstance(settings, dict) and settings.get("auto_map"):
            fix = "name a model whose architecture is part of transformers"
            raise ConfigError("model", f"{model}/{file} has auto_map: the model is code of its own", "no code", fix)
    check_kind(found, model, task.kinds, task.expected)
    task.check_config(found, model)
    _check_backbone(found, model)
    if find_model(model, base_dir) is not None:
        find_weights(folder, model, task.class_of(found))
        task.check_files(folder, model)
    else:  # missing files are downloaded when the node opens
        check_cached(folder, model)
    return found


def _check_backbone(found: Mapping[str, Any], shown: str) -> None:
    """Raise ConfigError when config.json wants a backbone of timm, and timm is not installed."""
    inner = found.get("backbone_config")
    of_timm = isinstance(inner, dict) and inner.get("model_type") == "timm_backbone"
    if (of_timm or found.get("use_timm_backbone")) and importlib.util.find_spec("timm") is None:
        fix = "pip install timm, or name a model without it"
        raise ConfigError("model", f"{shown} has a backbone of package timm, which is not installed", "", fix)


def check_preprocessor(folder: Path, shown: str, inside: str, auto_class: str) -> None:
    """Raise ConfigError unless a folder has preprocessor_config.json, or `inside` in processor_config.json."""
    whole = read_json(folder / "processor_config.json", f"{shown}/processor_config.json")
    if (folder / "preprocessor_config.json").is_file() or (isinstance(whole, dict) and inside in whole):
        return
    fix = f"save it there: transformers.{auto_class}.from_pretrained(...).save_pretrained({shown!r})"
    raise ConfigError("model", f"{shown} has no preprocessor_config.json", "the settings of its inputs", fix)


def ranked(labels: Sequence[str], row: np.ndarray, count: int | None = None) -> list[dict[str, Any]]:
    """Return the `count` likeliest labels with their probabilities, highest first."""
    order = np.argsort(-row, kind="stable")[:count]
    return [{"label": labels[int(place)], "score": round(float(row[place]), 6)} for place in order]


def check_top_k(config: TransformersConfig) -> None:
    """Raise ConfigError unless option `top_k` is a count."""
    if config.top_k is not None and config.top_k < 1:
        raise ConfigError("top_k", f"{config.top_k}", "a count from 1")


def check_threshold(config: TransformersConfig) -> None:
    """Raise ConfigError unless option `threshold` is a probability."""
    if config.threshold is not None and not 0 <= config.threshold <= 1:
        raise ConfigError("threshold", f"{config.threshold}", "from 0 to 1")


def check_labels(labels: Sequence[str]) -> None:
    """Raise ConfigError unless option `labels` lists candidate labels."""
    if not 1 <= len(labels) <= LABELS_MAX or not all(labels):
        raise ConfigError("labels", f"{len(labels)} labels, or an empty one", f"1 to {LABELS_MAX} labels")


def check_hypothesis(config: TransformersConfig) -> None:
    """Raise ConfigError unless option `hypothesis` has one place for a label."""
    template = config.hypothesis
    if template is not None and (template.count("{}") != 1 or template.count("{") + template.count("}") != 2):
        raise ConfigError("hypothesis", f"{template!r:.80}", "a sentence with {} in the place of a label")


LABEL_OUTPUTS = ("label", "confidence", "scores")
"""Names of `label_ports`."""


def label_ports(labels: tuple[str, ...] = ()) -> tuple[Port, ...]:
    """Return the outputs of a task whose answer is one of many labels. labels: () where they are not known yet."""
    return (
        port("label", "text", about="the likeliest label"),
        CONFIDENCE,
        port(
            "scores",
            "json",
            about="the likeliest labels with their probabilities: label, score; highest first",
            labels=labels,
        ),
    )


def label_outputs(labels: Sequence[str], rows: np.ndarray, count: int | None) -> Outputs:
    """Return the values of `label_ports` for float32 [items, labels] `rows`: `count` labels, or TOP_K."""
    return columns([label_answer(ranked(labels, row, count or TOP_K)) for row in rows], LABEL_OUTPUTS)


def label_answer(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of `label_ports` for one item's labels, the likeliest first."""
    return {"label": scores[0]["label"], "confidence": scores[0]["score"], "scores": scores}


def _find_class(task: type[Task], model: str, context: OpenContext) -> str:
    """Return the class of transformers that loads a model; a hub model's config.json is downloaded."""
    return task.class_of(read_config(fetch_folder(model, context.base_dir), model))


def _load_processor(auto_class: str, model: str, context: OpenContext) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingPackage("transformers", "transformers") from None
    source = local_or_hub(model, context.base_dir)
    try_tokenizer(source, model)
    try:
        return getattr(transformers, auto_class).from_pretrained(str(source), trust_remote_code=False)
    except Exception as error:  # the libraries raise plain Exception for a corrupt file
        reason = reason_without_path(error, source, model)
        raise ModelError(f"{model} has no usable processor ({auto_class}): {reason}") from None
