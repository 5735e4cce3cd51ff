"""The answer of a model, in no particular protocol: text, reasoning, calls and counts, from a pipeline's outputs. Pure.

Large outputs are read in the JSON process (`json_jobs.py`), which sends a GeneratedAnswer back. Log-probabilities are
JSON by then, so that the server's process writes them without building their objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weftline.engine.serving.openai.completions import (
    Choice,
    TextOffsets,
    Usage,
    chat_logprobs_json,
    choices_of,
    text_tokens,
    token_bytes,
    usage_of,
)
from weftline.engine.serving.openai.ports import AnswerPorts
from weftline.engine.serving.openai.responses_api.items import arguments_of, new_id
from weftline.errors import StepError


class FunctionCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of a function. id: by which its result refers to it. arguments: JSON as text."""

    id: str
    name: str
    arguments: str


class GeneratedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One answer.

    finish:   stop, length, tool_calls or content_filter.
    logprobs: of the tokens of `text`, as JSON; None: not requested.
    """

    text: str
    reasoning: str
    calls: list[FunctionCall]
    finish: str
    usage: Usage
    logprobs: list[bytes] | None = None


def generated_answer(outputs: Mapping[str, Any], ports: AnswerPorts, logprobs: bool) -> GeneratedAnswer:
    """Return the answer in a model's outputs; StepError for calls that are none. logprobs: they were requested."""
    choice = choices_of(outputs, ports, logprobs, 0)[0]
    calls = [_call_of(one) for one in choice.tool_calls or ()]
    usage = usage_of(outputs.get(ports.usage or ""))
    scored = logprobs_json(message_tokens(choice)) if choice.logprobs is not None else None
    return GeneratedAnswer(choice.text, choice.reasoning, calls, choice.finish, usage, scored)


def _call_of(call: object) -> FunctionCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        expected = '{"id": ..., "function": {"name": ..., "arguments": ...}}'
        raise StepError(f"the model gave tool calls of another form than {expected}")
    id = call.get("id")
    return FunctionCall(
        id if isinstance(id, str) else new_id("call"), function["name"], arguments_of(function.get("arguments"))
    )


def message_tokens(choice: Choice) -> Sequence[Mapping[str, Any]]:
    """Return the tokens of an answer's text, without those of its reasoning and calls."""
    tokens = text_tokens(choice)
    if not (choice.reasoning or choice.tool_calls):
        return tokens
    whole = b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")
    text = choice.text.strip()
    start = whole.rfind(text) if choice.reasoning else whole.find(text)
    if not text or start < 0:
        return ()
    offsets = TextOffsets().add(tokens, whole)
    return [one for one, offset in zip(tokens, offsets, strict=True) if start <= offset < start + len(text)]


def logprobs_json(tokens: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the log-probabilities of tokens, each as JSON. Control tokens have no bytes."""
    found = []
    for one in chat_logprobs_json(tokens)["content"]:
        top = [_with_bytes(each) for each in one["top_logprobs"]]
        found.append(msgspec.json.encode(_with_bytes(one) | {"top_logprobs": top}))
    return found


def _with_bytes(token: Mapping[str, Any]) -> dict[str, Any]:
    return {**token, "bytes": token["bytes"] or []}
