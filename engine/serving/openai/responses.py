"""OpenAI response bodies: completions, stream chunks, usage and log-probabilities; pure."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FINISHED = ("stop", "length", "tool_calls", "content_filter")


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to one prompt, in no particular format.

    logprobs:   of the answer's tokens, as the llm step's `answers` has them.
    tool_calls: as the pipeline's `tool_calls` output has them.
    """

    index: int
    text: str
    finish: str = "stop"
    logprobs: Sequence[Mapping[str, Any]] | None = None
    tool_calls: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or more answers; zeros where the pipeline does not count them."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt + other.prompt, self.completion + other.completion, self.cached + other.cached)

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What all chunks of an answer begin with. created: seconds since the epoch."""

    object: str
    model: str
    created: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    def to_json(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.object.startswith("chat") else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_of(value: object) -> Usage:
    """Return what a `usage` output counts; zeros for what it does not say."""
    if not isinstance(value, Mapping):
        return Usage()
    counts = [value.get(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    return Usage(*[int(count) if isinstance(count, int | float) else 0 for count in counts])


def finish_of(usage: object, tool_calls: object = None) -> str:
    """Return why an answer ended, in OpenAI's words."""
    if tool_calls:
        return "tool_calls"
    found = usage.get("finish_reason") if isinstance(usage, Mapping) else None
    return found if found in FINISHED else "stop"


def choices_of(
    outputs: Mapping[str, Any], output: str, usage: str | None, answers: str | None, tool_calls: str | None, first: int
) -> list[Choice]:
    """Return the answers that a model's outputs hold; `first` is the index of the first."""
    count = outputs.get(usage) if usage else None
    calls = outputs.get(tool_calls) if tool_calls else None
    calls = calls if isinstance(calls, list) and calls else None
    several = outputs.get(answers) if answers else None
    if not isinstance(several, list) or not several:
        return [Choice(first, outputs.get(output) or "", finish_of(count, calls), None, calls)]
    # what stands at `output` may have been changed on its way by a later step; what was counted beside it was not
    if len(several) == 1:
        text = outputs.get(output)
        content = several[0].get("text", "") if text is None else text
        return [Choice(first, content, finish_of(several[0], calls), several[0].get("logprobs"), calls)]
    return [
        Choice(first + place, one.get("text", ""), finish_of(one), one.get("logprobs"))
        for place, one in enumerate(several)
    ]


def chat_choice(choice: Choice, wants_logprobs: bool) -> dict[str, Any]:
    """Return a whole answer as an element of `choices` of chat.completion."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.tool_calls:
        message |= {"tool_calls": list(choice.tool_calls), "content": choice.text or None}
    logprobs = chat_logprobs_json(choice.logprobs) if wants_logprobs else None
    return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


def chat_delta(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    """Return part of an answer as an element of `choices` of chat.completion.chunk."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def text_choice(
    index: int, text: str, finish: str | None, logprobs: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return an answer, or part of one, as an element of `choices` of text_completion."""
    columns = text_logprobs_json(logprobs) if logprobs is not None else None
    return {"index": index, "text": text, "logprobs": columns, "finish_reason": finish}


def chat_logprobs_json(tokens: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    content = [_token(one) | {"top_logprobs": [_token(top) for top in one.get("top", ())]} for one in tokens or ()]
    return {"content": content, "refusal": None}


def text_logprobs_json(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The older shape: columns instead of rows."""
    names = [str(one.get("token", "")) for one in tokens]
    offsets = list(itertools.accumulate(map(len, names), initial=0))[:-1]
    return {
        "tokens": names,
        "token_logprobs": [one.get("logprob") for one in tokens],
        "top_logprobs": [{str(t.get("token", "")): t.get("logprob") for t in one.get("top", ())} for one in tokens],
        "text_offset": offsets,
    }


def _token(one: Mapping[str, Any]) -> dict[str, Any]:
    token = str(one.get("token", ""))
    return {"token": token, "logprob": one.get("logprob"), "bytes": list(token.encode("utf-8", "replace"))}
