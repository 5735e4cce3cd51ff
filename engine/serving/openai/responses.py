"""OpenAI response bodies: completions, stream chunks, usage and log-probabilities. Pure."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weftline.engine.serving.openai.ports import AnswerPorts

FINISHED = ("stop", "length", "tool_calls", "content_filter")


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to one prompt, in no particular format.

    logprobs:   of the answer's tokens, as in the llm step's `answers`; None: not requested.
    tool_calls: as in the pipeline's `tool_calls` output.
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
class AnswerHeader:
    """Fields that a completion, or each of its chunks, begins with. created: seconds since the epoch."""

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
    """Return the counts of a `usage` output; zeros for those that it lacks."""
    if not isinstance(value, Mapping):
        return Usage()
    counts = [value.get(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    return Usage(*[int(count) if isinstance(count, int | float) else 0 for count in counts])


def finish_of(usage: object, tool_calls: object = None) -> str:
    """Return OpenAI's finish reason of an answer."""
    if tool_calls:
        return "tool_calls"
    found = usage.get("finish_reason") if isinstance(usage, Mapping) else None
    return found if found in FINISHED else "stop"


def choices_of(outputs: Mapping[str, Any], ports: AnswerPorts, logprobs: bool, first: int) -> list[Choice]:
    """Return the answers in a model's outputs.

    logprobs: True if the request asked for them.
    first:    index of the first answer.
    """

    def logprobs_of(one: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        return (one.get("logprobs") or ()) if logprobs else None

    usage = outputs.get(ports.usage) if ports.usage else None
    calls = outputs.get(ports.tool_calls) if ports.tool_calls else None
    calls = calls if isinstance(calls, list) and calls else None
    text = outputs.get(ports.output)
    several = outputs.get(ports.answers) if ports.answers else None
    if not isinstance(several, list) or not several:
        return [Choice(first, text or "", finish_of(usage, calls), logprobs_of({}), calls)]
    if len(several) == 1:  # a later step may have changed the text on its way to `output`
        [one] = several
        content = one.get("text", "") if text is None else text
        return [Choice(first, content, finish_of(one, calls), logprobs_of(one), calls)]
    return [
        Choice(first + place, one.get("text", ""), finish_of(one), logprobs_of(one))
        for place, one in enumerate(several)
    ]


class Format(Protocol):
    """Format of the elements of `choices`."""

    object: str
    chunk_object: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a complete answer."""

    def opening(self) -> list[dict[str, Any]]:
        """Return what the chunks of a stream begin with."""

    def delta(self, text: str) -> dict[str, Any]:
        """Return more text of the first answer."""

    def ending(self, choice: Choice, rest: str) -> list[dict[str, Any]]:
        """Return the end of an answer. rest: its text that was not streamed."""


class ChatFormat:
    """Choices of chat.completion."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            message |= {"tool_calls": list(choice.tool_calls), "content": choice.text or None}
        logprobs = chat_logprobs_json(choice.logprobs) if choice.logprobs is not None else None
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def opening(self) -> list[dict[str, Any]]:
        return [_chat_delta(0, {"role": "assistant", "content": ""})]

    def delta(self, text: str) -> dict[str, Any]:
        return _chat_delta(0, {"content": text})

    def ending(self, choice: Choice, rest: str) -> list[dict[str, Any]]:
        index, deltas = choice.index, []
        if rest or choice.logprobs:
            logprobs = chat_logprobs_json(choice.logprobs) if choice.logprobs else None
            deltas.append(_chat_delta(index, {"content": rest} | ({"role": "assistant"} if index else {}), logprobs))
        if choice.tool_calls:
            calls = [_numbered(at, call) for at, call in enumerate(choice.tool_calls)]
            deltas.append(_chat_delta(index, {"tool_calls": calls}))
        return [*deltas, _chat_delta(index, {}) | {"finish_reason": choice.finish}]


class TextFormat:
    """Choices of text_completion."""

    object = chunk_object = "text_completion"

    def whole(self, choice: Choice) -> dict[str, Any]:
        logprobs = text_logprobs_json(choice.logprobs) if choice.logprobs is not None else None
        return {"index": choice.index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def delta(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None}

    def ending(self, choice: Choice, rest: str) -> list[dict[str, Any]]:
        return [self.whole(choice) | {"text": rest}]


def _numbered(index: int, call: Any) -> Any:
    """Return a tool call with its index, as chunks have it."""
    return {"index": index, **call} if isinstance(call, dict) else call


def _chat_delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def chat_logprobs_json(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = [_token(one) | {"top_logprobs": [_token(top) for top in one.get("top", ())]} for one in tokens]
    return {"content": content, "refusal": None}


def text_logprobs_json(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the log-probabilities of a text_completion: columns instead of rows."""
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
