"""Pooling and scoring heads: embeddings or scores instead of generated text.

A prompt without an answer is computed in the same rounds as others, in chunks and packed with other requests, and ends
where its answer would begin. For each token the runner then returns the head's input instead of logits:

    head        reads                      finish gives
    Embedding   hidden states, float32     float32 [width], of the last token, the first, or the mean of all
    Scores      the score layer's output   float32 [labels], of the last token

`open_head` loads such a model; the engine uses `Runner.head`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from weftline.engine.llm.model_loader import RunnerOptions, load_model
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.sequence import Sequence
from weftline.errors import ModelError

POOLINGS = ("last", "mean", "first")
UNFINISHED_MAX = 4096
"""Most partly pooled prompts, as many as an engine holds; the oldest are dropped, such as cancelled ones."""


class Head(Protocol):
    """Computes an embedding or scores from the chunks of a prompt.

    whole: it reads every token of the prompt, so the prefix cache is not used (`Sequence.skips_prefix_cache`).
    width: length of its result.
    """

    @property
    def whole(self) -> bool: ...

    @property
    def width(self) -> int: ...

    def add(self, sequence: Sequence, rows: Tensor) -> None:
        """Add a chunk: float32 [chunk tokens, n] for a head that reads all, else [0 or 1, n], the last token's.

        Called before the chunk counts as computed: `sequence.computed` is where it begins.
        """

    def finish(self, sequence: Sequence) -> np.ndarray:
        """Return the result of a prompt, float32 [width], after its last chunk; repeatable until `end`."""

    def end(self, sequence: Sequence) -> None:
        """Drop a finished prompt, once its round was computed."""

    def forget(self) -> None:
        """Drop partly pooled prompts; they were cancelled."""


@dataclass(slots=True)
class _Part:
    """A partly pooled prompt: a sum or the one row that counts, and the number of tokens so far."""

    state: Tensor
    tokens: int


class _Parts:
    """Partly pooled prompts. A repeated chunk counts once; a restarted prompt begins anew."""

    def __init__(self) -> None:
        self._parts: OrderedDict[int, _Part] = OrderedDict()

    def fold(self, sequence: Sequence, rows: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Join the rows of a chunk [tokens, n] to the prompt's state [n]; `join` gets state and rows."""
        if not len(rows):
            return
        part = self._parts.get(sequence.order)
        if part is None or sequence.computed == 0:
            part = self._parts[sequence.order] = _Part(rows.new_zeros(rows.shape[1]), sequence.computed)
        new = rows[max(0, part.tokens - sequence.computed) :]
        if not len(new):
            return
        part.state = join(part.state, new)
        part.tokens = sequence.computed + len(rows)
        self._parts.move_to_end(sequence.order)
        while len(self._parts) > UNFINISHED_MAX:
            self._parts.popitem(last=False)

    def state(self, sequence: Sequence) -> Tensor:
        return self._parts[sequence.order].state

    def end(self, sequence: Sequence) -> None:
        self._parts.pop(sequence.order, None)

    def clear(self) -> None:
        self._parts.clear()


class Embedding:
    """Embeds a text as the hidden state of its last token, its first, or the mean of all; see `Head`.

    normalise: scale it to length 1, so that a dot product is a cosine.
    """

    def __init__(self, width: int, pooling: str = "last", normalise: bool = True) -> None:
        if pooling not in POOLINGS:
            raise ModelError(f"pooling: found {pooling!r:.40}, expected one of {', '.join(POOLINGS)}")
        self.width, self.pooling, self.normalise = width, pooling, normalise
        self.whole = pooling != "last"
        self._parts = _Parts()

    def add(self, sequence: Sequence, rows: Tensor) -> None:
        self._parts.fold(sequence, rows, self._joined(sequence))

    def _joined(self, sequence: Sequence) -> Callable[[Tensor, Tensor], Tensor]:
        if self.pooling == "mean":
            return lambda state, rows: state + rows.sum(0)
        if self.pooling == "first":
            return lambda state, rows: rows[0].clone() if sequence.computed == 0 else state
        return lambda state, rows: rows[-1].clone()

    def finish(self, sequence: Sequence) -> np.ndarray:
        state = self._parts.state(sequence)
        if self.pooling == "mean":
            state = state / sequence.prompt
        if self.normalise:
            state = nn.functional.normalize(state, dim=0)
        found: np.ndarray = state.cpu().numpy()
        return found

    def end(self, sequence: Sequence) -> None:
        self._parts.end(sequence)

    def forget(self) -> None:
        self._parts.clear()


class Scores:
    """Scores a text by the model's score layer on its last token; see `Head`.

    labels: names of the scores.
    scale:  'none' for raw scores, such as a reward; 'softmax' and 'sigmoid' for probabilities.
    """

    whole = False

    def __init__(self, labels: tuple[str, ...], scale: str = "none") -> None:
        self.labels, self.scale, self.width = labels, scale, len(labels)
        self._parts = _Parts()

    def add(self, sequence: Sequence, rows: Tensor) -> None:
        self._parts.fold(sequence, rows, lambda state, rows: rows[-1].clone())

    def finish(self, sequence: Sequence) -> np.ndarray:
        scores = self._parts.state(sequence)
        if self.scale != "none":
            scores = scores.softmax(0) if self.scale == "softmax" else scores.sigmoid()
        found: np.ndarray = scores.cpu().numpy()
        return found

    def end(self, sequence: Sequence) -> None:
        self._parts.end(sequence)

    def forget(self) -> None:
        self._parts.clear()


class _HeadModel(nn.Module):
    """A decoder with `top` in place of its language head, in the form that a runner expects of a model."""

    def __init__(self, decoder: Any, top: nn.Module | None) -> None:
        super().__init__()
        self.decoder, self.top = decoder, top
        self.config, self.dtype = decoder.config, decoder.dtype

    def get_input_embeddings(self) -> Any:
        return self.decoder.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.top  # as a language model's: it is not quantised

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor | slice = slice(None),
        use_cache: bool = False,
    ) -> SimpleNamespace:
        out = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
        kept = out.last_hidden_state[:, logits_to_keep]
        return SimpleNamespace(logits=kept if self.top is None else self.top(kept))


def open_head(
    source: str | Path,
    task: str,
    options: RunnerOptions | None = None,
    progress: Callable[[str, float], None] = lambda phrase, fraction: None,
    shown: str | None = None,
    *,
    pooling: str = "last",
    normalise: bool = True,
) -> Runner:
    """Load a decoder whose runner has a head: task 'embed' or 'classify'; ModelError if it is unsuitable.

    embed:    any decoder; the quality of its embeddings depends on its training.
    classify: a model trained with a score layer, such as LlamaForSequenceClassification; rewards are one label.
    """
    options, name = options or RunnerOptions(), shown or str(source)
    kind = {"embed": "AutoModel", "classify": "AutoModelForSequenceClassification"}[task]
    model, options, unread = load_model(source, options, progress, shown, kind)
    decoder, top = model, None
    if task == "classify":
        decoder, top = getattr(model, model.base_model_prefix, None), getattr(model, "score", None)
        if decoder is None or not isinstance(top, nn.Module):
            raise ModelError(f"model {name}: {type(model).__name__} has no score layer on its last token")
    runner = Runner(_HeadModel(decoder, top), options, unread)
    config = model.config.get_text_config(decoder=True)
    runner.head = Embedding(config.hidden_size, pooling, normalise) if top is None else Scores(*_labels(model.config))
    return runner


def _labels(config: Any) -> tuple[tuple[str, ...], str]:
    """Return the labels of a classifier and the scale of its scores, as transformers' pipeline chooses it."""
    labels = tuple(str(config.id2label[place]) for place in range(config.num_labels))
    if config.problem_type == "regression":
        return labels, "none"
    if len(labels) == 1:
        return labels, "none"
    return labels, "sigmoid" if config.problem_type == "multi_label_classification" else "softmax"
