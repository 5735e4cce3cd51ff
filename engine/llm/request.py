"""Requests to the LLM engine and its updates.

A request has one prompt and wants one answer or several. Here it is checked against the model, and becomes sequences:
the first is read, the others fork from it when its prompt is computed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.reply import TokenInfo
from weftline.engine.llm.retention import Retention
from weftline.engine.llm.sequence import Sequence, check_tokens
from weftline.errors import InputError

SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: what a request's further answers add to its seed, so that no two seeds of people's meet."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked besides the prompt.

    priority:    the higher goes first, but not for ever: see `nodes.urgency.PRIORITY_STEP_MS`.
    deadline_ms: on the clock of whoever calls `step`; the request fails then.
    salt:        whose prefixes it may share.
    shared:      tokens at the prompt's beginning that are the operator's: whole pages of them are shared by all salts.
    adapter:     name of a LoRA adapter; empty for the model as it is.
    retention:   how long which part of the prompt is worth keeping afterwards.
    pool:        it wants no answer but what the model's head makes of the prompt.
    """

    priority: int = 0
    deadline_ms: float | None = None
    salt: bytes = b""
    adapter: str = ""
    retention: tuple[Retention, ...] = ()
    pool: bool = False
    shared: int = 0


USUAL = Wish()


@dataclass(slots=True)
class Update:
    """What a round brought one answer of a request.

    tokens: new tokens, end-of-text included.   text: new text; empty while a piece is held back.
    finish: why the answer ended, 'stop' or 'length'; None while it goes on.
    prompt_tokens, completion_tokens, cached_tokens: counts so far; cached ones were not computed but found.
    error:  why the request failed; nothing comes of it after this.
    index:  which of the request's answers it is.   last: all answers of the request have ended.
    logprobs: one for each of `tokens`, when they were asked for.
    prompt_logprobs: one for each of the prompt's tokens but the first, once, when they were asked for.
    pooled: what the model's head made of the prompt, for a request that wanted that.
    guessed_tokens, right_tokens: by speculation, so far.
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
    logprobs: tuple[TokenInfo, ...] = ()
    prompt_logprobs: tuple[TokenInfo, ...] = ()
    pooled: Any = None
    guessed_tokens: int = 0
    right_tokens: int = 0


@dataclass(slots=True, eq=False)
class LlmRequest:
    """One request inside the engine: its answers that still go on, and what was learned of its prompt."""

    id: int
    sequences: list[Sequence]
    adapter: str = ""
    prompt_logprobs: list[TokenInfo] = field(default_factory=list)


def check_params(params: SamplingParams, vocabulary: int, has_text: bool) -> None:
    """InputError where `params` names what the model does not have."""
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token in getattr(params, name):
            if token >= vocabulary:
                raise InputError(f"sampling.{name}: found {token}, expected 0 to {vocabulary - 1}")
    for token in params.logit_bias:
        if int(token) >= vocabulary:
            raise InputError(f"sampling.logit_bias: found {token}, expected 0 to {vocabulary - 1}")
    if not has_text:
        wanted = [n for n in ("stop", "bad_words", "echo", *params.constraint) if getattr(params, n)]
        if wanted:
            raise InputError(f"sampling.{wanted[0]}: this engine has no tokenizer; use token ids")


def to_sequences(
    id: int,
    prompt: SequenceOf[int],
    params: SamplingParams,
    wish: Wish,
    *,
    vocabulary: int,
    context_max: int,
    arrived: int,
    now_ms: float,
    salt: bytes,
    slot: int,
    spell: Callable[[str], list[tuple[int, ...]]],
) -> list[Sequence]:
    """Return the request's sequences, the one to be read first; InputError says what is wrong with its prompt."""
    if len(prompt) >= context_max:
        raise InputError(f"prompt: found {len(prompt)} tokens, expected at most {context_max - 1}; shorten it")
    known = check_tokens(prompt, vocabulary)
    limit = len(known) if wish.pool else min(len(known) + params.tokens_max, context_max)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    banned = tuple(spelled for word in params.bad_words for spelled in spell(word))
    made = [
        Sequence(
            id,
            list(known),
            len(known),
            limit,
            params,
            arrived + index,
            wish.priority,
            salt,
            now_ms,
            wish.deadline_ms,
            index=index,
            seed=(seed + index * SEED_STEP) % (1 << 63),
            banned=banned,
            adapter=slot,
            retention=wish.retention,
            own_salt=wish.salt,
            shared=wish.shared,
        )
        for index in range(params.n)
    ]
    made[0].whole = params.prompt_logprobs is not None
    made[0].forks = tuple(made[1:])
    return made


def usage(sequence: Sequence) -> dict[str, Any]:
    """Return an answer's counts, as `Update` has them."""
    return {
        "prompt_tokens": sequence.prompt,
        "completion_tokens": len(sequence.tokens) - sequence.prompt,
        "cached_tokens": sequence.cached,
        "guessed_tokens": sequence.guessed,
        "right_tokens": sequence.right,
    }
