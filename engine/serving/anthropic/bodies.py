"""Bodies of Anthropic's routes, and the chat request that each is.

Every field has one effect, as those of OpenAI's routes (`openai/bodies.py`, `openai/fields.py`): it becomes a field of
the chat request, has no effect, or is refused by its name. Keys of objects inside the fields are in `blocks.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from msgspec import Meta

from weftline.engine.llm.template_options import THINKING as SWITCHES
from weftline.engine.serving.anthropic.blocks import OPTIONS
from weftline.engine.serving.anthropic.conversation import Turn, in_request, turns_of
from weftline.engine.serving.anthropic.tools import tool_fields
from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.engine.serving.openai.bodies import SAMPLING_FIELDS, ChatBody, Flag, OpenAiBody
from weftline.engine.serving.openai.fields import MESSAGES_REFUSED, MESSAGES_WITHOUT_EFFECT
from weftline.engine.serving.openai.ports import ChatPorts
from weftline.errors import InputError
from weftline.fields import worded

DEFAULT_EFFORT = "high"
"""Effort of a request that states none, as at Anthropic: accepted for a model without efforts."""

CHAT_FIELDS: Mapping[str, str] = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "priority": "priority",
}
"""Fields with the value of a field of the chat request."""

_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "continue_final_message": "messages",
    "add_generation_prompt": "messages",
}
"""Fields that set a field of the chat request, where the names differ."""

_BLOCK = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
_BLOCKS = {"type": "array", "items": _BLOCK}
_CONTENT = {"oneOf": [{"type": "string"}, _BLOCKS]}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_OBJECT = Meta(extra_json_schema={"type": "object"})


@dataclass(frozen=True, slots=True)
class Chat:
    """A request as a chat. turns: its messages, with their places in the request. names: as _NAMES."""

    body: ChatBody
    turns: Sequence[Turn]
    names: Mapping[str, str]

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Change errors about the chat to errors about the fields of the request."""
        try:
            with self.body.naming_fields():
                yield
        except InputError as error:
            raise self._named(error) from None

    def _named(self, error: InputError) -> InputError:
        named, message = copy.copy(error), in_request(str(error), self.turns)
        if error.param:
            named.param = self.names.get(error.param, error.param)
            message = message.removeprefix(f"{error.param}: ")
            message = message if message.startswith(named.param) else f"{named.param}: {message}"
        named.args = (message,)
        return named


class ConversationBody(OpenAiBody, frozen=True, kw_only=True):
    """Body of /v1/messages/count_tokens. `conversation.py` reads the messages, `tools.py` the tools."""

    refused = MESSAGES_REFUSED
    without_effect = MESSAGES_WITHOUT_EFFECT

    messages: Annotated[Any, worded("a list of messages", extra_json_schema=_MESSAGES)]
    system: Annotated[Any, Meta(extra_json_schema=_CONTENT)] = None
    tools: Annotated[Any, Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})] = None
    tool_choice: Annotated[Any, _OBJECT] = None
    thinking: Annotated[Any, _OBJECT] = None
    output_config: Annotated[Any, _OBJECT] = None
    output_format: Annotated[Any, _OBJECT] = None
    chat_template_kwargs: Annotated[dict[str, Any], _OBJECT] | None = None

    def chat(self, ports: ChatPorts) -> Chat:
        """Return the chat request; HttpError names the wrong field."""
        turns = turns_of(self.messages, self.system)
        fields = {"model": self.model, "messages": [one.message for one in turns], **self._same()}
        fields |= tool_fields(self.tools, self.tool_choice) | self._template(ports, turns) | self._format()
        return Chat(ChatBody.parse(fields), turns, self._names())

    @property
    def thinking_shown(self) -> bool:
        """False if blocks of thinking come without their text."""
        return not isinstance(self.thinking, dict) or self.thinking.get("display") != "omitted"

    def _names(self) -> dict[str, str]:
        """Return the field that set each field of the chat request, where the names differ."""
        names = dict(_NAMES)
        if not self.chat_template_kwargs:
            names["chat_template_kwargs"] = "thinking"
        if self._effort() is None:
            names["reasoning_effort"] = "thinking"
        if self.output_format is not None:
            names["response_format"] = "output_format"
        return names

    def _same(self) -> dict[str, Any]:
        found = {name: getattr(self, field, None) for field, name in CHAT_FIELDS.items()}
        return {name: one for name, one in found.items() if one is not None}

    def _template(self, ports: ChatPorts, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the fields for the chat template: its switch of reasoning, and the end of the prompt.

        What Anthropic has as a default changes nothing where the model has no input `template`.
        """
        kind, effort, has_template = _thinking(self.thinking), self._effort(), ports.template is not None
        variables: dict[str, Any] = {}
        if kind == "disabled" and effort in (None, DEFAULT_EFFORT):
            effort = "none"
        elif kind == "enabled" or (kind == "adaptive" and has_template) or kind == "disabled":
            variables |= dict.fromkeys(SWITCHES, kind != "disabled")
        if effort == DEFAULT_EFFORT:
            variables |= {"reasoning_effort": effort} if has_template else {}
            effort = None
        variables |= self.chat_template_kwargs or {}
        fields: dict[str, Any] = {"chat_template_kwargs": variables, "reasoning_effort": effort}
        if turns[-1].message["role"] == "assistant":
            fields |= _continuation(turns[-1])
        return fields

    def _effort(self) -> str | None:
        if self.output_config is None:
            return None
        if not isinstance(self.output_config, dict):
            raise HttpError("output_config: expected an object", param="output_config")
        OPTIONS["output_config"].check("output_config", self.output_config)
        effort = self.output_config.get("effort")
        if effort not in (None, "low", "medium", "high", "xhigh", "max"):
            raise HttpError("output_config.effort: expected low, medium, high, xhigh or max", param="output_config")
        return effort

    def _format(self) -> dict[str, Any]:
        """Return the constraint of the answer."""
        inner = (self.output_config or {}).get("format")
        if inner is not None and self.output_format is not None:
            raise HttpError("output_format: found output_config.format too, expected one", param="output_format")
        where = "output_config.format" if self.output_format is None else "output_format"
        format = inner if self.output_format is None else self.output_format
        if format is None:
            return {}
        if not isinstance(format, dict) or format.get("type") != "json_schema":
            raise HttpError(f"{where}: expected an object of type json_schema", param=where.partition(".")[0])
        OPTIONS["output_config.format"].check(where, format)
        if not isinstance(format.get("schema"), dict):
            raise HttpError(f"{where}.schema: expected an object, a JSON schema", param=where.partition(".")[0])
        return {"response_format": {"type": "json_schema", "schema": format["schema"]}}


class MessagesBody(ConversationBody, frozen=True, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, worded("a whole number from 1", ge=1)]
    stream: Flag = None
    stop_sequences: Annotated[Any, Meta(extra_json_schema={"type": "array", "items": {"type": "string"}})] = None
    temperature: Annotated[Any, Meta(extra_json_schema={"type": "number"})] = None
    top_p: Annotated[Any, Meta(extra_json_schema={"type": "number"})] = None
    top_k: Annotated[Any, Meta(extra_json_schema={"type": "integer"})] = None

    @classmethod
    @cache
    def mapped(cls) -> Mapping[str, str]:
        keys = {field: SAMPLING_FIELDS.get(name) for field, name in CHAT_FIELDS.items()}
        return {**super().mapped(), **{field: f"sampling.{key}" for field, key in keys.items() if key}}

    def chat(self, ports: ChatPorts) -> Chat:
        if ports.sampling is None:
            why = f"model {self.model} has no sampling options, and every request of this route limits its answer"
            raise unsupported("max_tokens", f"{why}; its operator adds an input `sampling: json`")
        return super().chat(ports)


BODIES: Mapping[str, type[OpenAiBody]] = {
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": ConversationBody,
}
"""Body of each route."""


def _thinking(thinking: object) -> str | None:
    """Return the kind of thinking that a request asks for. Its budget is not enforced; max_tokens limits the answer."""
    if thinking is None:
        return None
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if not isinstance(thinking, dict) or kind not in ("enabled", "adaptive", "disabled"):
        raise unsupported("thinking", f"found {kind!r:.40}, expected an object of type enabled, adaptive or disabled")
    OPTIONS["thinking"].check("thinking", thinking)
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise HttpError("thinking.display: expected summarized or omitted", param="thinking")
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and (type(budget) is not int or budget < 1):
        raise HttpError("thinking.budget_tokens: expected a whole number from 1", param="thinking")
    return str(kind)


def _continuation(last: Turn) -> dict[str, Any]:
    """Return the fields of a prompt that ends with the beginning of the answer."""
    if "tool_calls" in last.message:
        raise HttpError(f"{last.where}: found tool_use without a tool_result after it", param="messages")
    return {"continue_final_message": True, "add_generation_prompt": False}
