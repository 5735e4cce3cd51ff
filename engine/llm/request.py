"""Requests to the LLM engine and their updates: options, checks against the model, conversion to sequences.

A request has one prompt and one answer or several. The first sequence computes the prompt; the others fork from it. The
sampler returns a `SampledToken` per row of logits, the executor makes a `TokenUpdate` of those of one answer, the
engine adds text, counts and the finish reason, and the node streams it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.llm.params import SamplingParams, sampling_error
from weftline.engine.llm.retention import Retention
from weftline.engine.llm.sequence import Sequence, check_tokens
from weftline.engine.llm.vision.positions import RotaryPositions
from weftline.engine.llm.vision.prompt import PromptImage
from weftline.errors import ContextOverflow, WeftlineError


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
    stop_string: one of `stop` that ended it; '' for any other end.
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
    stop_string: str = ""


SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: seed offset between answers of one request, so that they do not meet other requests' seeds."""


@dataclass(frozen=True, slots=True)
class LlmRequestOptions:
    """Options of a request besides prompt and sampling.

    priority:    higher first, with a limit: see `nodes.urgency.PRIORITY_STEP_MS`.
    deadline_ms: on the clock passed to `Engine.step`; the request fails then.
    salt:        requests with the same salt share cached prefixes.
    shared:      leading tokens of the operator: whole pages of them are shared by all salts.
    adapter:     name of a LoRA adapter; empty: none.
    retention:   how long parts of the prompt stay cached afterwards.
    pool:        it gets the result of the model's head instead of an answer.
    images:      pictures of the prompt, in order.
    caller:      name of the caller, which shares the engine with others in equal parts.
    """

    priority: int = 0
    deadline_ms: float | None = None
    salt: bytes = b""
    adapter: str = ""
    retention: tuple[Retention, ...] = ()
    pool: bool = False
    shared: int = 0
    images: tuple[PromptImage, ...] = ()
    caller: str = ""


DEFAULT_OPTIONS = LlmRequestOptions()


@dataclass(slots=True, eq=False)
class LlmRequest:
    """One request inside the engine: its live answers, and log-probabilities of its prompt."""

    id: int
    sequences: list[Sequence]
    adapter: str = ""
    prompt_logprobs: list[SampledToken] = field(default_factory=list)


def check_params(params: SamplingParams, vocabulary: int, has_text: bool) -> None:
    """Raise InputError where `params` does not fit the model."""
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token in getattr(params, name):
            if token >= vocabulary:
                raise sampling_error(name, f"found {token}, expected 0 to {vocabulary - 1}")
    for token in params.logit_bias:
        if int(token) >= vocabulary:
            raise sampling_error("logit_bias", f"found {token}, expected 0 to {vocabulary - 1}")
    if not has_text:
        unsupported = [n for n in ("stop", "bad_words", "echo", *params.constraint) if getattr(params, n)]
        if unsupported:
            raise sampling_error(unsupported[0], "this engine has no tokenizer; use token ids")


def to_sequences(
    id: int,
    prompt: SequenceOf[int],
    params: SamplingParams,
    options: LlmRequestOptions,
    *,
    vocabulary: int,
    context_max: int,
    arrived: int,
    now_ms: float,
    salt: bytes,
    slot: int,
    spell: Callable[[str], list[tuple[int, ...]]],
) -> list[Sequence]:
    """Return the request's sequences, the one that computes the prompt first; InputError for an invalid prompt."""
    if len(prompt) >= context_max:
        found = f"found {len(prompt)} tokens, expected at most {context_max - 1}; shorten it"
        raise ContextOverflow(f"prompt: {found}", param="prompt")
    known = check_tokens(prompt, vocabulary)
    limit = len(known) if options.pool else min(len(known) + max(params.tokens_max, 1), context_max)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    rotary = RotaryPositions(options.images) if any(image.grid for image in options.images) else None
    images = tuple(image.without_pixels() for image in options.images)  # a sequence lives longer than they are needed
    banned = tuple(spelled for word in params.bad_words for spelled in spell(word))
    made = [
        Sequence(
            id,
            list(known),
            len(known),
            limit,
            params,
            arrived + index,
            options.priority,
            salt,
            now_ms,
            options.deadline_ms,
            index=index,
            seed=(seed + index * SEED_STEP) % (1 << 63),
            banned=banned,
            adapter_slot=slot,
            retention=options.retention,
            own_salt=options.salt,
            shared=options.shared,
            images=images,
            rotary=rotary,
            caller=options.caller,
        )
        for index in range(params.n)
    ]
    made[0].skips_prefix_cache = params.prompt_logprobs is not None
    made[0].forks = tuple(made[1:])
    return made
