"""Guardrail node: allows, replaces or blocks text by rules and an optional classifier.

Whole texts are judged in batches. Streamed text is judged as it arrives and released in chunks (`HoldBack`). On a
violation with `replace` or `block` the step ends. Its source is cancelled unless an output or another step reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from weftline.node import (
    USUAL,
    Batch,
    BatchNode,
    ConfigError,
    OpenContext,
    Outputs,
    Piece,
    Ports,
    StepContext,
    StepError,
    StreamNode,
    Urgency,
    port,
)
from weftline.nodes.classify import TextClassifier, check_classifier, is_onnx, open_classifier
from weftline.nodes.guardrail_rules import BUILT_IN, Rule, user_rules
from weftline.nodes.guardrail_verdict import ON_VIOLATION, HoldBack, Policy, judge

SAFE = "safe"
"""The classifier's label for harmless texts; it is not a category."""

RULES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class GuardrailConfig:
    """Options of `guardrail`.

    policy:     {block: [categories], redact: [categories], on_violation: replace | block | allow, message: text}.
                Categories are the built-in rule sets `secrets` and `personal`, the names under `rules`, and the labels
                of the classifier; without `block` and `redact`, all of them block.
    rules:      user-defined rules, {category: {words: [...], patterns: [...]}}. Words match whole and in any case;
                patterns are regular expressions with bounded repeats. They extend a built-in category of that name.
    classifier: a text classification model, as for node `classify`; empty for none.
    threshold:  least probability of the classifier that counts.
    chars_max:  longest text, in characters; a longer one fails its request, since unjudged text is never released.
    window_chars: characters of a streamed text that are held back while more may follow. Text that may still become a
                match is held back longer: up to the longest reach of a rule, or the current run of ASCII characters
                without spaces.
    judge_every_chars: new characters of a streamed text after which the classifier runs again; it also runs at the end.
                Its input is the new text with at least 1 000 characters before it.
    """

    policy: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    classifier: str = ""
    threshold: float = 0.5
    chars_max: int = 100_000
    window_chars: int = 200
    judge_every_chars: int = 200


class Guardrail(BatchNode, StreamNode):
    """Judges texts: allow, replace or block, with reasons."""

    Config: ClassVar[type[Any]] = GuardrailConfig
    batch_default: ClassVar[tuple[int, float]] = (16, 1.0)

    _classifier: TextClassifier | None = None
    _policy: Policy
    _rules: list[Rule]

    def __init__(self, config: GuardrailConfig) -> None:
        super().__init__(config)
        self._held: dict[int, HoldBack] = {}
        self._news: dict[int, None] = {}  # items with new text, in order
        self._paused: set[int] = set()
        self._anew: set[int] = set()  # items whose final text differs from the chunks: only the end counts

    @classmethod
    def ports(cls, config: GuardrailConfig, step: StepContext) -> Ports:
        labels: tuple[str, ...] | None = ()
        if config.classifier:
            labels = check_classifier(config.classifier, step.base_dir, "classifier")
        read_policy(config, labels)
        return Ports(
            inputs=(port("text", "text", pieces=True, about="the text to judge"),),
            outputs=(
                port("text", "text", pieces=True, about="the text or its replacement; empty when it is blocked"),
                port("verdict", "json", about="action (allow, replace, block), reasons, scores"),
            ),
        )

    def open(self, context: OpenContext) -> None:
        if self.config.classifier:
            self._classifier = open_classifier(self.config.classifier, context)
        labels = self._classifier.labels if self._classifier else ()
        self._policy, self._rules = read_policy(self.config, labels)

    def warm_up(self) -> None:
        if self._classifier:
            self._classifier.largest(["warm-up"])

    def run(self, batch: Batch) -> Outputs:
        limit = self.config.chars_max
        texts = batch["text"]
        short = [text for text in texts if len(text) <= limit]
        verdicts = iter(self._judge(short))
        answers: list[Any] = [next(verdicts) if len(text) <= limit else _too_long(len(text), limit) for text in texts]
        return {
            "text": [answer if isinstance(answer, StepError) else answer.text for answer in answers],
            "verdict": [answer if isinstance(answer, StepError) else answer.to_json() for answer in answers],
        }

    # streamed text

    def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
        self._held[item] = self._hold_back()

    def feed(self, item: int, port: str, piece: Any, last: bool) -> None:
        held = self._held[item]
        if last and not piece.startswith(held.text):  # the final value differs from the chunks and counts
            held = self._held[item] = self._hold_back()
            self._anew.add(item)
        held.add(piece[len(held.text) :] if last else piece)
        if last:
            held.complete()
        self._news[item] = None

    def cancel(self, item: int) -> None:
        self._held.pop(item, None)
        self._news.pop(item, None)
        self._paused.discard(item)
        self._anew.discard(item)

    def pause(self, item: int) -> None:
        if item in self._held:
            self._paused.add(item)

    def resume(self, item: int) -> None:
        self._paused.discard(item)

    @property
    def busy(self) -> bool:
        return any(item not in self._paused for item in self._news)

    def round(self) -> Sequence[Piece]:
        due = [item for item in self._news if item not in self._paused]
        limit = self.config.chars_max
        self._classify([self._held[item] for item in due if self._held[item].chars <= limit])
        pieces: list[Piece] = []
        for item in due:
            del self._news[item]
            held = self._held[item]
            if held.chars > limit:
                pieces.append(Piece(item, last=True, error=_too_long(held.chars, limit)))
                self.cancel(item)
                continue
            text = held.take_released()
            if text and item not in self._anew:
                pieces.append(Piece(item, {"text": text}))
            if held.ended is not None:
                verdict = held.ended.to_json() | {"released_chars": held.released_chars}
                pieces.append(Piece(item, {"text": held.ended.text, "verdict": verdict}, last=True))
                self.cancel(item)
        return pieces

    def _hold_back(self) -> HoldBack:
        every = self.config.judge_every_chars if self._classifier else 0
        return HoldBack(self._policy, self._rules, self.config.window_chars, every)

    def _classify(self, texts: Sequence[HoldBack]) -> None:
        """Run the classifier once on all texts that are due."""
        due = [(held, text) for held in texts if (text := held.text_to_classify()) is not None]
        for (held, _), scores in zip(due, self._scores([text for _, text in due]), strict=True):
            held.record_scores(scores)

    @classmethod
    def can_rest(cls, config: GuardrailConfig, step: StepContext) -> bool:
        return not config.classifier or not is_onnx(config.classifier, step.base_dir)

    def sleep(self, keep: str) -> bool:
        return self._classifier is None or self._classifier.sleep(keep)

    def wake(self) -> None:
        if self._classifier:
            self._classifier.wake()

    def close(self) -> None:
        self._classifier = None

    def _judge(self, texts: list[str]) -> list[Any]:
        rows = self._scores(texts)
        return [judge(text, self._policy, self._rules, row) for text, row in zip(texts, rows, strict=True)]

    def _scores(self, texts: list[str]) -> list[dict[str, float]]:
        """Return the classifier's probabilities by label for all of each text; empty without a classifier."""
        if not self._classifier or not texts:
            return [{} for _ in texts]
        found = self._classifier.largest(texts)
        return [dict(zip(self._classifier.labels, map(float, row), strict=True)) for row in found]


def _too_long(chars: int, limit: int) -> StepError:
    return StepError(f"a text of {chars} characters; chars_max is {limit}")


def read_policy(config: GuardrailConfig, labels: tuple[str, ...] | None) -> tuple[Policy, list[Rule]]:
    """Return the policy and rules of `config`; raise ConfigError when invalid.

    labels: the classifier's, or None while unknown; categories are then not compared with them.
    """
    rules = [rule for built_in in BUILT_IN.values() for rule in built_in] + _user_rules(config.rules)
    known = {rule.category for rule in rules} | {*config.rules} | {*(labels or ())} - {SAFE}
    unknown_keys = sorted(set(config.policy) - {"block", "redact", "on_violation", "message"})
    if unknown_keys:
        expected = "block, redact, on_violation, message"
        raise ConfigError(f"policy.{unknown_keys[0]}", "unknown key", expected)
    block, redact = _categories(config, "block"), _categories(config, "redact")
    if labels is not None:
        for key, wanted in (("block", block), ("redact", redact)):
            strange = sorted((wanted or frozenset()) - known)
            if strange:
                found = f"no rule or label is named {strange[0]}"
                raise ConfigError(f"policy.{key}", found, f"of {', '.join(sorted(known))}")
    action = config.policy.get("on_violation", "replace")
    if action not in ON_VIOLATION:
        raise ConfigError("policy.on_violation", f"{action!r:.40}", ", ".join(ON_VIOLATION))
    message = config.policy.get("message", Policy(frozenset()).message)
    if not isinstance(message, str):
        raise ConfigError("policy.message", f"a {type(message).__name__}", "a text")
    for option in ("window_chars", "judge_every_chars"):
        if getattr(config, option) < 1:
            raise ConfigError(option, f"{getattr(config, option)}", "a number of characters from 1")
    if not 0 < config.threshold <= 1:
        raise ConfigError("threshold", f"{config.threshold}", "above 0, up to 1")
    if block is None:
        block = frozenset() if redact else frozenset(known)
    return Policy(block, redact or frozenset(), action, message, config.threshold), rules


def _categories(config: GuardrailConfig, key: str) -> frozenset[str] | None:
    listed = config.policy.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        expected = "a list of categories, such as [secrets, personal]"
        raise ConfigError(f"policy.{key}", f"a {type(listed).__name__}", expected)
    return frozenset(listed)


def _user_rules(written: Mapping[str, Any]) -> list[Rule]:
    found: list[Rule] = []
    for category, stated in written.items():
        if not isinstance(stated, Mapping) or not stated or set(stated) - {"words", "patterns"}:
            raise ConfigError(f"rules.{category}", "no rules", "{words: [...], patterns: [...]}")
        for key, values in stated.items():
            if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
                raise ConfigError(f"rules.{category}.{key}", "no list of texts", "a list of texts")
        try:
            found += user_rules(category, stated.get("words", ()), stated.get("patterns", ()))
        except ValueError as error:
            raise ConfigError(f"rules.{category}.patterns", str(error)) from None
    if len(found) > RULES_MAX:
        raise ConfigError("rules", f"{len(found)} rules", f"at most {RULES_MAX}")
    return found
