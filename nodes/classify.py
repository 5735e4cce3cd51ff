"""Text classification node, and the classifier that the guardrail node uses: a probability for every label.

Two formats. A folder with model.onnx, tokenizer.json and config.json needs neither torch nor transformers:

    {"id2label": {"0": "safe", "1": "secrets"}, "tokens_max": 128, "pad_token_id": 0}

Its inputs are input_ids and attention_mask (int64 [texts, tokens]; an optional token_type_ids is filled with zeros),
its output is logits (float32 [texts, labels]). The other format is a sequence classification model of transformers,
from a folder or by its hub name.

A model whose output is not a probability for each label of one text is refused: a score (one label, regression), labels
of tokens (named entities), a cross-encoder's score of two texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.errors import InputError, ModelError
from weftline.node import Batch, BatchNode, ConfigError, OpenContext, Outputs, Ports, StepContext, port
from weftline.nodes.contract import model_error
from weftline.nodes.device_tensors import offload
from weftline.nodes.hugging_face import (
    OWN_NODE,
    SEQUENCE_CLASSIFICATION,
    check_folder,
    check_kind,
    find_config,
    hub_notes,
    load_network,
    load_tokenizer,
    load_tokens,
    network_bytes,
    read_config,
    tokens_limit,
)
from weftline.nodes.model_file import find_model
from weftline.nodes.model_limits import check_json_files
from weftline.nodes.onnx_file import OnnxFile, onnx_bytes, read_onnx
from weftline.nodes.onnx_session import open_session
from weftline.nodes.precision import check_precision, computing_in, round_weights
from weftline.nodes.text_tokens import SIDES, WINDOWS, Overflow, Rows, TextTokens, check_overflow, of_fitting

LABELS_MAX = 10_000
LABELS_DEFAULT = 2
"""Default number of labels of a transformers model."""
CONFIDENCE = port("confidence", "json", about="probability of the likeliest label, from 0 to 1")
"""Output of every task whose answer is the likeliest label."""

_OUTPUTS = ("label", "confidence", "scores")

ROWS_MAX = 64
"""Most rows in one call of the model: a long text has many windows, and their memory is needed all at once."""


class TextClassifier(ABC):
    """A loaded classifier. labels: its classes, by column of the probabilities."""

    def __init__(self, labels: tuple[str, ...], tokens: TextTokens, independent: bool) -> None:
        self.labels, self._tokens, self._independent = labels, tokens, independent

    def largest(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [texts, labels]: the largest probability of each label in any window of a text."""
        rows = self._tokens.windows(texts)
        return joined(self._probabilities(rows), rows.owner, largest=True)

    def probabilities(self, texts: Sequence[str], overflow: str = "error") -> list[np.ndarray | InputError]:
        """Return float32 [labels] for each text, or the error of one that is too long.

        overflow: 'error', 'end', 'start', or 'windows': all of a text counts, see `joined`.
        """
        if overflow == WINDOWS:
            rows = self._tokens.windows(texts)
            return [*joined(self._probabilities(rows), rows.owner, largest=self._independent)]
        encoded = self._tokens.encode(texts, [Overflow(overflow)] * len(texts))
        return of_fitting(encoded, lambda fitting: [*self._probabilities(self._tokens.rows(fitting))])

    def _probabilities(self, rows: Rows) -> np.ndarray:
        """Return float32 [rows, labels]."""
        parts = range(0, len(rows.owner), ROWS_MAX)
        logits = np.concatenate([self._logits(rows.part(start, start + ROWS_MAX)) for start in parts])
        return to_probabilities(logits.astype(np.float32), self._independent)

    def sleep(self, keep: str) -> bool:
        """Release the device's memory until `wake`; return False if unsupported. See Node.sleep."""
        return False

    def wake(self) -> None:
        """Be ready again after `sleep`."""

    @abstractmethod
    def _logits(self, rows: Rows) -> np.ndarray:
        """Return float [rows, labels]."""


class _OnnxClassifier(TextClassifier):
    def __init__(self, folder: Path, shown: str, context: OpenContext) -> None:
        config = read_config(folder, shown)
        found = _check_ports(read_onnx(folder / "model.onnx", f"{shown}/model.onnx"), shown)
        self._types = any(one.name == "token_type_ids" for one in found.inputs)
        tokens_max = config.get("tokens_max", 512)
        if type(tokens_max) is not int or not 8 <= tokens_max <= 1 << 20:
            raise ModelError(f"{shown}/config.json: tokens_max is {tokens_max!r:.40}, expected a number from 8")
        pad = config.get("pad_token_id") or 0
        tokens = TextTokens(load_tokenizer(folder, shown), tokens_max, pad if type(pad) is int else 0)
        super().__init__(classifier_labels(config, shown), tokens, independent(config))
        self._session = open_session(folder / "model.onnx", f"{shown}/model.onnx", context, tensorrt=False)

    def _logits(self, rows: Rows) -> np.ndarray:
        fed = {"input_ids": rows.ids, "attention_mask": rows.mask}
        if self._types:
            fed["token_type_ids"] = np.zeros_like(rows.ids)
        (logits,) = self._session.run(["logits"], fed)
        if logits.shape != (len(rows.ids), len(self.labels)):
            raise ModelError(
                f"the classifier gave {list(logits.shape)}, its config.json names {len(self.labels)} labels"
            )
        return np.asarray(logits)


class _TorchClassifier(TextClassifier):
    def __init__(self, model: str, context: OpenContext, precision: str) -> None:
        self._device, self._precision = context.framework_device, precision
        self._network = load_network("AutoModelForSequenceClassification", model, context)
        round_weights(self._network, precision)
        config = self._network.config.to_dict()
        labels, pad = classifier_labels(config, model), config.get("pad_token_id")
        tokens = load_tokens(model, context, tokens_limit(config), pad if type(pad) is int and pad >= 0 else None)
        super().__init__(labels, tokens, independent(config))

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        offload(self._network)
        return True

    def wake(self) -> None:
        self._network.to(self._device)

    def _logits(self, rows: Rows) -> np.ndarray:
        import torch

        device = self._device
        with torch.inference_mode():
            ids, mask = torch.from_numpy(rows.ids).to(device), torch.from_numpy(rows.mask).to(device)
            with computing_in(self._precision, device):
                found = self._network(input_ids=ids, attention_mask=mask).logits
            logits: np.ndarray = found.float().cpu().numpy()
            return logits


def joined(rows: np.ndarray, owner: Sequence[int], largest: bool) -> np.ndarray:
    """Return float32 [texts, labels] of the windows of texts, float32 [rows, labels].

    owner:   the text of each row, ascending, each text at least once.
    largest: a label has its largest value in any window of a text; otherwise the mean of its windows.
    """
    starts = np.flatnonzero(np.diff(np.array(owner), prepend=-1))
    if largest:
        found: np.ndarray = np.maximum.reduceat(rows, starts, axis=0)
        return found
    counts = np.diff(np.append(starts, len(owner)))
    means: np.ndarray = np.add.reduceat(rows, starts, axis=0) / counts[:, None].astype(np.float32)
    return means


def is_onnx(model: str, base_dir: Path) -> bool:
    """Return True when `model` is a local folder in the ONNX format."""
    path = find_model(model, base_dir)
    return path is not None and (path / "model.onnx").is_file()


def check_classifier(model: str, base_dir: Path, option: str) -> tuple[str, ...] | None:
    """Return the labels of `model`, or None when it is not on this machine yet. ConfigError: not a classifier."""
    try:
        config = find_config(model, base_dir)
        if config is None:
            return None
        labels = classifier_labels(config, model)
        if is_onnx(model, base_dir):
            folder = find_model(model, base_dir) or base_dir
            _check_ports(read_onnx(folder / "model.onnx", f"{model}/model.onnx"), model)
            if not (folder / "tokenizer.json").is_file():
                raise ConfigError("model", f"{model} has no tokenizer.json", "the model's tokenizer beside model.onnx")
            check_json_files(folder, model)
        else:
            check_folder(model, base_dir, "AutoModelForSequenceClassification")
        return labels
    except ConfigError as error:
        raise ConfigError(option, error.found, error.expected, error.fix) from None


def _check_ports(found: OnnxFile, shown: str) -> OnnxFile:
    """Check the inputs and outputs of model.onnx. ConfigError: not a text classifier."""
    names = {one.name: one.dtype for one in found.inputs}
    described = ", ".join(f"{one.name} ({one.dtype})" for one in (*found.inputs, *found.outputs))
    wanted = "input_ids, attention_mask, perhaps token_type_ids (all int64), and logits"
    known = {"input_ids", "attention_mask"} <= set(names) <= {"input_ids", "attention_mask", "token_type_ids"}
    if not known or set(names.values()) != {"int64"} or "logits" not in {one.name for one in found.outputs}:
        raise ConfigError(
            "model", f"{shown}/model.onnx has {described}", wanted, "use node onnx for a model with other ports"
        )
    return found


def open_classifier(model: str, context: OpenContext, precision: str = "float32") -> TextClassifier:
    """Open the classifier `model`, a folder or hub name. ModelError: it cannot be opened.

    precision: number format of a transformers model; see weftline.nodes.precision.
    """
    path = find_model(model, context.base_dir)
    try:
        if path is not None and is_onnx(model, context.base_dir):
            return _OnnxClassifier(path, model, context)
        check_classifier(model, context.base_dir, "model")
        return _TorchClassifier(model, context, precision)
    except ConfigError as error:
        raise model_error(error) from None


def classifier_labels(config: dict[str, Any], shown: str) -> tuple[str, ...]:
    """Return the labels of a classifier in the order of its logits. ConfigError: not labels of single texts."""
    check_kind(
        config, shown, (SEQUENCE_CLASSIFICATION,), "a model that classifies texts (...ForSequenceClassification)"
    )
    one_label = len(labels_of(config, shown)) == 1
    if is_cross_encoder(config):
        found = f"{shown} is a cross-encoder, which scores two texts against each other"
        fix = "use node rerank for it" if one_label else OWN_NODE
        raise ConfigError("model", found, "a model that classifies single texts", fix)
    for_score = "use node rerank to score passages against a query" if one_label else OWN_NODE
    return probable_labels(config, shown, for_score)


def probable_labels(config: Mapping[str, Any], shown: str, for_score: str = OWN_NODE) -> tuple[str, ...]:
    """Return the labels in config.json in the order of the logits.

    ConfigError: outputs that are no probabilities; `for_score`: what to do with a model that gives a score.
    """
    labels, kind = labels_of(config, shown), config.get("problem_type")
    if kind == "regression" or (len(labels) == 1 and not independent(config)):
        one = (
            "is a regression (problem_type in config.json)" if kind == "regression" else "has one label (num_labels=1)"
        )
        found = f"{shown} {one}: its output is a score, and no probability of a label"
        fix = f"name a model with two labels or more; for the score, {for_score}"
        raise ConfigError("model", found, "a model with two labels or more", fix)
    if kind not in (None, "single_label_classification", "multi_label_classification"):
        expected = "single_label_classification or multi_label_classification"
        raise ConfigError("model", f"problem_type in {shown}/config.json is {kind!r:.60}", expected)
    return labels


def is_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Return True for a config.json that a CrossEncoder of sentence-transformers wrote."""
    trained = config.get("sentence_transformers")
    return "sbert_ce_default_activation_function" in config or (
        isinstance(trained, dict) and "activation_fn" in trained
    )


def labels_of(config: Mapping[str, Any], shown: str) -> tuple[str, ...]:
    """Return the labels in config.json, with transformers' default names where missing."""
    by_id, count = config.get("id2label"), config.get("num_labels", LABELS_DEFAULT)
    if by_id is None and config.get("architectures") and type(count) is int and 0 < count <= LABELS_MAX:
        return tuple(f"LABEL_{index}" for index in range(count))
    keys = {str(index) for index in range(len(by_id))} if isinstance(by_id, dict) else set()
    if not isinstance(by_id, dict) or not 0 < len(by_id) <= LABELS_MAX or {str(key) for key in by_id} != keys:
        found = f"id2label in {shown}/config.json is " + ("missing" if by_id is None else "no list of all labels")
        raise ConfigError("model", found, 'an object with keys "0", "1" and so on, one for each label')
    named = {str(key): str(label) for key, label in by_id.items()}
    return tuple(named[str(index)] for index in range(len(named)))


def independent(config: Mapping[str, Any]) -> bool:
    """Return True when labels do not exclude each other, so that each has a probability of its own."""
    return config.get("problem_type") == "multi_label_classification"


def confidence(row: np.ndarray) -> float:
    """Return the value of output `confidence` for float32 [labels] probabilities."""
    return round(float(row.max()), 6)


def columns(answers: Sequence[Mapping[str, Any] | Exception], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the outputs `names` of a batch; an item's error is its value of every output."""
    return {name: [one if isinstance(one, Exception) else one[name] for one in answers] for name in names}


def to_probabilities(logits: np.ndarray, independent: bool) -> np.ndarray:
    """Return the sigmoid of each logit where labels are independent, else the softmax of each row."""
    if independent:
        sigmoid: np.ndarray = 1 / (1 + np.exp(-np.clip(logits, -60, 60)))
        return sigmoid
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return softmax


@dataclass(frozen=True, slots=True)
class ClassifyConfig:
    """Options of `classify`.

    model: a folder with model.onnx, tokenizer.json and config.json (see weftline.nodes.classify), or a sequence
           classification model of transformers as a folder or hub name: safetensors only, no code from the model. It
           has two labels or more, of single texts; where they do not exclude each other (problem_type
           multi_label_classification) scores are those of each label alone.
    overflow:  a text with more tokens than the model reads: 'error' fails its item, 'end' and 'start' cut it there,
           'windows' reads all of it in windows that overlap by a quarter: a label has the mean of its probabilities, or
           the largest one where labels do not exclude each other.
    precision: number format of a transformers model: 'float32', 'tf32' (GPUs only), 'bfloat16' or 'float16'.
           Compared with float32 on the CPU, with random weights of BERT and DistilBERT, all labels were the same;
           probabilities moved by at most 2e-4 in bfloat16 and 3e-5 in float16. TF32 was not measured.
    """

    model: str
    precision: str = "float32"
    overflow: str = "error"


class Classify(BatchNode):
    """Assigns a text its most likely label."""

    Config: ClassVar[type[Any]] = ClassifyConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (16, 1.0)

    _classifier: TextClassifier | None = None

    @classmethod
    def ports(cls, config: ClassifyConfig, step: StepContext) -> Ports:
        check_precision(config.precision)
        check_overflow(config.overflow, (*SIDES, WINDOWS))
        labels = check_classifier(config.model, step.base_dir, "model")
        if config.precision != "float32" and is_onnx(config.model, step.base_dir):
            found = f"{config.precision}, but {config.model} is an ONNX model, whose file says what it computes in"
            raise ConfigError("precision", found, "float32", "leave it out, or name a model of transformers")
        if labels is not None and len(labels) == 1:
            found = f"{config.model} has one label, {labels[0]!r:.60}, which every text would be given"
            raise ConfigError("model", found, "a model with two labels or more", "use node guardrail for a threshold")
        return Ports(
            inputs=(port("text", "text"),),
            outputs=(
                port("label", "text", about="the likeliest label"),
                CONFIDENCE,
                port("scores", "json", about="probability of each label", labels=labels or ()),
            ),
        )

    @classmethod
    def model_bytes(cls, config: ClassifyConfig, step: StepContext) -> int:
        path = find_model(config.model, step.base_dir)
        if path is not None and is_onnx(config.model, step.base_dir):
            return onnx_bytes(path / "model.onnx", config.model)
        return network_bytes(config.model, step.base_dir)

    @classmethod
    def plan_notes(cls, config: ClassifyConfig, step: StepContext) -> Sequence[str]:
        return hub_notes(config.model, step.base_dir)

    def open(self, context: OpenContext) -> None:
        self._classifier = open_classifier(self.config.model, context, self.config.precision)

    def warm_up(self) -> None:
        self._opened.probabilities(["warm-up"])

    def run(self, batch: Batch) -> Outputs:
        found = self._opened.probabilities(batch["text"], self.config.overflow)
        return columns([one if isinstance(one, InputError) else self._answer(one) for one in found], _OUTPUTS)

    def _answer(self, row: np.ndarray) -> dict[str, Any]:
        labels = self._opened.labels
        scores = {label: round(float(p), 6) for label, p in zip(labels, row, strict=True)}
        return {"label": labels[int(row.argmax())], "confidence": confidence(row), "scores": scores}

    @classmethod
    def can_rest(cls, config: ClassifyConfig, step: StepContext) -> bool:
        return not is_onnx(config.model, step.base_dir)

    def sleep(self, keep: str) -> bool:
        return self._opened.sleep(keep)

    def wake(self) -> None:
        self._opened.wake()

    def close(self) -> None:
        self._classifier = None

    @property
    def _opened(self) -> TextClassifier:
        if self._classifier is None:
            raise RuntimeError("the node is not open")
        return self._classifier
