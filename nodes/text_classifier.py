"""Text classification models behind one interface: a probability for every label.

Two formats: a folder with model.onnx, tokenizer.json and config.json, which needs neither torch nor transformers

    {"id2label": {"0": "safe", "1": "secrets"}, "tokens_max": 128, "pad_token_id": 0}

with inputs input_ids and attention_mask (int64 [texts, tokens]; token_type_ids, where there is one, is given zeros) and
output logits (float32 [texts, labels]); or any sequence classification model of transformers, from a folder or by its
hub name.

A model whose output is not a probability for each label of one text is refused: a score (one label, regression), labels
of tokens (named entities), a cross-encoder's view of two texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, OpenContext, model_error
from weftline.nodes.hugging_face import (
    OWN_NODE,
    SEQUENCE_CLASSIFICATION,
    check_folder,
    check_kind,
    find_config,
    load_network,
    load_tokens,
    read_config,
    tokens_limit,
)
from weftline.nodes.model_file import find_model
from weftline.nodes.near import rest
from weftline.nodes.onnx_file import OnnxFile, read_onnx
from weftline.nodes.onnx_session import open_session
from weftline.nodes.precision import computing_in, round_weights
from weftline.nodes.text_tokens import Rows, TextTokens, load_tokenizer

LABELS_MAX = 10_000
LABELS_DEFAULT = 2
"""Labels of a model of transformers whose config.json does not name them."""
ROWS_MAX = 64
"""Most rows in one call of the model: a long text has many windows, and their memory is needed all at once."""


class TextClassifier(ABC):
    """A loaded classifier. labels: its classes, by column of the probabilities."""

    def __init__(self, labels: tuple[str, ...], tokens: TextTokens, independent: bool) -> None:
        self.labels, self._tokens, self._independent = labels, tokens, independent

    def probabilities(self, texts: Sequence[str], windows_max: int = 1) -> np.ndarray:
        """Return float32 [texts, labels]. A text longer than the model reads is cut, or with `windows_max` above 1 read
        in that many windows, and each label has its largest probability in any of them."""
        rows = self._tokens.rows(texts, windows_max)
        parts = range(0, len(rows.owner), ROWS_MAX)
        logits = np.concatenate([self._logits(rows.part(start, start + ROWS_MAX)) for start in parts])
        by_row = _probabilities(logits.astype(np.float32), self._independent)
        found = np.zeros((len(texts), by_row.shape[1]), np.float32)
        np.maximum.at(found, np.array(rows.owner, np.int64), by_row)
        return found

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
        found = _check_face(read_onnx(folder / "model.onnx", f"{shown}/model.onnx"), shown)
        self._types = any(one.name == "token_type_ids" for one in found.inputs)
        tokens_max = config.get("tokens_max", 512)
        if type(tokens_max) is not int or not 8 <= tokens_max <= 1 << 20:
            raise ModelError(f"{shown}/config.json: tokens_max is {tokens_max!r:.40}, expected a number from 8")
        pad = config.get("pad_token_id") or 0
        tokens = TextTokens(load_tokenizer(folder, shown), tokens_max, pad if type(pad) is int else 0)
        super().__init__(classifier_labels(config, shown), tokens, _independent(config))
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
        super().__init__(labels, tokens, _independent(config))

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        rest(self._network)
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


def is_onnx(model: str, base_dir: Path) -> bool:
    """Return True when `model` is a local folder in the ONNX format."""
    path = find_model(model, base_dir)
    return path is not None and (path / "model.onnx").is_file()


def check_classifier(model: str, base_dir: Path, option: str) -> tuple[str, ...] | None:
    """Return the labels of `model`, or None when it is not on this machine yet; ConfigError when it cannot be one."""
    try:
        config = find_config(model, base_dir)
        if config is None:
            return None
        labels = classifier_labels(config, model)
        if is_onnx(model, base_dir):
            folder = find_model(model, base_dir) or base_dir
            _check_face(read_onnx(folder / "model.onnx", f"{model}/model.onnx"), model)
            if not (folder / "tokenizer.json").is_file():
                raise ConfigError("model", f"{model} has no tokenizer.json", "the model's tokenizer beside model.onnx")
        else:
            check_folder(model, base_dir, "AutoModelForSequenceClassification")
        return labels
    except ConfigError as error:
        raise ConfigError(option, error.found, error.expected, error.fix) from None


def _check_face(found: OnnxFile, shown: str) -> OnnxFile:
    """Return what model.onnx takes and gives; ConfigError when it is no text classifier."""
    names = {one.name: one.dtype for one in found.inputs}
    told = ", ".join(f"{one.name} ({one.dtype})" for one in (*found.inputs, *found.outputs))
    wanted = "input_ids, attention_mask, perhaps token_type_ids (all int64), and logits"
    known = {"input_ids", "attention_mask"} <= set(names) <= {"input_ids", "attention_mask", "token_type_ids"}
    if not known or set(names.values()) != {"int64"} or "logits" not in {one.name for one in found.outputs}:
        raise ConfigError(
            "model", f"{shown}/model.onnx has {told}", wanted, "use node onnx for a model with other ports"
        )
    return found


def open_classifier(model: str, context: OpenContext, precision: str = "float32") -> TextClassifier:
    """Return the classifier in the folder, or of the hub name, `model`; ModelError when it cannot be opened.

    precision: what a model of transformers computes in; see weftline.nodes.precision.
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
    """Return the labels of a classifier in the order of its logits; ConfigError when they are not those of a text."""
    check_kind(
        config, shown, (SEQUENCE_CLASSIFICATION,), "a model that classifies texts (...ForSequenceClassification)"
    )
    trained = config.get("sentence_transformers")
    if "sbert_ce_default_activation_function" in config or (isinstance(trained, dict) and "activation_fn" in trained):
        found = f"{shown} is a cross-encoder, which scores two texts against each other"
        raise ConfigError("model", found, "a model that classifies single texts", OWN_NODE)
    labels, kind = _labels(config, shown), config.get("problem_type")
    if kind == "regression" or (len(labels) == 1 and not _independent(config)):
        one = (
            "is a regression (problem_type in config.json)" if kind == "regression" else "has one label (num_labels=1)"
        )
        found = f"{shown} {one}: its output is a score, and no probability of a label"
        fix = f"name a model with two labels or more; for the score, {OWN_NODE}"
        raise ConfigError("model", found, "a model that tells labels apart", fix)
    if kind not in (None, "single_label_classification", "multi_label_classification"):
        expected = "single_label_classification or multi_label_classification"
        raise ConfigError("model", f"problem_type in {shown}/config.json is {kind!r:.60}", expected)
    return labels


def _labels(config: dict[str, Any], shown: str) -> tuple[str, ...]:
    """Return the labels in config.json, named as transformers names them where it leaves them out."""
    by_id, count = config.get("id2label"), config.get("num_labels", LABELS_DEFAULT)
    if by_id is None and config.get("architectures") and type(count) is int and 0 < count <= LABELS_MAX:
        return tuple(f"LABEL_{index}" for index in range(count))
    keys = {str(index) for index in range(len(by_id))} if isinstance(by_id, dict) else set()
    if not isinstance(by_id, dict) or not 0 < len(by_id) <= LABELS_MAX or {str(key) for key in by_id} != keys:
        found = f"id2label in {shown}/config.json is " + ("missing" if by_id is None else "no list of all labels")
        raise ConfigError("model", found, 'an object with keys "0", "1" and so on, one for each label')
    named = {str(key): str(label) for key, label in by_id.items()}
    return tuple(named[str(index)] for index in range(len(named)))


def _independent(config: dict[str, Any]) -> bool:
    return config.get("problem_type") == "multi_label_classification"


def _probabilities(logits: np.ndarray, independent: bool) -> np.ndarray:
    """Return the sigmoid of each logit where labels are independent, else the softmax of each row."""
    if independent:
        sigmoid: np.ndarray = 1 / (1 + np.exp(-np.clip(logits, -60, 60)))
        return sigmoid
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return softmax
