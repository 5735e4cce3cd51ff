"""Hold-back window of a streaming guardrail: the text that may be released, and early stop.

    pieces come     add("... my card is 41"), add("11 1111 ...")
    some may leave  released() -> "... my card is ", up to where nothing that follows can change what the rules find
    it turns bad    `ended` is set: what has left stays, the rest is replaced by the message, or nothing follows

What has left is never taken back, so whatever a rule could still find is held back with all that comes after it: the
last `window_chars` characters at least, and a run of characters without spaces until it ends. A classifier sees more
than the window: a character leaves when it was in a text that the classifier was given, with the window behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weftline.nodes.rule_scan import RuleScan
from weftline.nodes.rules import Hit, Rule
from weftline.nodes.verdict import Policy, Reason, Verdict

CONTEXT_CHARS = 1_000
"""Characters that a classifier is given before the window and what is new."""

SCAN_SHARE = 8
"""What is pending is looked at again when it has grown by this part of it: so long runs cost no more than texts do."""


class HoldBack:
    """One text on its way through a guardrail. Pure.

    window_chars: least number of characters that are held back while more may come.
    judge_every_chars: how much must be new before a classifier is asked again; 0: there is none.
    """

    def __init__(self, policy: Policy, rules: Sequence[Rule], window_chars: int, judge_every_chars: int) -> None:
        watched = policy.block | policy.redact
        self._policy = policy
        self._scan = RuleScan([rule for rule in rules if rule.category in watched])
        self._window = window_chars
        self._every = judge_every_chars
        self._text = ""
        self._unseen = ""  # not given to the rules yet
        self._whole = False
        self._hits: list[tuple[int, Hit]] = []  # settled, and not passed yet
        self._at = 0  # up to where the text was let out, or replaced
        self._judged = 0  # up to where the classifier has seen it
        self._out: list[str] = []
        self._told = 0  # how many of them have been told
        self._stop = ""  # what the classifier's answer leads to
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
        """The text so far, as it came."""
        return self._text

    def add(self, piece: str) -> None:
        """Append new text."""
        self._text += piece
        self._unseen += piece

    def complete(self) -> None:
        """Nothing follows."""
        self._whole = True

    def to_judge(self) -> str | None:
        """Return the text a classifier must be asked about now; None when there is nothing to ask."""
        new = len(self._text) - self._judged
        if not self._every or self.ended or not (new >= self._every or (self._whole and (new or not self._judged))):
            return None
        return self._text[max(0, self._judged - self._window - CONTEXT_CHARS) :]

    def judged(self, scores: Mapping[str, float]) -> None:
        """Record the classifier's probabilities by label for the text that `to_judge` returned."""
        self._judged = len(self._text)
        watched = self._policy.block | self._policy.redact
        for label, score in scores.items():
            self._scores[label] = max(score, self._scores.get(label, 0.0))
        least, known = self._policy.threshold, {reason.category for reason in self._reasons}
        over = [(label, score) for label, score in sorted(scores.items()) if label in watched and score >= least]
        self._reasons += [Reason(label, score=score) for label, score in over if label not in known]
        if over and self._policy.on_violation != "allow":
            blocked = any(label in self._policy.block for label, _ in over)
            # A classifier cannot say where: what it would have redacted is replaced whole.
            self._stop = self._policy.on_violation if blocked else "replace"

    def released(self) -> str:
        """Return what may leave now; sets `ended` when the rest must not, or when all of a whole text has left."""
        grown = len(self._unseen) * SCAN_SHARE >= len(self._text) - self._at - 2 * self._window
        if self.ended is None and (grown or self._whole or self._stop):
            self._go_on()
        out, self._told = "".join(self._out[self._told :]), len(self._out)
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
            self._let_out(self._scan.place(limit))
            if self._whole:
                self._end("replace" if self._changed else "allow", stopped=False)

    def _limit(self) -> int:
        """Return up to where the text may leave, by the rules and by the window, in the folded text."""
        if self._whole:
            return self._scan.length
        limit = min(self._scan.settled, self._scan.length - self._window)
        if self._every:
            limit = min(limit, self._scan.index(self._judged) - self._window)
        return max(limit, 0)

    def _pass(self, limit: int) -> None:
        """Deal with every hit before `limit`, in order; one that is blocked ends the text there."""
        while self._hits and self._hits[0][0] < limit and self.ended is None:
            _, hit = self._hits.pop(0)
            self._reasons.append(_reason(hit))
            if hit.category in self._policy.block and self._policy.on_violation != "allow":
                self._let_out(hit.start)
                self._end(self._policy.on_violation)
            elif hit.category in self._policy.redact:
                if hit.start >= self._at:
                    self._let_out(hit.start)
                    self._out.append(f"[{hit.category}]")
                    self._changed = True
                self._at = max(self._at, hit.end)

    def _let_out(self, upto: int) -> None:
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
