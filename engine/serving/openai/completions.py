"""OpenAI response bodies: completions, stream chunks, usage and log-probabilities. Pure."""

from __future__ import annotations

import codecs
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import msgspec

from weftline.engine.serving.openai.ports import AnswerPorts
from weftline.errors import StepError

FINISHED = ("stop", "length", "tool_calls", "content_filter")


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to one prompt, in no particular format.

    logprobs:   of the answer's tokens, as in the llm step's `answers`; None: not requested.
    tool_calls: as in the pipeline's `tool_calls` output.
    reasoning:  as in the pipeline's `reasoning` output; '' without it.
    stop:       the stop string that ended it; '' if none did.
    """

    index: int
    text: str
    finish: str = "stop"
    logprobs: Sequence[Mapping[str, Any]] | None = None
    tool_calls: Sequence[Any] | None = None
    reasoning: str = ""
    stop: str = ""

    def ending(self) -> dict[str, Any]:
        """Return why it ended; `stop_reason`, the stop string, is vLLM's field."""
        return {"finish_reason": self.finish} | ({"stop_reason": self.stop} if self.stop else {})


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or more answers; zeros where the pipeline does not count them.

    truncated: of prompts, not read.   reasoning: of `completion`.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    truncated: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        counts = zip(astuple(self), astuple(other), strict=True)
        return Usage(*[one + more for one, more in counts])

    def prompt_json(self) -> dict[str, Any]:
        """Return the usage of a route that generates no text; with `truncated_tokens` where texts were cut."""
        cut = {"truncated_tokens": self.truncated} if self.truncated else {}
        return {"prompt_tokens": self.prompt, "total_tokens": self.prompt} | cut

    def to_json(self) -> dict[str, Any]:
        reasoning = {"completion_tokens_details": {"reasoning_tokens": self.reasoning}} if self.reasoning else {}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        } | reasoning


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
    kinds = ("prompt", "completion", "cached", "truncated", "reasoning")
    counts = [value.get(f"{kind}_tokens") for kind in kinds]
    return Usage(*[int(count) if isinstance(count, int | float) and math.isfinite(count) else 0 for count in counts])


def finish_of(usage: object, tool_calls: object = None) -> str:
    """Return OpenAI's finish reason of an answer."""
    found = usage.get("finish_reason") if isinstance(usage, Mapping) else None
    found = found if found in FINISHED else "stop"
    if found in ("stop", "tool_calls"):
        return "tool_calls" if tool_calls else "stop"
    return found


def choices_of(
    outputs: Mapping[str, Any], ports: AnswerPorts, logprobs: bool, first: int, echo: bool = False
) -> list[Choice]:
    """Return the answers in a model's outputs.

    logprobs: True if the request asked for them.
    first:    index of the first answer.
    echo:     True if answers begin with the prompt, whose tokens come first then.
    """
    several = outputs.get(ports.answers) if ports.answers else None
    answers = several if isinstance(several, list) and several else [{}]
    if echo and logprobs:
        prompt = answers[0].get("prompt_logprobs") or []
        answers = [{**one, "logprobs": [*prompt, *(one.get("logprobs") or ())]} for one in answers]
    if len(answers) > 1:
        return [_choice(first + place, one, logprobs) for place, one in enumerate(answers)]
    [one] = answers  # a later step may have changed its parts on their way to the outputs
    names = {"text": ports.output, "reasoning": ports.reasoning, "tool_calls": ports.tool_calls}
    parts = {part: outputs[name] for part, name in names.items() if name and outputs.get(name) is not None}
    usage = outputs.get(ports.usage) if ports.usage else None
    counted = usage if isinstance(usage, Mapping) else {}
    finish = {name: counted[name] for name in ("finish_reason", "stop_string") if name in counted}
    return [_choice(first, finish | dict(one) | parts, logprobs)]


def _choice(index: int, one: Mapping[str, Any], logprobs: bool) -> Choice:
    """Return an answer in the form of the llm step's `answers`."""
    calls = one.get("tool_calls")
    calls = calls if isinstance(calls, list) and calls else None
    _check_calls(calls)
    found = (one.get("logprobs") or ()) if logprobs else None
    finish, stop = finish_of(one, calls), one.get("stop_string")
    stop = stop if isinstance(stop, str) and finish == "stop" else ""
    return Choice(index, one.get("text") or "", finish, found, calls, one.get("reasoning") or "", stop)


def _check_calls(calls: list[Any] | None) -> None:
    """Raise StepError for tool calls with NaN and infinities, which msgspec writes as null."""
    try:
        json.dumps(calls, allow_nan=False)
    except ValueError:
        raise StepError("the model gave tool calls with NaN or an infinite number, which JSON lacks") from None


class Format(Protocol):
    """Format of the elements of `choices`."""

    object: str
    chunk_object: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a complete answer."""

    def opening(self) -> list[dict[str, Any]]:
        """Return what the chunks of a stream begin with."""

    def delta(self, text: str, reasoning: bool, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return more text of the first answer, or more of its reasoning, with the log-probabilities of its tokens."""

    def ending(self, choice: Choice, rest: str, reasoning_rest: str, scored: int) -> list[dict[str, Any]]:
        """Return the end of an answer.

        rest, reasoning_rest: its text and reasoning that were not streamed.   scored: tokens that were.
        """


class ChatFormat:
    """Choices of chat.completion."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            message |= {"tool_calls": list(choice.tool_calls), "content": choice.text or None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        logprobs = chat_logprobs_json(text_tokens(choice)) if choice.logprobs is not None else None
        return {"index": choice.index, "message": message, "logprobs": logprobs} | choice.ending()

    def opening(self) -> list[dict[str, Any]]:
        return [_chat_delta(0, {"role": "assistant", "content": ""})]

    def delta(self, text: str, reasoning: bool, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        scores = chat_logprobs_json(logprobs) if logprobs else None
        return _chat_delta(0, {"reasoning_content" if reasoning else "content": text}, scores)

    def ending(self, choice: Choice, rest: str, reasoning_rest: str, scored: int) -> list[dict[str, Any]]:
        index, deltas = choice.index, []
        role = {"role": "assistant"} if index else {}
        if reasoning_rest:
            deltas.append(_chat_delta(index, role | {"reasoning_content": reasoning_rest}))
        tokens = text_tokens(choice)[scored:]
        if rest or tokens:
            logprobs = chat_logprobs_json(tokens) if tokens else None
            deltas.append(_chat_delta(index, role | {"content": rest}, logprobs))
        for place, call in enumerate(choice.tool_calls or ()):
            deltas += [_chat_delta(index, {"tool_calls": [piece]}) for piece in _call_pieces(place, call)]
        return [*deltas, _chat_delta(index, {}) | choice.ending()]


class TextFormat:
    """Choices of text_completion."""

    object = chunk_object = "text_completion"

    def __init__(self) -> None:
        self._offsets = TextOffsets()

    def whole(self, choice: Choice, scored: int = 0) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            offsets = TextOffsets().add(choice.logprobs, choice.text)
            logprobs = text_logprobs_json(choice.logprobs[scored:], offsets[scored:])
        return {"index": choice.index, "text": choice.text, "logprobs": logprobs} | choice.ending()

    def opening(self) -> list[dict[str, Any]]:
        return []

    def delta(self, text: str, reasoning: bool, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        scores = text_logprobs_json(logprobs, self._offsets.add(logprobs, text)) if logprobs else None
        return {"index": 0, "text": text, "logprobs": scores, "finish_reason": None}

    def ending(self, choice: Choice, rest: str, reasoning_rest: str, scored: int) -> list[dict[str, Any]]:
        return [self.whole(choice, scored) | {"text": rest}]


def _call_pieces(index: int, call: Any) -> list[Any]:
    """Return a tool call as the deltas of a stream: its name, then its arguments."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return [{"index": index, **call}] if isinstance(call, dict) else [call]
    begun = {"index": index, **call, "function": function | {"arguments": ""}}
    return [begun, {"index": index, "function": {"arguments": function["arguments"]}}]


def _chat_delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def chat_logprobs_json(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = [_token(one) | {"top_logprobs": [_token(top) for top in one.get("top", ())]} for one in tokens]
    return {"content": content, "refusal": None}


def text_logprobs_json(tokens: Sequence[Mapping[str, Any]], offsets: Sequence[int]) -> dict[str, Any]:
    """Return the log-probabilities of a text_completion: columns instead of rows. The likeliest include the token."""
    return {
        "tokens": list(map(_text_name, tokens)),
        "token_logprobs": [_logprob(one) for one in tokens],
        "top_logprobs": [_likeliest(one) for one in tokens],
        "text_offset": list(offsets),
    }


def _likeliest(token: Mapping[str, Any]) -> dict[str, Any] | None:
    if token.get("logprob") is None:  # the first token of a prompt
        return None
    found: dict[str, Any] = {}
    for one in (*token.get("top", ()), token):
        found.setdefault(_text_name(one), _logprob(one))
    return found


def _text_name(one: Mapping[str, Any]) -> str:
    """Return the name of a token in a text_completion, where bytes that are no character are marked."""
    data = one.get("bytes")
    name = str(one.get("token", ""))
    return f"bytes:{name}" if data and bytes(data).decode("utf-8", "ignore").encode() != bytes(data) else name


class TextOffsets:
    """Number of characters of a text before each of its tokens, which come in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0
        self._begun = False

    def add(self, tokens: Sequence[Mapping[str, Any]], text: str) -> list[int]:
        """Return the offsets of `tokens`, whose text is `text`: of its first character where they are parts of one."""
        offsets: list[int] = []
        for one in tokens:
            data = token_bytes(one)
            if data and not self._begun:  # some tokenizers drop the space before a text
                self._begun = True
                self._chars -= data.startswith(b" ") and not text.startswith(" ")
            offsets.append(max(self._chars, 0))
            self._chars += len(self._decoder.decode(data))
        return offsets


def text_tokens(choice: Choice) -> Sequence[Mapping[str, Any]]:
    """Return the tokens of an answer without those behind its text, which ended it."""
    tokens = choice.logprobs or ()
    if choice.finish == "length":
        return tokens
    offsets = TextOffsets().add(tokens, choice.text)
    whole = b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")
    plain = not (choice.reasoning or choice.tool_calls) and whole.lstrip().startswith(choice.text.lstrip())
    end = len(choice.text) if plain else len(whole)
    kept = len(tokens)
    while kept and (offsets[kept - 1] >= end or not token_bytes(tokens[kept - 1])):
        kept -= 1
    return tokens[:kept]


def token_bytes(one: Mapping[str, Any]) -> bytes:
    """Return the bytes of a token in the text; none for a control token."""
    found = one.get("bytes", one)
    return str(one.get("token", "")).encode("utf-8", "replace") if found is one else bytes(found or ())


def _token(one: Mapping[str, Any]) -> dict[str, Any]:
    token = str(one.get("token", ""))
    data = one.get("bytes", list(token.encode("utf-8", "replace")))
    return {"token": token, "logprob": _logprob(one), "bytes": data}


class Completion(msgspec.Struct, frozen=True, tag=True):
    """The parts of a response that do not depend on the answers. The JSON process makes those of large answers.

    chat:     the route is /v1/chat/completions, else /v1/completions.
    logprobs: the request asked for log-probabilities.
    n:        answers to each prompt.
    usage:    a stream ends with its usage.
    echo:     texts begin with the prompt.
    """

    header: AnswerHeader
    ports: AnswerPorts
    chat: bool
    logprobs: bool
    n: int
    usage: bool = False
    echo: bool = False

    @property
    def format(self) -> Format:
        return ChatFormat() if self.chat else TextFormat()

    @property
    def common(self) -> dict[str, Any]:
        """Fields of every chunk of a stream."""
        return self.header.to_json([]) | ({"usage": None} if self.usage else {})

    def whole(self, answers: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the response, as JSON. answers: outputs of each prompt."""
        usage = Usage()
        choices: list[dict[str, Any]] = []
        for place, outputs in enumerate(answers):
            usage += usage_of(outputs.get(self.ports.usage or ""))
            choices += map(self.format.whole, choices_of(outputs, self.ports, self.logprobs, place * self.n, self.echo))
        return msgspec.json.encode(self.header.to_json(choices) | {"usage": usage.to_json()})

    def ending(self, outputs: Mapping[str, Any], sent: Mapping[str, int]) -> list[bytes]:
        """Return the last chunks of a stream, as JSON: the rest of each choice, and usage.

        sent: characters, or log-probabilities, of each output that were sent before.
        """
        chunks: list[dict[str, Any]] = []
        for one in choices_of(outputs, self.ports, self.logprobs, 0, self.echo):
            rests, scored = (one.text, one.reasoning), 0
            if one.index == 0:
                ports = self.ports
                rests = one.text[sent.get(ports.output, 0) :], one.reasoning[sent.get(ports.reasoning or "", 0) :]
                scored = sent.get(ports.logprobs or "", 0)
            chunks += [self.common | {"choices": [choice]} for choice in self.format.ending(one, *rests, scored)]
        if self.usage:
            chunks.append(self.common | {"usage": usage_of(outputs.get(self.ports.usage or "")).to_json()})
        return list(map(msgspec.json.encode, chunks))


LOGPROB_MIN = -9999.0
"""OpenAI's log-probability of a token that cannot occur: JSON has no infinity."""


def _logprob(one: Mapping[str, Any]) -> Any:
    """Return a token's log-probability; StepError for NaN and positive infinity."""
    found = one.get("logprob")
    return LOGPROB_MIN if found == -math.inf else finite(found, "a log-probability")


def finite(value: Any, what: str) -> Any:
    """Return a number that JSON has, and other values unchanged; StepError for NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        fix = "`finite: true` in the step of the model fails such items alone"
        raise StepError(f"the model gave {value} as {what}, which JSON lacks\n    fix: {fix}")
    return value
