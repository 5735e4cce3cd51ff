"""Output of a response: its items, and the events that a stream of it consists of. Pure.

A whole response is written as a stream whose events are dropped, so that both have the same items.

    writer = ResponseWriter(header, encoded_reasoning=False)
    events = writer.opening()
    events += writer.add(TEXT, "Hel") + writer.add(TEXT, "lo")
    events += writer.finish(answer, completed_at)
    response = writer.response

Items are opened one at a time, when their first text arrives, and closed when another kind of text does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weftline.engine.serving.openai.completions import Usage
from weftline.engine.serving.openai.responses_api.answer import FunctionCall, GeneratedAnswer
from weftline.engine.serving.openai.responses_api.items import encoded_reasoning, new_id

TEXT, REASONING = "output_text", "reasoning_text"
"""Kinds of streamed text: types of the parts that it becomes."""

Event = dict[str, Any]

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons of incomplete responses by finish reason."""


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """The parts of a response that do not depend on its answer. created_at: seconds since the epoch."""

    echo: Mapping[str, Any]
    created_at: int
    store: bool
    id: str = field(default_factory=lambda: new_id("resp"))

    def to_json(self, status: str, output: Sequence[Mapping[str, Any]] = (), **more: Any) -> dict[str, Any]:
        first = {"id": self.id, "object": "response", "created_at": self.created_at, "status": status}
        empty = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**first, **empty, **self.echo, "store": self.store, "output": list(output), **more}


@dataclass(slots=True)
class _Part:
    """An open item with one part. kind: TEXT or REASONING."""

    kind: str
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the part."""
        text = {"type": self.kind, "text": "".join(self.texts)}
        return text if self.kind == REASONING else text | {"annotations": [], "logprobs": list(self.logprobs)}


class ResponseWriter:
    """Items and events of one response. encoded: reasoning items have `encrypted_content`.

    response: the finished response; empty before `finish` or `fail`.
    """

    def __init__(self, header: ResponseHeader, encoded: bool = False) -> None:
        self._header = header
        self._encoded = encoded
        self._items: list[dict[str, Any]] = []
        self._part: _Part | None = None
        self._chars = {TEXT: 0, REASONING: 0}
        self._scored = 0
        self._sequence = 0
        self.response: dict[str, Any] = {}

    @property
    def has_reasoning(self) -> bool:
        """True if the response has reasoning so far."""
        return self._chars[REASONING] > 0

    def opening(self) -> list[Event]:
        """Return the events that a stream begins with."""
        response = self._header.to_json("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def add(self, kind: str, text: str, logprobs: Sequence[bytes] = ()) -> list[Event]:
        """Add text, with the log-probabilities of its tokens as JSON; return the events about it."""
        if not text and not logprobs:
            return []
        part, events = self._part, list[Event]()
        if part is None or part.kind != kind:
            part, events = self._open(kind)
        scores = list(map(msgspec.Raw, logprobs))
        part.texts.append(text)
        part.logprobs += scores
        self._chars[kind] += len(text)
        self._scored += len(scores)
        more = {"logprobs": scores} if kind == TEXT else {}
        return [*events, self._part_event(part, "delta", delta=text, **more)]

    def finish(self, answer: GeneratedAnswer, completed_at: int) -> list[Event]:
        """Add the rest of an answer and complete the response; return the events about it."""
        reason = _INCOMPLETE.get(answer.finish)
        status = "completed" if reason is None else "incomplete"
        events = self.add(REASONING, answer.reasoning[self._chars[REASONING] :])
        events += self.add(TEXT, answer.text[self._chars[TEXT] :], (answer.logprobs or ())[self._scored :])
        if not self._chars[TEXT] and not answer.calls and not (reason and self.has_reasoning):
            events += self._open(TEXT)[1]
        events += self._close("completed" if answer.calls else status)
        for place, call in enumerate(answer.calls):
            events += self._call(call, status if place == len(answer.calls) - 1 else "completed")
        self.response = self._header.to_json(
            status,
            self._items,
            usage=usage_json(answer.usage),
            completed_at=None if reason else completed_at,
            incomplete_details=None if reason is None else {"reason": reason},
        )
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, problem: Mapping[str, Any]) -> list[Event]:
        """End the response with an error in OpenAI's format; return the events about it.

        Some clients read the event `error`, some its key `error`, and some the response.
        """
        limited = problem.get("type") == "rate_limit_error"
        error = {"code": "rate_limit_exceeded" if limited else "server_error", "message": problem["message"]}
        self._close("incomplete")
        self.response = self._header.to_json("failed", self._items, error=error) | {"store": False}
        parts = {name: problem.get(name) for name in ("code", "message", "param")}
        return [
            self._event("response.failed", response=self.response),
            self._event("error", **parts, error=dict(problem)),
        ]

    def _open(self, kind: str) -> tuple[_Part, list[Event]]:
        """Close the open item and open another one."""
        events = self._close("completed")
        part = self._part = _Part(kind, new_id("msg" if kind == TEXT else "rs"))
        item = self._item([], part)
        events += [
            self._event("response.output_item.added", output_index=len(self._items), item=item),
            self._event("response.content_part.added", **self._place(part), part=part.to_json()),
        ]
        return part, events

    def _close(self, status: str) -> list[Event]:
        """Close the open item, if there is one."""
        part = self._part
        if part is None:
            return []
        content = part.to_json()
        item = self._item([content], part, status)
        more = {"logprobs": content["logprobs"]} if part.kind == TEXT else {}
        events = [
            self._part_event(part, "done", text=content["text"], **more),
            self._event("response.content_part.done", **self._place(part), part=content),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._part = None
        return events

    def _item(self, content: list[dict[str, Any]], part: _Part, status: str = "in_progress") -> dict[str, Any]:
        if part.kind == TEXT:
            return {"id": part.id, "type": "message", "status": status, "role": "assistant", "content": content}
        item: dict[str, Any] = {"id": part.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if self._encoded:
            item["encrypted_content"] = encoded_reasoning(content[0]["text"]) if content else None
        return item

    def _call(self, call: FunctionCall, status: str) -> list[Event]:
        at = len(self._items)
        item = {"id": new_id("fc"), "type": "function_call", "status": status, "call_id": call.id, "name": call.name}
        place = {"item_id": item["id"], "output_index": at}
        begun, done = item | {"arguments": "", "status": "in_progress"}, item | {"arguments": call.arguments}
        self._items.append(done)
        kind = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=at, item=begun),
            self._event(f"{kind}.delta", **place, delta=call.arguments),
            self._event(f"{kind}.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=at, item=done),
        ]

    def _place(self, part: _Part) -> dict[str, Any]:
        """Return the place of the open part, which is the only one of its item."""
        return {"item_id": part.id, "output_index": len(self._items), "content_index": 0}

    def _part_event(self, part: _Part, verb: str, **more: Any) -> Event:
        return self._event(f"response.{part.kind}.{verb}", **self._place(part), **more)

    def _event(self, kind: str, **more: Any) -> Event:
        number = self._sequence
        self._sequence += 1
        return {"type": kind, "sequence_number": number, **more}


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
