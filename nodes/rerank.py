"""Reranking node: a cross-encoder's score of each passage against a query.

A cross-encoder is a sequence classification model of transformers with one label, which reads query and passage as one
pair of texts: from a folder of transformers or of sentence-transformers, or by its hub name.

The pairs of all items of a batch are scored together: sorted by length, in calls of similar lengths. So a call pads
little, however unlike the passages are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weftline.errors import InputError
from weftline.node import Batch, BatchNode, ConfigError, OpenContext, Outputs, Ports, StepContext, port
from weftline.nodes.classify import columns, is_cross_encoder, labels_of
from weftline.nodes.contract import model_error
from weftline.nodes.device_tensors import offload
from weftline.nodes.hugging_face import (
    OWN_NODE,
    SEQUENCE_CLASSIFICATION,
    TOKENS_MAX,
    check_folder,
    check_kind,
    fetch_folder,
    find_folder,
    hub_notes,
    load_network,
    load_tokens,
    network_bytes,
    read_config,
    tokens_limit,
)
from weftline.nodes.out_of_memory import is_out_of_memory
from weftline.nodes.precision import check_precision, computing_in, round_weights
from weftline.nodes.sentence_head import PAIR_ACTIVATIONS, PairHead, read_pair_head
from weftline.nodes.text_tokens import (
    OVERFLOW_ABOUT,
    USAGE_ABOUT,
    Encoded,
    Overflow,
    TextTokens,
    check_overflow,
    pad_rows,
    read_overflow,
    usage_of,
)

ACTIVATIONS = tuple(PAIR_ACTIVATIONS.values())
PAIRS_MAX = 4096
CALL_TOKENS_MAX = 32 * TOKENS_MAX
"""Most tokens of one call of the model, padding included; one pair may have more."""

Item = tuple[str, Sequence[str], Overflow | InputError]
"""Query and passages of a request, and its rule for pairs that are too long."""


@dataclass(frozen=True, slots=True)
class RerankConfig:
    """Options of `rerank`.

    model:      a cross-encoder of transformers or sentence-transformers as a folder or hub name: a sequence
                classification model with one label; safetensors only, no code from the model.
    activation: of the score: 'sigmoid' (from 0 to 1) or 'none' (the model's own number, whose order is the same).
                Default: that of the model's files, else 'sigmoid', as in sentence-transformers.
    overflow:   a pair of query and passage with more tokens than the model reads: 'error' fails its item, 'end' and
                'start' cut it there, token by token in its longer text. The optional input `overflow` overrides it.
    precision:  number format of the network: 'float32', 'tf32' (GPUs only), 'bfloat16' or 'float16'; scores are
                float32 in all. Compared with float32 on the CPU, with random weights of BERT and RoBERTa, scores with a
                sigmoid moved by at most 3e-3 in bfloat16 and 4e-4 in float16, where those of passages spread over 0.1
                and more. TF32 was not measured.
    pairs_max:  most pairs of query and passage in one call of the model. Long pairs share a call with fewer others.
    """

    model: str
    activation: str | None = None
    precision: str = "float32"
    pairs_max: int = 32
    overflow: str = "error"


class Rerank(BatchNode):
    """Scores passages against a query with a cross-encoder: float32[N], in the order of the passages."""

    Config: ClassVar[type[Any]] = RerankConfig
    extra: ClassVar[str] = "llm"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 2.0)

    _network: Any = None
    _head: PairHead
    _device: str  # as torch calls it
    _tokens: TextTokens
    _types: bool  # the network reads token_type_ids

    @classmethod
    def ports(cls, config: RerankConfig, step: StepContext) -> Ports:
        if config.activation is not None and config.activation not in ACTIVATIONS:
            raise ConfigError("activation", f"{config.activation!r:.40}", f"one of {', '.join(ACTIVATIONS)}")
        check_precision(config.precision)
        check_overflow(config.overflow)
        if not 1 <= config.pairs_max <= PAIRS_MAX:
            raise ConfigError("pairs_max", f"{config.pairs_max}", f"a number from 1 to {PAIRS_MAX}")
        folder = find_folder(config.model, step.base_dir)
        if folder is not None:
            _checked_head(config, folder)
            check_folder(config.model, step.base_dir, "AutoModelForSequenceClassification")
        return Ports(
            inputs=(
                port("query", "text"),
                port("passages", "list[text]"),
                port("overflow", "json", optional=True, about=OVERFLOW_ABOUT),
            ),
            outputs=(
                port("scores", "float32[N]", about="relevance of each passage, in their order"),
                port("usage", "json", about=USAGE_ABOUT),
            ),
        )

    @classmethod
    def model_bytes(cls, config: RerankConfig, step: StepContext) -> int:
        return network_bytes(config.model, step.base_dir)

    @classmethod
    def plan_notes(cls, config: RerankConfig, step: StepContext) -> Sequence[str]:
        folder = find_folder(config.model, step.base_dir)
        if folder is None:
            return hub_notes(config.model, step.base_dir)
        head = _checked_head(config, folder)
        limit = f", at most {head.tokens_max} tokens" if head.tokens_max else ""
        return (f"settings of {config.model}: activation {head.activation}{limit}",)

    def open(self, context: OpenContext) -> None:
        model, self._device = self.config.model, context.framework_device
        try:
            self._head = _checked_head(self.config, fetch_folder(model, context.base_dir))
        except ConfigError as error:
            raise model_error(error) from None
        self._network = load_network("AutoModelForSequenceClassification", model, context)
        round_weights(self._network, self.config.precision)
        config = self._network.config.to_dict()
        pad, types = config.get("pad_token_id"), config.get("type_vocab_size")
        pad = pad if type(pad) is int and pad >= 0 else None
        self._tokens = load_tokens(model, context, _tokens_max(config, self._head), pad)
        self._types = self._tokens.types and type(types) is int and types > 1

    def warm_up(self) -> None:
        self.run(Batch({"query": ["warm-up"], "passages": [["warm-up"]]}))

    def run(self, batch: Batch) -> Outputs:
        rules = [read_overflow(one, Overflow(self.config.overflow)) for one in batch.get("overflow")]
        items = list(zip(batch["query"], batch["passages"], rules, strict=True))
        try:
            answers: Sequence[Mapping[str, Any] | Exception] = self._answers(items)
        except Exception as error:
            if len(items) == 1 or is_out_of_memory(error):
                raise
            answers = [self._alone(item) for item in items]
            if not any(isinstance(one, Mapping) for one in answers):
                raise
        return columns(answers, ("scores", "usage"))

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        offload(self._network)
        return True

    def wake(self) -> None:
        self._network.to(self._device)

    def close(self) -> None:
        self._network = None

    def _alone(self, item: Item) -> Mapping[str, Any] | Exception:
        """Return the outputs for one item of a batch that failed, or the error of that item."""
        try:
            return self._answers([item])[0]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return error

    def _answers(self, items: Sequence[Item]) -> list[Mapping[str, Any] | InputError]:
        """Return the outputs for each item, or the error of one that does not fit."""
        encoded = [self._encoded(*item) for item in items]
        scores = iter(self._scores_of([one for one in encoded if not isinstance(one, InputError)]))
        return [
            one if isinstance(one, InputError) else {"scores": next(scores), "usage": usage_of(one)} for one in encoded
        ]

    def _encoded(self, query: str, passages: Sequence[str], rule: Overflow | InputError) -> list[Encoded] | InputError:
        """Return an item's pairs, or the error of its first pair that does not fit."""
        if isinstance(rule, InputError):
            return rule
        pairs = [(query.lower(), one.lower()) if self._head.lower else (query, one) for one in passages]
        found: list[Encoded] = []
        for place, one in enumerate(self._tokens.encode(pairs, [rule] * len(pairs))):
            if isinstance(one, InputError):
                return InputError(f"passages[{place}]: {one}", param=one.param)
            found.append(one)
        return found

    def _scores_of(self, items: Sequence[Sequence[Encoded]]) -> list[np.ndarray]:
        """Return float32 [passages] for each item."""
        if not items:
            return []
        found = self._scores([pair for pairs in items for pair in pairs])
        ends = np.cumsum([len(pairs) for pairs in items])
        return np.split(found, ends[:-1])

    def _scores(self, pairs: Sequence[Encoded]) -> np.ndarray:
        """Return float32 [pairs]."""
        scores = np.empty(len(pairs), np.float32)
        for places in calls_of([len(one.ids) for one in pairs], self.config.pairs_max):
            scores[places] = self._call([pairs[place] for place in places])
        return scores

    def _call(self, encoded: Sequence[Encoded]) -> np.ndarray:
        """Return float32 [pairs] of one call of the network."""
        import torch

        ids, mask = pad_rows([one.ids for one in encoded], self._tokens.pad)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._types:
            inputs["token_type_ids"], _ = pad_rows([one.types for one in encoded], 0)
        with torch.inference_mode():
            there = {name: torch.from_numpy(value).to(self._device) for name, value in inputs.items()}
            with computing_in(self.config.precision, self._device):
                logits = self._network(**there).logits
            scores = logits.float().reshape(len(encoded))
            if self._head.activation == "sigmoid":
                scores = scores.sigmoid()
            found: np.ndarray = scores.cpu().numpy()
            return found


def calls_of(lengths: Sequence[int], pairs_max: int, tokens_max: int = CALL_TOKENS_MAX) -> list[list[int]]:
    """Return the positions of the pairs in each call of the model, longest pairs first.

    lengths:    tokens of each pair.
    tokens_max: most tokens of a call, padding included; a longer pair is called alone.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    calls: list[list[int]] = []
    start = 0
    while start < len(order):
        count = max(1, min(pairs_max, tokens_max // max(1, lengths[order[start]])))
        calls.append(order[start : start + count])
        start += count
    return calls


def _tokens_max(config: dict[str, Any], head: PairHead) -> int:
    """Return the model's limit on tokens of a pair: the tokenizer's, and what its table of positions holds."""
    positions = config.get("max_position_embeddings")
    known = positions if type(positions) is int and positions > 0 else TOKENS_MAX
    return tokens_limit(config, head.tokens_max or known)


def _checked_head(config: RerankConfig, folder: Path) -> PairHead:
    """Return the settings of the model in `folder`. ConfigError: it is no cross-encoder."""
    model, found = config.model, read_config(folder, config.model)
    expected = "a cross-encoder: a model with one label (...ForSequenceClassification)"
    check_kind(found, model, (SEQUENCE_CLASSIFICATION,), expected)
    head = read_pair_head(folder, model, found, config.activation)
    labels = labels_of(found, model)
    if len(labels) != 1:
        named = f"{', '.join(labels[:3])}{' and others' if len(labels) > 3 else ''}"
        fix = OWN_NODE if is_cross_encoder(found) else "use node classify for it, or name another model"
        raise ConfigError("model", f"{model} has {len(labels)} labels: {named:.120}", expected, fix)
    return head
