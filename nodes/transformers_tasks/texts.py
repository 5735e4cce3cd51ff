"""Tasks on texts: text-classification, token- and zero-shot-classification, question-answering, feature-extraction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from weftline.errors import InputError, ModelError
from weftline.nodes.classify import (
    CONFIDENCE,
    classifier_labels,
    columns,
    independent,
    is_cross_encoder,
    joined,
    labels_of,
    to_probabilities,
)
from weftline.nodes.contract import Batch, ConfigError, Outputs, StepContext
from weftline.nodes.embed import embedding_width
from weftline.nodes.hugging_face import (
    LANGUAGE_MODEL,
    MASKED_LM,
    NO_HEAD,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    TOKENS_MAX,
    check_tokenizer,
    tokens_limit,
)
from weftline.nodes.ports import Ports, port
from weftline.nodes.text_tokens import SIDES, WINDOWS, Result, check_overflow, too_long
from weftline.nodes.transformers_tasks.task import (
    LABEL_OUTPUTS,
    LABELS_MAX,
    ROWS_MAX,
    TOP_K,
    Model,
    Task,
    TransformersConfig,
    check_hypothesis,
    check_labels,
    check_top_k,
    label_answer,
    label_ports,
    ranked,
)

_NO_LIMIT = 1 << 20
"""Tokens from which on a tokenizer's limit means that it has none."""

WINDOW_OVERLAP = 128
"""Tokens that two windows of a long text share, at most: an answer or an entity is whole in one of them."""


class TextTask(Task):
    """A task whose inputs are prepared by a tokenizer of the fast kind."""

    processor = "AutoTokenizer"

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        tokenizer = model.processor
        if not tokenizer.is_fast:
            raise ModelError(f"{model.shown} has no tokenizer.json")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        positions, own = tokens_limit(model.config, _NO_LIMIT), min(tokenizer.model_max_length, _NO_LIMIT)
        limit = min(positions, own)
        self._tokens_max = TOKENS_MAX if limit == _NO_LIMIT else limit
        tokenizer.truncation_side = "left" if config.overflow == "start" else "right"

    @classmethod
    def check_files(cls, folder: Path, shown: str) -> None:
        check_tokenizer(folder, shown)

    def _encoded(self, texts: Sequence[Any], pairs: Sequence[str] | None = None, **options: Any) -> Any:
        """Return the tokenizer's encoding of texts, or of texts and `pairs`, padded at the end."""
        options = {"truncation": True, "max_length": self._tokens_max, "verbose": False, **options}
        return self.model.processor(
            list(texts),
            None if pairs is None else list(pairs),
            padding=True,
            padding_side="right",
            return_tensors="pt",
            **options,
        )

    def _windows(self, texts: Sequence[str], **options: Any) -> Any:
        """Return the encoding of all of each text: overlapping windows of long ones, owned as they are mapped."""
        return self._encoded(texts, return_overflowing_tokens=True, stride=self._overlap, **options)

    @property
    def _overlap(self) -> int:
        """Number of tokens that two windows of a text share."""
        return min(WINDOW_OVERLAP, self._tokens_max // 4)

    def _of_fitting(
        self, texts: Sequence[str], compute: Callable[[list[str]], Sequence[Result]]
    ) -> list[Result | InputError]:
        """Return the results of `compute` for the texts that fit, by option `overflow`; else their errors."""
        errors = [self._refusal(tokens) for tokens in self._lengths(texts)]
        fitting = [text for text, error in zip(texts, errors, strict=True) if error is None]
        results = iter(compute(fitting) if fitting else ())
        return [next(results) if error is None else error for error in errors]

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, special tokens included."""
        return [len(ids) for ids in self.model.processor(list(texts), verbose=False)["input_ids"]]

    def _refusal(self, tokens: int) -> InputError | None:
        if (self.config.overflow or "error") != "error" or tokens <= self._tokens_max:
            return None
        return too_long(tokens, self._tokens_max)

    def _calls(self, encoded: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the network's output for at most ROWS_MAX rows at a time."""
        named = {name: encoded[name] for name in self.model.processor.model_input_names if name in encoded}
        for start in range(0, len(named["input_ids"]), ROWS_MAX):
            yield self.model({name: rows[start : start + ROWS_MAX] for name, rows in named.items()})


def _is_regression(found: Mapping[str, Any]) -> bool:
    return found.get("problem_type") == "regression"


class TextClassification(TextTask):
    """Labels of a whole text, or the values of a regression.

    Scores are the softmax of the logits, their sigmoid where problem_type is multi_label_classification, and the logits
    themselves where it is regression, as in transformers' own pipeline.
    """

    name = "text-classification"
    auto_class = "AutoModelForSequenceClassification"
    kinds = (SEQUENCE_CLASSIFICATION,)
    expected = "a model that classifies texts (...ForSequenceClassification)"
    options = ("top_k", "overflow")

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        self._labels = labels_of(model.config, model.shown)

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        if not _is_regression(found) or is_cross_encoder(found):
            classifier_labels(dict(found), shown)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        check_top_k(config)
        check_overflow(config.overflow or "error", (*SIDES, WINDOWS))
        if found is None or not _is_regression(found):
            labels = () if found is None else labels_of(found, config.model)
            return Ports((port("text", "text"),), label_ports(labels))
        if config.top_k is not None:
            raise ConfigError("top_k", "the model is a regression, which has no likeliest labels", "", "leave it out")
        about = "the values of the regression: label, score; in the model's order"
        return Ports((port("text", "text"),), (port("scores", "json", about=about),))

    def warm_up(self) -> None:
        self.run(Batch({"text": ["warm-up"]}))

    def run(self, batch: Batch) -> Outputs:
        answers = self._of_fitting(batch["text"], self._answers)
        return columns(answers, ("scores",) if _is_regression(self.model.config) else LABEL_OUTPUTS)

    def _answers(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        encoded = self._windows(texts) if self.config.overflow == WINDOWS else self._encoded(texts)
        rows = np.concatenate([output.logits.float().cpu().numpy() for output in self._calls(encoded)])
        regression, alone = _is_regression(self.model.config), independent(self.model.config)
        rows = rows if regression else to_probabilities(rows, alone)
        if self.config.overflow == WINDOWS:
            rows = joined(rows, encoded["overflow_to_sample_mapping"].tolist(), largest=alone)
        if not regression:
            return [label_answer(ranked(self._labels, row, self.config.top_k or TOP_K)) for row in rows]
        named = [zip(self._labels, row.tolist(), strict=True) for row in rows]
        return [{"scores": [{"label": label, "score": round(value, 6)} for label, value in row]} for row in named]


class FeatureExtraction(TextTask):
    """The states of a text's tokens after the last layer, as transformers' own pipeline returns them.

    Node embed makes one vector of them.
    """

    name = "feature-extraction"
    auto_class = "AutoModel"
    kinds = (NO_HEAD, MASKED_LM, LANGUAGE_MODEL)
    expected = "a model that gives states of tokens (...Model)"
    options = ("overflow",)
    unused = ("pooler.",)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        check_overflow(config.overflow or "error")
        width = embedding_width(None if found is None else dict(found), config.model)
        about = "the state of each token, special tokens included; tokens by numbers"
        return Ports((port("text", "text"),), (port("features", f"float32[T, {width}]", about=about),))

    def warm_up(self) -> None:
        self.run(Batch({"text": ["warm-up"]}))

    def run(self, batch: Batch) -> Outputs:
        return {"features": self._of_fitting(batch["text"], self._features)}

    def _features(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._encoded(texts)
        lengths = encoded["attention_mask"].sum(dim=1).tolist()
        rows = [row for output in self._calls(encoded) for row in output[0].float().cpu().numpy()]
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


AGGREGATIONS = ("none", "simple", "first", "average", "max")


class TokenClassification(TextTask):
    """Labels of tokens, or of the entities that they form.

    A long text has overlapping windows, and each of its tokens counts in the window with the most context around it.
    Aggregation is that of transformers' own pipeline, whose `postprocess` is called with all tokens of a text.
    """

    name = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    kinds = (TOKEN_CLASSIFICATION,)
    expected = "a model that labels tokens (...ForTokenClassification)"
    options = ("aggregation",)

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        import torch
        from transformers.pipelines.token_classification import AggregationStrategy, TokenClassificationPipeline

        super().__init__(config, model)
        self._strategy = AggregationStrategy(config.aggregation or "none")
        self._pipeline = TokenClassificationPipeline(
            model=model.network, tokenizer=model.processor, device=torch.device(model.device)
        )

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        labels_of(found, shown)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        if config.aggregation is not None and config.aggregation not in AGGREGATIONS:
            raise ConfigError("aggregation", f"{config.aggregation!r:.40}", f"one of {', '.join(AGGREGATIONS)}")
        kind = "entity_group" if (config.aggregation or "none") != "none" else "entity, index"
        about = f"the entities, as transformers lists them: {kind}, score, word, start, end"
        return Ports((port("text", "text"),), (port("entities", "json", about=about),))

    def warm_up(self) -> None:
        self.run(Batch({"text": ["warm-up"]}))

    def run(self, batch: Batch) -> Outputs:
        encoded = self._windows(batch["text"], return_special_tokens_mask=True)
        real = (encoded["special_tokens_mask"] == 0) & (encoded["attention_mask"] == 1)
        rows = [row for output in self._calls(encoded) for row in output.logits.float().cpu()]
        windows: list[list[np.ndarray]] = [[] for _ in range(len(batch))]
        for owner, row, kept in zip(encoded["overflow_to_sample_mapping"].tolist(), rows, real, strict=True):
            windows[owner].append(row[kept].numpy())
        texts = zip(batch["text"], windows, strict=True)
        return {"entities": [self._entities(text, whole_row(own, self._overlap)) for text, own in texts]}

    def _entities(self, text: str, logits: np.ndarray) -> list[dict[str, Any]]:
        """Return the entities of a text. logits: float32 [tokens, labels], without special tokens."""
        import torch

        row: dict[str, Any] = dict(
            self.model.processor(
                [text], return_tensors="pt", return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False
            )
        )
        special = row["special_tokens_mask"][0] == 1
        row["logits"] = torch.zeros((1, len(special), logits.shape[1]))
        row["logits"][0, ~special] = torch.from_numpy(logits)
        found = self._pipeline.postprocess([row | {"sentence": text, "is_last": True}], self._strategy)
        return [_plain(one) for one in found]


def whole_row(windows: Sequence[np.ndarray], overlap: int) -> np.ndarray:
    """Return float32 [tokens, labels] of all tokens of a text, of its windows without special tokens.

    windows: float32 [tokens, labels] each, ascending; each begins `overlap` tokens before the end of the one before. A
             shared token counts in the window whose other end is farther from it.
    """
    parts = []
    for place, window in enumerate(windows):
        first = 0 if place == 0 else overlap - overlap // 2
        last = len(window) if place == len(windows) - 1 else len(window) - overlap // 2
        parts.append(window[first:last])
    return np.concatenate(parts)


def _plain(entity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entity with its score as a number that JSON has."""
    return {**entity, "score": round(float(entity["score"]), 6)}


ANSWER_TOKENS_MAX = 15
"""Most tokens of an answer."""

WINDOW_TOKENS_MAX = 384
"""Most tokens of a question and a part of its context: what such models were trained with."""


class QuestionAnswering(TextTask):
    """The span of a context that answers a question.

    A span's score is the probability of its first token times that of its last, among the context's tokens of one
    window. A long context has overlapping windows, and the best span of any of them is the answer.
    """

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    kinds = (QUESTION_ANSWERING,)
    expected = "a model that marks an answer inside a text (...ForQuestionAnswering)"

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        about = "answer (a part of the context), score, start, end (its characters in the context)"
        return Ports(
            (port("question", "text"), port("context", "text", about="the text that contains the answer")),
            (port("answer", "json", about=about),),
        )

    def warm_up(self) -> None:
        self.run(Batch({"question": ["warm-up"], "context": ["warm-up"]}))

    def run(self, batch: Batch) -> Outputs:
        found: list[Any] = [None] * len(batch)
        asked = [place for place in range(len(batch)) if self._fits(batch["question"][place])]
        for place in set(range(len(batch))) - set(asked):
            found[place] = InputError(f"the question leaves no room for a context in {self._window} tokens")
        if asked:
            contexts = [batch["context"][place] for place in asked]
            best = self._answers([batch["question"][place] for place in asked], contexts)
            for place, context, (score, start, end) in zip(asked, contexts, best, strict=True):
                found[place] = {
                    "answer": context[start:end], "score": round(score, 6), "start": start, "end": end
                }  # fmt: skip
        return {"answer": found}

    @property
    def _window(self) -> int:
        return min(self._tokens_max, WINDOW_TOKENS_MAX)

    def _fits(self, question: str) -> bool:
        """Return True when half of a window is left for the context."""
        return len(self.model.processor(question)["input_ids"]) <= self._window // 2

    def _answers(self, questions: Sequence[str], contexts: Sequence[str]) -> list[tuple[float, int, int]]:
        """Return for each item the score, first and end character of its best span; (0, 0, 0) for an empty context."""
        encoded = self._encoded(
            questions, contexts, truncation="only_second", max_length=self._window,
            stride=min(WINDOW_OVERLAP, self._window // 4), return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        calls = [(one.start_logits.float().cpu(), one.end_logits.float().cpu()) for one in self._calls(encoded)]
        best = [(0.0, 0, 0)] * len(questions)
        rows = [row for starts, ends in calls for row in zip(starts.numpy(), ends.numpy(), strict=True)]
        for place, (starts, ends) in enumerate(rows):
            item, part = int(encoded["overflow_to_sample_mapping"][place]), encoded.sequence_ids(place)
            inside = np.array([token for token, of in enumerate(part) if of == 1], np.int64)
            if not len(inside):
                continue
            score, first, last = _best_span(starts[inside], ends[inside])
            offsets = encoded["offset_mapping"][place]
            span = (score, int(offsets[inside[first]][0]), int(offsets[inside[last]][1]))
            best[item] = max(best[item], span, key=lambda one: one[0])
        return best


def _best_span(starts: np.ndarray, ends: np.ndarray) -> tuple[float, int, int]:
    """Return the score, first and last token of the likeliest span of at most ANSWER_TOKENS_MAX tokens."""
    first, last = to_probabilities(starts[None], False)[0], to_probabilities(ends[None], False)[0]
    scores = np.triu(np.outer(first, last)) - np.triu(np.outer(first, last), ANSWER_TOKENS_MAX)
    place = int(scores.argmax())
    return float(scores.flat[place]), place // len(ends), place % len(ends)


HYPOTHESIS = "This example is {}."


class ZeroShotClassification(TextTask):
    """Labels that are named by the step or the request, scored by a model of natural language inference.

    A long text has overlapping windows, and each label counts in the window that entails it most.
    """

    name = "zero-shot-classification"
    auto_class = "AutoModelForSequenceClassification"
    kinds = (SEQUENCE_CLASSIFICATION,)
    expected = "a model of natural language inference (...ForSequenceClassification with a label 'entailment')"
    options = ("labels", "hypothesis", "multi_label")

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        labels = labels_of(found, shown)
        if _entailment(labels) is None or len(labels) < 2:
            listed = f"{shown} has the labels {', '.join(labels[:5])}{', ...' if len(labels) > 5 else ''}"
            fix = "use node classify for a model with the labels that you want"
            raise ConfigError("model", f"{listed:.200}", "labels of which one starts with 'entail'", fix)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        check_hypothesis(config)
        wired = "labels" in step.wired
        if config.labels is None and not wired:
            raise ConfigError("labels", "there are no labels", "a list of labels", "write labels, or wire input labels")
        if config.labels is not None and wired:
            raise ConfigError("labels", "input labels is wired too", "one of them", "leave the option out")
        if config.labels is not None:
            check_labels(config.labels)
        labels = port("labels", "json", optional=True, about="list of candidate labels, where the option is left out")
        return Ports(
            (port("text", "text"), *([labels] if config.labels is None else [])),
            (
                port("label", "text", about="the likeliest label"),
                CONFIDENCE,
                port("scores", "json", about="all labels with their probabilities: label, score; highest first"),
            ),
        )

    def warm_up(self) -> None:
        self._scores(["warm-up"], [("warm-up",)])

    def run(self, batch: Batch) -> Outputs:
        labels = [self._labels_of_item(one) for one in batch.get("labels", self.config.labels)]
        sound = [place for place, one in enumerate(labels) if not isinstance(one, InputError)]
        found: list[Any] = list(labels)
        if sound:
            named = [cast("tuple[str, ...]", labels[place]) for place in sound]
            scores = self._scores([batch["text"][place] for place in sound], named)
            for place, own, row in zip(sound, named, scores, strict=True):
                found[place] = label_answer(ranked(own, row))
        return columns(found, LABEL_OUTPUTS)

    def _labels_of_item(self, labels: Any) -> tuple[str, ...] | InputError:
        sound = isinstance(labels, list | tuple) and all(isinstance(label, str) and label for label in labels)
        if not sound or not 1 <= len(labels) <= LABELS_MAX:
            return InputError(f"labels is no list of 1 to {LABELS_MAX} texts")
        lengths = self._lengths([self._hypothesis(label) for label in labels])
        if max(lengths) > self._tokens_max // 2:
            longest = f"{labels[int(np.argmax(lengths))]!r:.60} has {max(lengths)} tokens"
            return InputError(f"labels: {longest} and leaves no room for a text in {self._tokens_max}; shorten it")
        return tuple(labels)

    def _hypothesis(self, label: str) -> str:
        return (self.config.hypothesis or HYPOTHESIS).format(label)

    def _scores(self, texts: Sequence[str], labels: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return float32 [labels] for each text: each window of a text with each label's hypothesis is one row."""
        premises = [text for text, own in zip(texts, labels, strict=True) for _ in own]
        hypotheses = [self._hypothesis(label) for own in labels for label in own]
        encoded = self._encoded(
            premises, hypotheses, truncation="only_first", stride=min(WINDOW_OVERLAP, self._tokens_max // 8),
            return_overflowing_tokens=True,
        )  # fmt: skip
        logits = np.concatenate([output.logits.float().cpu().numpy() for output in self._calls(encoded)])
        entails = cast(int, _entailment(labels_of(self.model.config, self.model.shown)))
        against = -1 if entails == 0 else 0  # the class that contradicts, as in transformers
        owner = encoded["overflow_to_sample_mapping"].tolist()
        values = np.stack([logits[:, entails], logits[:, entails] - logits[:, against]], axis=1)
        rows = np.split(joined(values, owner, largest=True), np.cumsum([len(own) for own in labels])[:-1])
        return [self._probabilities(row) for row in rows]

    def _probabilities(self, values: np.ndarray) -> np.ndarray:
        """Return float32 [labels] of float32 [labels, 2]: the logit of entailment, and that less contradiction's."""
        if not self.config.multi_label and len(values) > 1:
            found: np.ndarray = to_probabilities(values[None, :, 0], False)[0]
            return found
        found = to_probabilities(values[:, 1], True)
        return found


def _entailment(labels: Sequence[str]) -> int | None:
    """Return the place of the label that means entailment."""
    return next((place for place, label in enumerate(labels) if label.lower().startswith("entail")), None)
