"""Sampling parameters and stop conditions of a request.

`SamplingParams` is valid once constructed. Checks that need a model (existence of a token id, the tokens of a banned
word) are made when a request is added to the engine. Its fields are also the ranges that servers publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any

from msgspec import Meta

from weftline.errors import InputError
from weftline.fields import worded
from weftline.nodes.field_checks import check_fields, field_names, field_values, shown, unknown_key

CHOICES_MAX = 1024
"""Most texts of `choice`."""

Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenKey = Annotated[str, worded("a token id as text", pattern="^[0-9]{1,10}$")]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
"""A text of this length may be held back from a stream."""
Share = Annotated[float, Meta(ge=1e-6, le=1)]
Penalty = Annotated[float, Meta(ge=-10, le=10)]
"""Published APIs stop at 2."""
Logprobs = Annotated[int, Meta(ge=0, le=20)]
"""Number of likeliest tokens, limited as in published APIs."""
Answers = Annotated[int, Meta(ge=1, le=64)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options and stop conditions of one answer. InputError lists the fields that are out of range."""

    tokens_max: Annotated[int, Meta(ge=0, le=1 << 20)] = 128
    """Most tokens of the answer; it also ends where the model's context does. 0 scores the prompt alone, with echo or
    prompt_logprobs."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """0 always takes the likeliest token; 1 draws from the model's own distribution."""
    top_k: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    """Draw from the k likeliest tokens only; 0 is off."""
    top_p: Share = 1.0
    """Draw from the likeliest tokens that together reach this probability; 1 is off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Leave out tokens less likely than this share of the likeliest one; 0 is off."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    """Divides the logits of tokens in prompt or answer (multiplies negative ones); 1 is off."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of every token already in the answer."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit as often as it stands in the answer."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """The same seed gives the same answer, whatever else is in the batch; None: random."""
    stop: Annotated[tuple[Stop, ...], Meta(max_length=32)] = ()
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: Annotated[tuple[Token, ...], Meta(max_length=32)] = ()
    """Tokens that end the answer, besides the model's own; they are not part of its text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text token until `tokens_max`."""
    tokens_min: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """End-of-text and stop tokens cannot be drawn before the answer has this many tokens."""
    typical_p: Share = 1.0
    """Draw from the tokens whose surprise is nearest the expected one, up to this probability together; 1 is off."""
    logit_bias: Annotated[dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] = field(
        default_factory=dict
    )
    """Added to the logits of single tokens: {"token id": -100 to 100}."""
    allowed_token_ids: Annotated[tuple[Token, ...], Meta(max_length=4096)] = ()
    """Only these tokens can be chosen, and the end of text; empty is off."""
    bad_words: Annotated[tuple[Stop, ...], Meta(max_length=256)] = ()
    """Words that cannot be written, each as its tokens spell it at a text's start and after a space."""
    n: Answers = 1
    """Number of answers to one prompt, which is computed once; each has a seed of its own."""
    logprobs: Logprobs | None = None
    """Return each chosen token's log-probability, and those of so many likeliest ones; before any option above."""
    prompt_logprobs: Logprobs | None = None
    """The same for every token of the prompt; the first one has none."""
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
    choice: Annotated[tuple[str, ...], Meta(max_length=CHOICES_MAX)] = ()
    """The answer is one of these texts."""

    def __post_init__(self) -> None:
        check_fields(self, "sampling.")
        if self.tokens_max == 0 and not self.echo and self.prompt_logprobs is None:
            raise sampling_error("tokens_max", "found 0, expected at least 1, or echo or prompt_logprobs beside it")
        if self.tokens_min > self.tokens_max:
            expected = f"expected at most tokens_max, which is {self.tokens_max}"
            raise sampling_error("tokens_min", f"found {self.tokens_min}, {expected}")
        if len(self.constraint) > 1:
            raise InputError(f"sampling: found {' and '.join(self.constraint)}, expected at most one of them")

    @property
    def constraint(self) -> dict[str, Any]:
        """Return the constraint as {kind: value}; empty without one."""
        given = zip(CONSTRAINTS.items(), _constraints_of(self))
        return {kind: value for (kind, off), value in given if value is not off and value != off}

    @classmethod
    def read(cls, values: object, defaults: SamplingParams | None = None) -> SamplingParams:
        """Return `defaults` with the keys of the JSON object `values` changed; unknown keys are refused."""
        known = field_names(cls)
        if not isinstance(values, Mapping):
            raise InputError(f"sampling: found {shown(values)}, expected an object with keys {', '.join(known)}")
        for key in values:
            if key not in known:
                raise sampling_error(str(key)[:40], unknown_key(str(key)[:40], known))
        return cls(**values) if defaults is None else cls(**{**field_values(defaults), **values})


CONSTRAINTS = {"json_schema": None, "json_object": False, "regex": None, "grammar": None, "choice": ()}
"""The keys that constrain an answer, with the value by which each is off."""
_constraints_of = attrgetter(*CONSTRAINTS)


def sampling_error(key: str, problem: str) -> InputError:
    """Return the error of one key of `sampling`; `param` is the key."""
    return InputError(f"sampling.{key}: {problem}", param=key.partition(".")[0])
