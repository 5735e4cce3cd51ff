"""Anthropic response bodies: messages, and the events of a stream. Pure.

message_start                     counts of tokens are zeros: they are known at the end
content_block_start               thinking, text, or tool_use
content_block_delta ...
content_block_stop                a block ends where one of another type begins
message_delta                     stop_reason, and the counts
message_stop
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weftline.engine.serving.openai.completions import Choice, choices_of, usage_of
from weftline.engine.serving.openai.ports import AnswerPorts
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import parse

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The parts of a response that do not depend on the answer. The JSON process makes that of a large answer.

    shown: False if blocks of thinking come without their text.
    index: number of blocks that a stream has begun.   opened: type of the last one; '' for none, or an ended one.
    """

    id: str
    model: str
    ports: AnswerPorts
    shown: bool = True
    index: int = 0
    opened: str = ""

    def whole(self, answers: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the response, as JSON. answers: one, the outputs of the model."""
        [outputs] = answers
        choice = self._choice(outputs)
        body = self._message(self._content(choice)) | self._stop(choice)
        return msgspec.json.encode(body | {"usage": self._usage(outputs)})

    def opening(self) -> bytes:
        """Return the events that begin a stream."""
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "stop_details": None}
        message["usage"] = self._usage({})
        return frame({"type": "message_start", "message": message}) + frame({"type": "ping"})

    def ending(self, outputs: Mapping[str, Any], sent: Mapping[str, int]) -> list[bytes]:
        """Return the last events of a stream: the rest of the answer, its calls, stop_reason and usage.

        sent: characters of each output that were sent before.
        """
        choice, blocks = self._choice(outputs), BlockWriter(self)
        events = blocks.add("thinking", choice.reasoning[sent.get(self.ports.reasoning or "", 0) :])
        events += blocks.add("text", choice.text[sent.get(self.ports.output, 0) :])
        for call in choice.tool_calls or ():
            events += blocks.call(call)
        if not blocks.index:
            events += blocks.open({"type": "text", "text": ""})
        events += blocks.close()
        delta = {"type": "message_delta", "delta": self._stop(choice), "usage": self._usage(outputs)}
        return [frame(one) for one in (*events, delta, {"type": "message_stop"})]

    @property
    def signature(self) -> str:
        """Signature of blocks of thinking: it names their message, and is not checked when they come back."""
        return f"weftline-{self.id}"

    def _choice(self, outputs: Mapping[str, Any]) -> Choice:
        return choices_of(outputs, self.ports, False, 0)[0]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def _content(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the blocks of an answer; an empty one has a block of no text."""
        blocks: list[dict[str, Any]] = []
        if choice.reasoning:
            thinking = choice.reasoning if self.shown else ""
            blocks.append({"type": "thinking", "thinking": thinking, "signature": self.signature})
        if choice.text or not (choice.reasoning or choice.tool_calls):
            blocks.append({"type": "text", "text": choice.text})
        for call in choice.tool_calls or ():
            blocks.append(_tool_use(call) | {"input": read_arguments(call)[1]})
        return blocks

    def _stop(self, choice: Choice) -> dict[str, Any]:
        reason = "stop_sequence" if choice.stop else _STOP_REASONS.get(choice.finish, "end_turn")
        return {"stop_reason": reason, "stop_sequence": choice.stop or None, "stop_details": None}

    def _usage(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the counts. Every prompt is cached, so that no tokens are counted as written to the cache."""
        usage = usage_of(outputs.get(self.ports.usage or ""))
        thinking = {"output_tokens_details": {"thinking_tokens": usage.reasoning}} if usage.reasoning else {}
        return {
            "input_tokens": max(0, usage.prompt - usage.cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        } | thinking


class BlockWriter:
    """Events of the content blocks of a stream, from where `answer` is. index, opened: as in MessageAnswer."""

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer
        self.index = answer.index
        self.opened = answer.opened

    def add(self, type: str, text: str) -> list[dict[str, Any]]:
        """Return the events of more text, of type text or thinking; a block begins where the type changes."""
        if not text:
            return []
        empty = {"type": "text", "text": ""} if type == "text" else {"type": type, "thinking": "", "signature": ""}
        events = [] if self.opened == type else self.open(empty)
        shown = type == "text" or self._answer.shown
        return [*events, self._delta({"type": f"{type}_delta", type: text})] if shown else events

    def call(self, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a tool call, whose block stays open."""
        events = self.open(_tool_use(call) | {"input": {}})
        return [*events, self._delta({"type": "input_json_delta", "partial_json": read_arguments(call)[0]})]

    def open(self, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events that end the open block and begin an empty one."""
        events, self.opened, self.index = self.close(), block["type"], self.index + 1
        return [*events, {"type": "content_block_start", "index": self.index - 1, "content_block": block}]

    def close(self) -> list[dict[str, Any]]:
        """Return the events that end the open block, if there is one."""
        if not self.opened:
            return []
        signature = {"type": "signature_delta", "signature": self._answer.signature}
        signed = [self._delta(signature)] if self.opened == "thinking" else []
        self.opened = ""
        return [*signed, {"type": "content_block_stop", "index": self.index - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.index - 1, "delta": delta}


def frame(event: Mapping[str, Any]) -> bytes:
    """Encode an event, with its type as its name. JSON contains no line ends, so the data is one line."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _tool_use(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    id = call.get("id") if isinstance(call, Mapping) else None
    return {"type": "tool_use", "id": str(id or ""), "name": str(name or "")}


def read_arguments(call: Any) -> tuple[str, dict[str, Any]]:
    """Return the arguments of a call as JSON text, and as an object.

    Of a call that was cut these are the members that are whole; text that is no object becomes one.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    found = function.get("arguments") if isinstance(function, Mapping) else None
    text = found.strip() if isinstance(found, str) else json.dumps({} if found is None else found, ensure_ascii=False)
    kept, closing = _whole_members(text or "{}")
    try:
        read = parse(kept + closing)
    except NotJson:
        read = None
    if isinstance(read, dict):
        return kept, read
    return json.dumps({"arguments": text}, ensure_ascii=False), {"arguments": text}


_CLOSING = {"{": "}", "[": "]"}


def _whole_members(text: str) -> tuple[str, str]:
    """Return JSON text up to its last whole value, and the brackets that are open there.

    That is all of a text whose brackets are closed, also where something else follows.
    """
    stack: list[str] = []
    end, in_text, escaped = 0, False, False
    for place, char in enumerate(text):
        if in_text:
            in_text, escaped = escaped or char != '"', not escaped and char == "\\"
        elif char == '"':
            in_text = True
        elif char in _CLOSING or char == "," or (stack and char == stack[-1]):
            if char in _CLOSING:
                stack.append(_CLOSING[char])
            elif char != ",":
                stack.pop()
            end = place + (char != ",")
            if not stack:
                return text, ""
    return text[:end], "".join(reversed(stack))
