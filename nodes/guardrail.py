"""A guardrail as a step: rules and an optional classifier decide whether a text is passed on, replaced or blocked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from weftline.errors import StepError
from weftline.nodes.contract import Batch, BatchNode, ConfigError, OpenContext, Outputs, StepContext
from weftline.nodes.ports import Ports, port
from weftline.nodes.rules import BUILT_IN, Rule, user_rules
from weftline.nodes.text_classifier import TextClassifier, check_classifier, open_classifier
from weftline.nodes.verdict import ON_VIOLATION, Policy, judge

SAFE = "safe"
"""The classifier's label for texts that are fine; never a category of its own."""

WINDOWS_MAX = 4_096
"""Windows in which the classifier reads a long text: enough for `chars_max`, so that nothing hides at its end."""

RULES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class GuardrailConfig:
    """Options of `guardrail`.

    policy:     {block: [categories], redact: [categories], on_violation: replace | block | allow, message: text}.
                Categories are the built-in rule sets `secrets` and `personal`, the names under `rules`, and the labels
                of the classifier; without `block` and `redact`, all of them block.
    rules:      rules of your own, {category: {words: [...], patterns: [...]}}. Words match whole and in any case;
                patterns are regular expressions with bounded repeats. They add to a built-in category of that name.
    classifier: a text classification model, as for node `classify`; empty for none.
    threshold:  least probability of the classifier that counts.
    chars_max:  longest text that is judged; a longer one fails its request, unjudged text is never passed on.
    """

    policy: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    classifier: str = ""
    threshold: float = 0.5
    chars_max: int = 100_000


class Guardrail(BatchNode):
    """Judges texts: allow, replace or block, with reasons."""

    Config: ClassVar[type[Any]] = GuardrailConfig
    batch_default: ClassVar[tuple[int, float]] = (16, 1.0)

    _classifier: TextClassifier | None = None
    _policy: Policy
    _rules: list[Rule]

    @classmethod
    def ports(cls, config: GuardrailConfig, step: StepContext) -> Ports:
        labels: tuple[str, ...] | None = ()
        if config.classifier:
            labels = check_classifier(config.classifier, step.base_dir, "classifier")
        read_policy(config, labels)
        return Ports(
            inputs=(port("text", "text", about="the text to judge"),),
            outputs=(
                port("text", "text", about="the text, or what replaces it; empty when it is blocked"),
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
            self._classifier.probabilities(["a text to begin with"])

    def run(self, batch: Batch) -> Outputs:
        limit = self.config.chars_max
        texts = batch["text"]
        short = [text for text in texts if len(text) <= limit]
        verdicts = iter(self._judge(short))
        answers: list[Any] = [next(verdicts) if len(text) <= limit else _too_long(text, limit) for text in texts]
        return {
            "text": [answer if isinstance(answer, StepError) else answer.text for answer in answers],
            "verdict": [answer if isinstance(answer, StepError) else answer.to_json() for answer in answers],
        }

    def close(self) -> None:
        self._classifier = None

    def _judge(self, texts: list[str]) -> list[Any]:
        scores: list[dict[str, float]] = [{} for _ in texts]
        if self._classifier and texts:
            found = self._classifier.probabilities(texts, WINDOWS_MAX)
            scores = [dict(zip(self._classifier.labels, map(float, row), strict=True)) for row in found]
        return [judge(text, self._policy, self._rules, row) for text, row in zip(texts, scores, strict=True)]


def _too_long(text: str, limit: int) -> StepError:
    return StepError(f"a text of {len(text)} characters; chars_max is {limit}")


def read_policy(config: GuardrailConfig, labels: tuple[str, ...] | None) -> tuple[Policy, list[Rule]]:
    """Return the policy and rules that `config` states; ConfigError says what is wrong.

    labels: the classifier's, or None while they are not known; categories are then not compared with them.
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
