"""Answers of a server with OpenAI's API: chunks of a chat completion to the outputs of the llm step.

Pure. A chunk is decoded into the fields used here, with their types checked; all other fields are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

TOOL_CALLS_MAX = 128
"""Most tool calls of one answer."""
DONE = b"[DONE]"
FINISHED = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
"""Finish reasons of the step by those of the server; a server's own words for an end, such as eos, are `stop`."""
ABORTED = ("abort", "error", "cancelled")
"""Finish reasons of answers that the server aborted."""


class InvalidAnswer(ValueError):
    """The server's answer is invalid, or reports an error; the message is for the log."""


class FunctionDelta(msgspec.Struct):
    """Part of a call's function."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct):
    """Part of a tool call."""

    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct):
    """New text and tool calls of an answer; servers have two names for the text of reasoning."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class TokenLogprob(msgspec.Struct):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]] | None = None
    top_logprobs: list[TokenLogprob] | None = None


class Logprobs(msgspec.Struct):
    """Log-probabilities of new tokens."""

    content: list[TokenLogprob] | None = None


class ChunkChoice(msgspec.Struct):
    """New parts of one answer. stop_reason, matched_stop: a stop string or token, as vLLM and SGLang have it."""

    index: int = 0
    delta: Delta | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class CachedTokens(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int | None = None


class ReasoningTokens(msgspec.Struct):
    """Details of the answer's tokens."""

    reasoning_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None


class Chunk(msgspec.Struct):
    """One event of a streamed chat completion."""

    choices: list[ChunkChoice] | None = None
    usage: ChunkUsage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class _Choice:
    """One answer so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    stop_string: str = ""

    def add(self, new: ChunkChoice) -> dict[str, Any]:
        """Add new parts; return the new log-probabilities, text and reasoning."""
        delta = new.delta or Delta()
        text, thought = delta.content or "", delta.reasoning_content or delta.reasoning or ""
        self.texts += [text] if text else []
        self.reasoning += [thought] if thought else []
        for call in delta.tool_calls or ():
            self._add_call(call)
        scored = (new.logprobs.content if new.logprobs is not None else None) or []
        self.logprobs += scored
        if new.finish_reason is not None:
            if new.finish_reason in ABORTED:
                raise InvalidAnswer(f"the server ended the answer with {new.finish_reason}")
            self.finish = FINISHED.get(new.finish_reason, "stop")
            matched = [one for one in (new.stop_reason, new.matched_stop) if isinstance(one, str)]
            self.stop_string = matched[0] if matched and self.finish == "stop" else ""
        found = {"logprobs": list(map(_scored, scored)), "text": text, "reasoning": thought}
        return {name: one for name, one in found.items() if one}

    def _add_call(self, new: CallDelta) -> None:
        index = max(0, len(self.calls) - 1) if new.index is None else new.index
        if index not in self.calls and len(self.calls) >= TOOL_CALLS_MAX:
            raise InvalidAnswer(f"more than {TOOL_CALLS_MAX} tool calls")
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self.calls.setdefault(index, empty)
        call["id"] = new.id or call["id"]
        if new.function is not None:
            call["function"]["name"] += new.function.name or ""
            call["function"]["arguments"] += new.function.arguments or ""

    def to_json(self, index: int, logprobs: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index, "text": "".join(self.texts), "finish_reason": self.finish}
        if self.stop_string:
            body["stop_string"] = self.stop_string
        if self.reasoning:
            body["reasoning"] = "".join(self.reasoning)
        if self.calls:
            body["tool_calls"] = list(self.calls.values())
        if logprobs:
            body["logprobs"] = list(map(_scored, self.logprobs))
        return body


class ExternalAnswer:
    """The answers of one request, from the events of the response."""

    def __init__(self, count: int, logprobs: bool) -> None:
        self._choices = [_Choice() for _ in range(count)]
        self._logprobs = logprobs
        self._usage = ChunkUsage()
        self.begun = False

    @property
    def finished(self) -> bool:
        """True when every answer has its finish reason; the counts of tokens may follow."""
        return all(one.finish is not None for one in self._choices)

    def add(self, event: bytes) -> dict[str, Any]:
        """Add an event; return new data of the streamed outputs. InvalidAnswer: it is no valid chunk, or an error."""
        try:
            chunk = _DECODER.decode(event)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidAnswer(f"no chunk of a chat completion: {error}") from None
        if chunk.error is not None:
            raise InvalidAnswer(f"the server reported an error: {chunk.error}")
        self._usage = chunk.usage or self._usage
        new: dict[str, Any] = {}
        for choice in chunk.choices or ():
            if not 0 <= choice.index < len(self._choices):
                raise InvalidAnswer(f"an answer with the index {choice.index} of {len(self._choices)}")
            new |= self._choices[choice.index].add(choice)
            self.begun = True
        return new if len(self._choices) == 1 else {}

    def outputs(self) -> dict[str, Any]:
        """Return the step's outputs; counts that the server did not send are None."""
        first, usage = self._choices[0], self._usage
        details, reasoning = usage.prompt_tokens_details, usage.completion_tokens_details
        counted = {"reasoning_tokens": reasoning.reasoning_tokens} if reasoning and reasoning.reasoning_tokens else {}
        return {
            "text": "".join(first.texts),
            "reasoning": "".join(first.reasoning),
            "tool_calls": list(first.calls.values()),
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": details.cached_tokens if details is not None else None,
                "finish_reason": first.finish,
                **({"stop_string": first.stop_string} if first.stop_string else {}),
                **counted,
            },
            "logprobs": list(map(_scored, first.logprobs)) if self._logprobs else [],
            "answers": [one.to_json(index, self._logprobs) for index, one in enumerate(self._choices)],
        }


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.token, "bytes": one.bytes, "logprob": one.logprob}


def _scored(one: TokenLogprob) -> dict[str, Any]:
    return _token(one) | {"top": [*map(_token, one.top_logprobs or ())]}
