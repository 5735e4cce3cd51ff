"""What the engine is asked for, and how far it is.

`SamplingParams` says how one request's tokens are chosen and when it ends; it is valid once constructed, so nothing
later has to check a number somebody sent. A `Sequence` is one request inside the engine. Its whole progress is two
numbers: how many tokens are *known* (prompt and answer so far) and for how many of them keys and values are
*computed*; a round hands out the difference.

    event     join                preempt              finish, cancel, fail
              waiting -> running  running -> waiting   -> finished, cancelled, failed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weftline.engine.llm.pages import PageTable
from weftline.errors import InputError
from weftline.nodes.urgency import PATIENCE_MS, PRIORITY_STEP_MS

TOKENS_LIMIT = 1 << 20
"""Most tokens one answer may be allowed, far above any model's context."""
STOPS_MAX = 32
"""Most stop strings, and most stop tokens, of one request; every new piece of text is searched for each of them."""
STOP_CHARS_MAX = 256
"""Longest stop string, in characters: as much text may be held back from a stream."""
PENALTY_MAX = 10.0
"""Largest presence or frequency penalty, either sign; published APIs stop at 2."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are chosen, and when it ends. InputError names the field that is out of range."""

    tokens_max: int = 128
    """Most tokens of the answer; it also ends where the model's context does."""
    temperature: float = 0.0
    """0 always takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 is off."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together reach this probability; 1 is off."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt or answer (multiplies negative ones); 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as it stands in the answer."""
    seed: int | None = None
    """The same seed gives the same answer, whatever else is in the batch; None draws anew."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own; they are not part of its text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text token until `tokens_max`."""
    tokens_min: int = 0
    """End-of-text and stop tokens cannot be drawn before the answer has this many tokens."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, list | tuple):
                raise InputError(f"sampling.{name}: found {type(value).__name__}, expected a list")
            if len(value) > STOPS_MAX:
                raise InputError(f"sampling.{name}: found a list of {len(value)}, expected at most {STOPS_MAX} entries")
            object.__setattr__(self, name, tuple(value))
        _check_int("tokens_max", self.tokens_max, 1, TOKENS_LIMIT)
        _check_int("tokens_min", self.tokens_min, 0, self.tokens_max)
        _check_int("top_k", self.top_k, 0, 1 << 31)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, (1 << 63) - 1)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 1e-6, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
        _check_float("frequency_penalty", self.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"sampling.ignore_eos: found {self.ignore_eos!r:.40}, expected true or false")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= STOP_CHARS_MAX:
                found = _shown(text)
                raise InputError(f"sampling.stop: found {found}, expected texts of 1 to {STOP_CHARS_MAX} characters")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, (1 << 31) - 1)

    @classmethod
    def read(cls, values: object, defaults: SamplingParams | None = None) -> SamplingParams:
        """Return `defaults` with the keys of the JSON object `values` changed; unknown keys are refused."""
        known = [item.name for item in fields(cls)]
        if not isinstance(values, Mapping):
            found = type(values).__name__
            raise InputError(f"sampling: found {found}, expected an object with keys {', '.join(known)}")
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key)[:40], known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
                raise InputError(f"sampling.{key!s:.40}: unknown key; {hint}")
        return replace(defaults or cls(), **dict(values))


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"sampling.{name}: found {_shown(value)}, expected a whole number from {low} to {high}")


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    # Not a single comparison holds for NaN, and Python compares whole numbers of any size.
    if type(value) not in (int, float) or not low <= value <= high:
        raise InputError(f"sampling.{name}: found {_shown(value)}, expected a number from {low:g} to {high:g}")


def _shown(value: object) -> str:
    """Return the value as an error shows it; Python refuses to write out whole numbers of many thousand digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)[:40]


MOVES: dict[tuple[str, str], str] = {
    ("waiting", "join"): "running",
    ("running", "preempt"): "waiting",
    ("running", "finish"): "finished",
    ("waiting", "cancel"): "cancelled",
    ("running", "cancel"): "cancelled",
    ("waiting", "fail"): "failed",
    ("running", "fail"): "failed",
}
"""A sequence's life: (state, event) to state. finished, cancelled and failed have no way out and hold no pages."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine; the schedule owns it and alone changes it.

    tokens:    known token ids, the prompt first.
    prompt:    how many of them are the prompt.
    limit:     most known tokens it may reach: prompt and answer, within the context and the pool.
    order:     when it arrived, as a count; the lower of two goes first when they are equally urgent.
    priority:  the higher goes first.
    salt:      whose cached prefixes it may share.
    arrived_ms, deadline_ms: on the clock of whoever plans rounds; no deadline is None.
    paused:    its reader is slow; it is given no tokens.
    due_ms:    how urgent it is, the lower goes first. It never changes, and whoever comes late enough comes after it
               whatever its priority, so everybody's turn comes.
    computed:  how many tokens have keys and values in pages.
    cached:    how many of those came from the prefix cache when it first joined.
    hashes:    chained hash of each full page of known tokens, as far as they were needed.
    """

    id: int
    tokens: list[int]
    prompt: int
    limit: int
    params: SamplingParams
    order: int
    priority: int = 0
    salt: bytes = b""
    arrived_ms: float = 0.0
    deadline_ms: float | None = None
    paused: bool = False
    state: str = "waiting"
    computed: int = 0
    cached: int = 0
    preemptions: int = 0
    table: PageTable = field(default_factory=PageTable)
    hashes: list[bytes] = field(default_factory=list)
    due_ms: float = field(init=False)

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def answer(self) -> SequenceOf[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt :]

    def __post_init__(self) -> None:
        patient_ms = self.arrived_ms + PATIENCE_MS
        due_ms = patient_ms if self.deadline_ms is None else min(self.deadline_ms, patient_ms)
        self.due_ms = due_ms - self.priority * PRIORITY_STEP_MS

    @property
    def rank(self) -> tuple[float, int]:
        """Who goes first when not all can: the lower."""
        return (self.due_ms, self.order)

    def expired(self, now_ms: float) -> bool:
        return self.deadline_ms is not None and now_ms >= self.deadline_ms

    def move(self, event: str) -> None:
        """Take the step `event` in the table of moves."""
        to = MOVES.get((self.state, event))
        if to is None:
            allowed = [e for s, e in MOVES if s == self.state]
            raise RuntimeError(f"sequence {self.id} is {self.state}: {event} is no move; allowed: {allowed or 'none'}")
        self.state = to


def check_tokens(tokens: Iterable[Any], vocabulary: int) -> list[int]:
    """Return a prompt's token ids as a list; InputError when it is empty or an id is not in the vocabulary."""
    ids = list(tokens)
    if not ids:
        raise InputError("prompt: found no tokens, expected at least 1")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InputError(f"prompt: found token id {_shown(token)} at {place}, expected 0 to {vocabulary - 1}")
    return ids
