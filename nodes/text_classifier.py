"""Text classification models behind one method: probabilities for every label of a text.

Two formats: a folder with model.onnx, tokenizer.json and config.json, which needs neither torch nor transformers

    {"id2label": {"0": "safe", "1": "secrets"}, "tokens_max": 128, "pad_token_id": 0}

with inputs input_ids and attention_mask (int64 [texts, tokens]) and output logits (float32 [texts, labels]); or any
sequence classification model of transformers, from a folder or by its hub name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, OpenContext
from weftline.nodes.hugging_face import find_config, load_network, load_tokens, read_config, tokens_limit
from weftline.nodes.model_file import find_model
from weftline.nodes.near import rest
from weftline.nodes.onnx_file import read_onnx
from weftline.nodes.onnx_session import open_session
from weftline.nodes.text_tokens import Rows, TextTokens, load_tokenizer

LABELS_MAX = 10_000
ROWS_MAX = 64
"""Most rows in one call of the model: a long text has many windows, and their memory is needed all at once."""


class TextClassifier(ABC):
    """An opened classifier. labels: what it tells apart, by the column of its probabilities."""

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
        """Give back the device's memory until `wake`; False: it cannot. See Node.sleep."""
        return False

    def wake(self) -> None:
        """Be ready again after `sleep`."""

    @abstractmethod
    def _logits(self, rows: Rows) -> np.ndarray:
        """Return float [rows, labels]."""


class _OnnxClassifier(TextClassifier):
    def __init__(self, folder: Path, shown: str, context: OpenContext) -> None:
        config = read_config(folder, shown)
        found = read_onnx(folder / "model.onnx", f"{shown}/model.onnx")
        if {i.name for i in found.inputs} != {"input_ids", "attention_mask"} or found.outputs[0].name != "logits":
            names = ", ".join(i.name for i in (*found.inputs, *found.outputs))
            raise ModelError(f"{shown}/model.onnx has {names}; expected input_ids, attention_mask and logits")
        tokens_max = config.get("tokens_max", 512)
        if type(tokens_max) is not int or not 8 <= tokens_max <= 1 << 20:
            raise ModelError(f"{shown}/config.json: tokens_max is {tokens_max!r:.40}, expected a number from 8")
        pad = config.get("pad_token_id") or 0
        tokens = TextTokens(load_tokenizer(folder, shown), tokens_max, pad if type(pad) is int else 0)
        super().__init__(labels_of(config, shown), tokens, _independent(config))
        self._session = open_session(folder / "model.onnx", f"{shown}/model.onnx", context, tensorrt=False)

    def _logits(self, rows: Rows) -> np.ndarray:
        (logits,) = self._session.run(["logits"], {"input_ids": rows.ids, "attention_mask": rows.mask})
        if logits.shape != (len(rows.ids), len(self.labels)):
            raise ModelError(
                f"the classifier gave {list(logits.shape)}, its config.json names {len(self.labels)} labels"
            )
        return np.asarray(logits)


class _TorchClassifier(TextClassifier):
    def __init__(self, model: str, context: OpenContext) -> None:
        self._device = context.framework_device
        self._network = load_network("AutoModelForSequenceClassification", model, context)
        config = self._network.config.to_dict()
        tokens = load_tokens(model, context, tokens_limit(config))
        super().__init__(labels_of(config, model), tokens, _independent(config))

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
            logits: np.ndarray = self._network(input_ids=ids, attention_mask=mask).logits.float().cpu().numpy()
            return logits


def is_onnx(model: str, base_dir: Path) -> bool:
    """Whether `model` is a local folder in the ONNX format."""
    path = find_model(model, base_dir)
    return path is not None and (path / "model.onnx").is_file()


def check_classifier(model: str, base_dir: Path, option: str) -> tuple[str, ...] | None:
    """Return the labels of `model`, or None when it is not on this machine yet; ConfigError when it cannot be one."""
    try:
        config = find_config(model, base_dir)
    except ConfigError as error:
        raise ConfigError(option, error.found, error.expected, error.fix) from None
    return None if config is None else labels_of(config, model)


def open_classifier(model: str, context: OpenContext) -> TextClassifier:
    """Return the classifier in the folder, or of the hub name, `model`; ModelError when it cannot be opened."""
    path = find_model(model, context.base_dir)
    try:
        if path is not None and is_onnx(model, context.base_dir):
            return _OnnxClassifier(path, model, context)
        return _TorchClassifier(model, context)
    except ConfigError as error:
        raise ModelError(str(error)) from None


def labels_of(config: dict[str, Any], shown: str) -> tuple[str, ...]:
    """Return the labels of a config in the order of the logits; ModelError when they are not numbered from 0."""
    by_id = config.get("id2label")
    keys = {str(index) for index in range(len(by_id))} if isinstance(by_id, dict) else set()
    if not isinstance(by_id, dict) or not 0 < len(by_id) <= LABELS_MAX or {str(key) for key in by_id} != keys:
        raise ModelError(f'{shown}/config.json: id2label is no object with keys "0", "1" and so on')
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
