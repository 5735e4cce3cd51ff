"""Tokens of a round on their way to the caller.

The sampler returns a `SampledToken` per row of logits. The executor turns those of one answer into a `TokenUpdate`,
the engine adds text, counts and the finish reason, and the node streams it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weftline.errors import WeftlineError


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token sampled from one row of logits, or a prompt token with its log-probability.

    sound:   False when the row has a NaN, nothing finite, or options exclude every token; `token` is then undefined.
    logprob: the token's natural log-probability before any sampling option, if requested.
    top:     the most likely tokens and their log-probabilities, the likeliest first.
    error:   failure of the row's grammar; not sound then.
    """

    token: int
    sound: bool = True
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: WeftlineError | None = None


@dataclass(slots=True)
class TokenUpdate:
    """New tokens of one answer of a request, from one round.

    tokens: new tokens, end-of-text included.   text: new text; empty while it is held back.
    finish: why the answer ended, 'stop' or 'length'; None while it continues.
    prompt_tokens, completion_tokens, cached_tokens: counts so far; cached ones came from the prefix cache.
    error:  failure of the request; no further update follows.
    index:  number of the answer within its request.   last: all answers of the request have ended.
    logprobs: one for each of `tokens`, if requested.
    prompt_logprobs: one for each prompt token but the first, once, if requested.
    pooled: result of the model's head, for a request without an answer.
    drafted_tokens, accepted_tokens: draft tokens of speculation so far, and how many were accepted.
    """

    id: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: Exception | None = None
    index: int = 0
    last: bool = False
    logprobs: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[SampledToken, ...] = ()
    pooled: Any = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
