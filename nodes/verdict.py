"""Guardrail verdict: allow, replace or block, with reasons.

Pure: text and scores in, verdict out. A policy names categories. A category is violated when one of its rules finds
something, or when the classifier's score for the label of that name reaches the threshold. Nothing of what was found is
repeated in a verdict: it may be logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.nodes.rules import Hit, Rule, find

ON_VIOLATION = ("replace", "block", "allow")


@dataclass(frozen=True, slots=True)
class Policy:
    """Actions by category.

    block:        categories that are not let through.
    redact:       categories of which only the found places are replaced, by the category's name in brackets.
    on_violation: 'replace' a text that violates `block` by `message`, 'block' it (it becomes empty), or 'allow' it and
                  only say so in the verdict.
    message:      what replaces a text.
    threshold:    least score of the classifier that counts, 0 to 1.
    """

    block: frozenset[str]
    redact: frozenset[str] = frozenset()
    on_violation: str = "replace"
    message: str = "I cannot share that."
    threshold: float = 0.5


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a text is not allowed as it is: a rule that found something at a place, or a classifier's score."""

    category: str
    rule: str = ""
    start: int = 0
    end: int = 0
    score: float | None = None

    def to_json(self) -> dict[str, Any]:
        if self.score is not None:
            return {"category": self.category, "by": "classifier", "score": round(self.score, 4)}
        return {"category": self.category, "by": "rule", "rule": self.rule, "start": self.start, "end": self.end}


@dataclass(frozen=True, slots=True)
class Verdict:
    """action: allow, replace or block. text: what is passed on. reasons: why, rules first. scores: by label."""

    action: str
    text: str
    reasons: tuple[Reason, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        scores = {label: round(score, 4) for label, score in self.scores.items()}
        return {"action": self.action, "reasons": [reason.to_json() for reason in self.reasons], "scores": scores}


def judge(text: str, policy: Policy, rules: Sequence[Rule], scores: Mapping[str, float]) -> Verdict:
    """Return the verdict on `text`; `scores` are a classifier's probabilities by label, empty without one."""
    watched = policy.block | policy.redact
    hits = find([rule for rule in rules if rule.category in watched], text)
    reasons = [Reason(hit.category, hit.rule, hit.start, hit.end) for hit in hits]
    reasons += [
        Reason(label, score=score)
        for label, score in sorted(scores.items())
        if label in watched and score >= policy.threshold
    ]
    violated = any(reason.category in policy.block for reason in reasons)
    # A classifier cannot say where: a category to redact that only it found is replaced whole.
    unplaced = any(reason.score is not None for reason in reasons)
    found = tuple(reasons)
    if violated and policy.on_violation == "block":
        return Verdict("block", "", found, scores)
    if (violated and policy.on_violation == "replace") or (unplaced and policy.on_violation != "allow"):
        return Verdict("replace", policy.message, found, scores)
    redacted = [hit for hit in hits if hit.category in policy.redact]
    if redacted:
        return Verdict("replace", redact(text, redacted), found, scores)
    return Verdict("allow", text, found, scores)


def redact(text: str, hits: Sequence[Hit]) -> str:
    """Return `text` with every hit replaced by its category in brackets; overlapping hits become one."""
    pieces: list[str] = []
    at = 0
    for hit in sorted(hits, key=lambda hit: (hit.start, -hit.end)):
        if hit.start >= at:
            pieces += [text[at : hit.start], f"[{hit.category}]"]
        at = max(at, hit.end)
    return "".join([*pieces, text[at:]])
