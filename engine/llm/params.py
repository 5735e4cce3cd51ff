"""Sampling parameters and stop conditions of a request.

`SamplingParams` is valid once constructed. Checks that need a model (existence of a token id, the tokens of a banned
word) are made when a request is added to the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weftline.errors import InputError

TOKENS_LIMIT = 1 << 20
"""Most tokens one answer may be allowed, far above any model's context."""
TOKEN_MAX = (1 << 31) - 1
"""Largest token id any model could have."""
STOPS_MAX = 32
"""Most stop strings, and most stop tokens, of one request; every new piece of text is searched for each of them."""
STOP_CHARS_MAX = 256
"""Longest stop string, in characters: as much text may be held back from a stream."""
CHOICES_MAX = 1024
"""Most texts of `choice`."""
ALLOWED_MAX = 4096
"""Most entries of `allowed_token_ids` and of `logit_bias`."""
BAD_WORDS_MAX = 256
"""Most words of `bad_words`."""
N_MAX = 64
"""Most answers to one prompt."""
LOGPROBS_MAX = 20
"""Most top tokens returned beside the chosen one, as in published APIs."""
BIAS_MAX = 100.0
"""Largest entry of `logit_bias`, either sign, as in published APIs."""
PENALTY_MAX = 10.0
"""Largest presence or frequency penalty, either sign; published APIs stop at 2."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options and stop conditions of one answer. InputError names a field that is out of range."""

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
    """The same seed gives the same answer, whatever else is in the batch; None: random."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own; they are not part of its text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text token until `tokens_max`."""
    tokens_min: int = 0
    """End-of-text and stop tokens cannot be drawn before the answer has this many tokens."""
    typical_p: float = 1.0
    """Draw from the tokens whose surprise is nearest the expected one, up to this probability together; 1 is off."""
    logit_bias: dict[str, float] = field(default_factory=dict)
    """Added to the logits of single tokens: {"token id": -100 to 100}."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens can be chosen, and the end of text; empty is off."""
    bad_words: tuple[str, ...] = ()
    """Words that cannot be written, each as its tokens spell it at a text's start and after a space."""
    n: int = 1
    """Number of answers to one prompt, which is computed once; each has a seed of its own."""
    logprobs: int | None = None
    """Tell each chosen token's log-probability, and those of so many likeliest ones; before any option above."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first."""
    echo: bool = False
    """The answer begins with the prompt's text."""
    skip_special_tokens: bool = True
    """Leave names of control tokens out of the text; some models write their tool calls with them."""
    json_schema: dict[str, Any] | None = None
    """The answer is JSON of this schema."""
    json_object: bool = False
    """The answer is a JSON object."""
    regex: str | None = None
    """The whole answer matches this regular expression."""
    grammar: str | None = None
    """The answer is a text of this grammar."""
    choice: tuple[str, ...] = ()
    """The answer is one of these texts."""

    def __post_init__(self) -> None:
        for name, most in _LISTS.items():
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, list | tuple):
                raise sampling_error(name, f"found {type(value).__name__}, expected a list")
            if len(value) > most:
                raise sampling_error(name, f"found a list of {len(value)}, expected at most {most} entries")
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
        _check_float("typical_p", self.typical_p, 1e-6, 1.0)
        _check_int("n", self.n, 1, N_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, LOGPROBS_MAX)
        for name in ("ignore_eos", "echo", "json_object", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise sampling_error(name, f"found {shown(getattr(self, name))}, expected true or false")
        for name in ("stop", "bad_words"):
            _check_texts(name, getattr(self, name))
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name):
                _check_int(name, token, 0, TOKEN_MAX)
        _check_bias(self.logit_bias)
        if len(self.constraint) > 1:
            raise InputError(f"sampling: found {' and '.join(self.constraint)}, expected at most one of them")

    @property
    def constraint(self) -> dict[str, Any]:
        """Return the constraint as {kind: value}; empty without one."""
        given = {name: getattr(self, name) for name in _CONSTRAINTS}
        # 0 equals False: a value of a type that a key does not take is no way to switch it off, but refused later
        return {k: v for k, v in given.items() if type(v) is not type(_CONSTRAINTS[k]) or v != _CONSTRAINTS[k]}

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
                raise sampling_error(str(key)[:40], f"unknown key; {hint}")
        return replace(defaults or cls(), **dict(values))


_LISTS = {
    "stop": STOPS_MAX,
    "stop_token_ids": STOPS_MAX,
    "allowed_token_ids": ALLOWED_MAX,
    "bad_words": BAD_WORDS_MAX,
    "choice": CHOICES_MAX,
}
_CONSTRAINTS = {"json_schema": None, "json_object": False, "regex": None, "grammar": None, "choice": ()}
"""The keys that constrain an answer, with the value by which each is off."""


def sampling_error(key: str, problem: str) -> InputError:
    """Return the error of one key of `sampling`; `param` is the key."""
    return InputError(f"sampling.{key}: {problem}", param=key.partition(".")[0])


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise sampling_error("logit_bias", f"found {type(bias).__name__}, expected an object")
    if len(bias) > ALLOWED_MAX:
        raise sampling_error("logit_bias", f"found {len(bias)} entries, expected at most {ALLOWED_MAX}")
    for token, value in bias.items():
        if not isinstance(token, str) or not token.isdecimal() or len(token) > 10 or int(token) > TOKEN_MAX:
            raise sampling_error("logit_bias", f"found the key {shown(token)}, expected a token id as text")
        _check_float(f"logit_bias.{token}", value, -BIAS_MAX, BIAS_MAX)


def _check_texts(name: str, texts: tuple[Any, ...]) -> None:
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= STOP_CHARS_MAX:
            found = shown(text)
            raise sampling_error(name, f"found {found}, expected texts of 1 to {STOP_CHARS_MAX} characters")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise sampling_error(name, f"found {shown(value)}, expected a whole number from {low} to {high}")


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    # Not a single comparison holds for NaN, and Python compares whole numbers of any size.
    if type(value) not in (int, float) or not low <= value <= high:
        raise sampling_error(name, f"found {shown(value)}, expected a number from {low:g} to {high:g}")


def shown(value: object) -> str:
    """Return the value as an error shows it; Python refuses to write out whole numbers of many thousand digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)[:40]
