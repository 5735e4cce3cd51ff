"""Guardrail verdicts: allow, replace or block, for whole texts (`judge`) and for streamed texts (`HoldBack`).

Pure: text and scores in, verdict out. A policy names categories. A category is violated when one of its rules matches,
or when the classifier's score for the label of that name reaches the threshold. A verdict does not repeat the text
found, because verdicts may be logged.

    chunks arrive     add("... my card is 41"), add("11 1111 ...")
    text is released  take_released() -> "... my card is ", up to the position where further text can change a match
    a violation       `ended` is set: released text stays, the rest is replaced by the message or dropped

Released text cannot be recalled. Text that may still become a match is therefore held back, with all that follows it:
at least the last `window_chars` characters, and a run of characters without spaces until it ends. With a classifier, a
character is released once it was in a classified text, with the window behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.nodes.guardrail_rules import Hit, Rule, RuleScan, find

ON_VIOLATION = ("replace", "block", "allow")


@dataclass(frozen=True, slots=True)
class Policy:
    """Actions by category.

    block:        categories that are not allowed.
    redact:       categories whose matches are replaced by the category's name in brackets.
    on_violation: 'replace' a text that violates `block` by `message`, 'block' it (it becomes empty), or 'allow' it and
                  only report it in the verdict.
    message:      replacement of a text.
    threshold:    minimum score of the classifier, 0 to 1.
    """

    block: frozenset[str]
    redact: frozenset[str] = frozenset()
    on_violation: str = "replace"
    message: str = "I cannot share that."
    threshold: float = 0.5


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason of a verdict: the match of a rule, or a classifier's score."""

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
    """Verdict: action (allow, replace or block), the text to pass on, reasons (rules first), scores by label."""

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
    # A classifier gives no position: a category to redact that only it reports replaces the whole text.
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


CONTEXT_CHARS = 1_000
"""Characters before the window and the new text that the classifier also reads."""

SCAN_SHARE = 8
"""Pending text is scanned again when it has grown by 1/8: long runs then cost no more than other text."""


class HoldBack:
    """Hold-back window of one streamed text. Pure.

    window_chars: characters that are held back at least while more may follow.
    judge_every_chars: new characters after which the classifier runs again; 0: no classifier.
    """

    def __init__(self, policy: Policy, rules: Sequence[Rule], window_chars: int, judge_every_chars: int) -> None:
        watched = policy.block | policy.redact
        self._policy = policy
        self._scan = RuleScan([rule for rule in rules if rule.category in watched])
        self._window = window_chars
        self._every = judge_every_chars
        self._text = ""
        self._unseen = ""  # not matched against the rules yet
        self._whole = False
        self._hits: list[tuple[int, Hit]] = []  # settled, and not processed yet
        self._at = 0  # end of the released or replaced text
        self._classified_to = 0  # end of the classified text
        self._out: list[str] = []
        self._returned = 0  # how many of them were returned
        self._stop = ""  # action that follows from the classifier's scores
        self._reasons: list[Reason] = []
        self._scores: dict[str, float] = {}
        self._changed = False
        self.ended: Verdict | None = None

    @property
    def chars(self) -> int:
        """Length of the text so far, in characters."""
        return len(self._text)

    @property
    def text(self) -> str:
        """The text so far, unchanged."""
        return self._text

    def add(self, piece: str) -> None:
        """Append new text."""
        self._text += piece
        self._unseen += piece

    def complete(self) -> None:
        """Mark the text as complete."""
        self._whole = True

    def text_to_classify(self) -> str | None:
        """Return the text to classify now; None if there is none."""
        new = len(self._text) - self._classified_to
        if (
            not self._every
            or self.ended
            or not (new >= self._every or (self._whole and (new or not self._classified_to)))
        ):
            return None
        return self._text[max(0, self._classified_to - self._window - CONTEXT_CHARS) :]

    def record_scores(self, scores: Mapping[str, float]) -> None:
        """Record the classifier's probabilities by label for the text that `text_to_classify` returned."""
        self._classified_to = len(self._text)
        watched = self._policy.block | self._policy.redact
        for label, score in scores.items():
            self._scores[label] = max(score, self._scores.get(label, 0.0))
        least, known = self._policy.threshold, {reason.category for reason in self._reasons}
        over = [(label, score) for label, score in sorted(scores.items()) if label in watched and score >= least]
        self._reasons += [Reason(label, score=score) for label, score in over if label not in known]
        if over and self._policy.on_violation != "allow":
            blocked = any(label in self._policy.block for label, _ in over)
            # A classifier gives no position: a category to redact replaces the whole text.
            self._stop = self._policy.on_violation if blocked else "replace"

    def take_released(self) -> str:
        """Return newly released text; sets `ended` on a violation or when the complete text was released."""
        grown = len(self._unseen) * SCAN_SHARE >= len(self._text) - self._at - 2 * self._window
        if self.ended is None and (grown or self._whole or self._stop):
            self._go_on()
        out, self._returned = "".join(self._out[self._returned :]), len(self._out)
        return out

    def _go_on(self) -> None:
        unseen, self._unseen = self._unseen, ""
        self._hits = sorted([*self._hits, *self._scan.add(unseen, self._whole)], key=lambda one: (one[0], -one[1].end))
        if self._stop:
            self._reasons += [_reason(hit) for _, hit in self._hits]
            blocked = any(hit.category in self._policy.block for _, hit in self._hits)
            self._end(self._policy.on_violation if blocked else self._stop)
            return
        limit = self._limit()
        self._pass(limit)
        if self.ended is None:
            self._release(self._scan.place(limit))
            if self._whole:
                self._end("replace" if self._changed else "allow", stopped=False)

    def _limit(self) -> int:
        """Return the end of the text that may be released, by rules and window, in the folded text."""
        if self._whole:
            return self._scan.length
        limit = min(self._scan.settled, self._scan.length - self._window)
        if self._every:
            limit = min(limit, self._scan.index(self._classified_to) - self._window)
        return max(limit, 0)

    def _pass(self, limit: int) -> None:
        """Process every hit before `limit`, in order; a blocked one ends the text there."""
        while self._hits and self._hits[0][0] < limit and self.ended is None:
            _, hit = self._hits.pop(0)
            self._reasons.append(_reason(hit))
            if hit.category in self._policy.block and self._policy.on_violation != "allow":
                self._release(hit.start)
                self._end(self._policy.on_violation)
            elif hit.category in self._policy.redact:
                if hit.start >= self._at:
                    self._release(hit.start)
                    self._out.append(f"[{hit.category}]")
                    self._changed = True
                self._at = max(self._at, hit.end)

    def _release(self, upto: int) -> None:
        if upto > self._at:
            self._out.append(self._text[self._at : upto])
            self._at = upto

    def _end(self, action: str, stopped: bool = True) -> None:
        if stopped and action == "replace":
            self._out.append(self._policy.message)
        reasons = sorted(self._reasons, key=lambda one: (one.score is not None, one.start, one.end))
        self.ended = Verdict(action, "".join(self._out), tuple(reasons), self._scores)

    @property
    def released_chars(self) -> int:
        """Number of released or redacted characters."""
        return self._at


def _reason(hit: Hit) -> Reason:
    return Reason(hit.category, hit.rule, hit.start, hit.end)
