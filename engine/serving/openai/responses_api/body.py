"""Body of POST /v1/responses, and its translation to the body of a chat request. Pure.

Sampling options, constraints and variables of the chat template have the names that chat requests have for them. Errors
of the chat request get the names of the fields here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from weftline.engine.llm.params import Logprobs
from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.engine.serving.openai.bodies import (
    SAMPLING_FIELDS,
    TEMPLATE_FIELDS,
    ChatBody,
    Flag,
    OpenAiBody,
)
from weftline.engine.serving.openai.constraints import CONSTRAINT_FIELDS
from weftline.engine.serving.openai.fields import RESPONSES_REFUSED, RESPONSES_WITHOUT_EFFECT
from weftline.engine.serving.openai.responses_api.items import ITEM_TYPES, in_input
from weftline.engine.serving.openai.tools import TOOLS_MAX, check_function
from weftline.errors import InputError

Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Values of `include`. Pictures are always included; calls of built-in tools do not occur."""

CHAT_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""Fields of a chat request that have another name here."""

_APART = {*CHAT_NAMES, "n"}
GIVEN = {field: key for field, key in SAMPLING_FIELDS.items() if field not in _APART}
CONSTRAINTS = {field: keys for field, keys in CONSTRAINT_FIELDS.items() if field not in _APART}
TEMPLATE = ("chat_template_kwargs", "documents")
"""Fields that are passed to the chat request as they are."""

SHOWN: Mapping[str, type] = {"user": str, "safety_identifier": str, "prompt_cache_key": str, "max_tool_calls": int}
"""Fields without effect that the response repeats, where they have this type."""

_FORMATS = ("text", "json_object", "json_schema")
_NO_CHANGE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "text": {"verbosity": ("medium",)},
    "reasoning": {"summary": ("auto",), "generate_summary": ("auto",), "context": ("auto",), "mode": ("standard",)},
    "stream_options": {"include_obfuscation": (True, False)},
}
"""Keys of objects, and their values that change nothing here. A summary that is `auto` depends on the model."""

_FUNCTION_NO_CHANGE: Mapping[str, tuple[Any, ...]] = {
    "async": (False,),
    "defer_loading": (False,),
    "allowed_callers": (["direct"], []),
}
_OBJECT = {"type": "object"}
_CHOICES = ("none", "auto", "required")


class ReasoningOptions(Struct, frozen=True):
    """effort: as `reasoning_effort` of a chat."""

    effort: str | None = None


class TextOptions(Struct, frozen=True):
    """format: as `response_format` of a chat, with the keys of `json_schema` beside `type`."""

    format: dict[str, Any] | None = None


Key = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[Key, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
INPUT = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object", "properties": {"type": {"enum": [*ITEM_TYPES]}}}},
    ]
}


class ResponsesBody(OpenAiBody, frozen=True, kw_only=True):
    """Body of /v1/responses. `items.py` reads the input.

    given: those of GIVEN, CONSTRAINTS, TEMPLATE and SHOWN that the request has.
    """

    refused = RESPONSES_REFUSED
    without_effect = RESPONSES_WITHOUT_EFFECT

    input: Annotated[Any, Meta(extra_json_schema=INPUT)] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Flag = None
    stream: Flag = None
    stream_options: dict[str, Any] | None = None
    include: tuple[Included, ...] = ()
    metadata: Metadata | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: Annotated[Any, Meta(extra_json_schema={"type": "array", "items": _OBJECT})] = None
    tool_choice: Annotated[Any, Meta(extra_json_schema={"type": ["string", "object"]})] = None
    parallel_tool_calls: Flag = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Logprobs | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    given: dict[str, Any]

    @classmethod
    @cache
    def mapped(cls) -> Mapping[str, str]:
        template = {field: f"template.{TEMPLATE_FIELDS[field]}" for field in TEMPLATE}
        sampling = {field: f"sampling.{key}" for field, key in {**GIVEN, **CONSTRAINTS}.items()}
        return {**super().mapped(), **sampling, **template, "max_output_tokens": "sampling.tokens_max"}

    @classmethod
    def _derived(cls, fields: Mapping[str, Any], texts_max: int | None) -> dict[str, Any]:
        for field, harmless in _NO_CHANGE.items():
            _check_keys(field, fields.get(field), harmless)
        given = {field: fields[field] for field in (*GIVEN, *CONSTRAINTS, *TEMPLATE) if fields.get(field) is not None}
        return {
            "given": given | {field: fields[field] for field in SHOWN if isinstance(fields.get(field), SHOWN[field])}
        }

    def __post_init__(self) -> None:
        if self.input is None and self.previous_response_id is None:
            raise HttpError("input: expected a text, or a list of items", param="input")
        if self.top_logprobs and not self.has_logprobs:
            why = 'requires include: ["message.output_text.logprobs"]'
            raise HttpError(f"top_logprobs: {why}", param="top_logprobs")

    @property
    def has_logprobs(self) -> bool:
        """True if the text of the answer has log-probabilities."""
        return "message.output_text.logprobs" in self.include

    @property
    def has_encoded_reasoning(self) -> bool:
        """True if reasoning items have `encrypted_content`."""
        return "reasoning.encrypted_content" in self.include

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> ChatBody:
        """Return the chat request with these messages, those of the instructions first."""
        format = _format_of(self.text.format)
        second = next((field for field in CONSTRAINTS if field in self.given), None)
        if second is not None and format not in (None, {"type": "text"}):
            found = f"found text.format and {second}, expected at most one constraint"
            raise HttpError(f"{second}: {found}", param=second)
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice, allowed = _read_choice(self.tool_choice)
        fields = {
            **{field: one for field, one in self.given.items() if field not in SHOWN},
            "model": self.model,
            "messages": [*first, *messages],
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "response_format": format,
            "tools": _tools_of(self.tools, allowed),
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": self.has_logprobs or None,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
        }
        return _TranslatedChat.parse({field: one for field, one in fields.items() if one is not None})

    def echo(self) -> dict[str, Any]:
        """Return the fields of the request that its response repeats."""
        shown = {field: one for field, one in self.given.items() if field in SHOWN}
        return shown | {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "temperature": self.given.get("temperature"),
            "text": {"format": self.text.format or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.given.get("top_p"),
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
        }


class _TranslatedChat(ChatBody, frozen=True, kw_only=True):
    """A chat request whose errors name the fields of the Responses API."""

    def field_of(self, key: str) -> str:
        field = super().field_of(key)
        return CHAT_NAMES.get(field, field)


@contextmanager
def naming_fields(chat: ChatBody, places: Sequence[str] = ()) -> Iterator[None]:
    """Change errors about a chat request to errors about the fields here. places: as of `messages_of`, all messages."""
    with chat.naming_fields():
        try:
            yield
        except InputError as error:
            named, message = copy.copy(error), in_input(str(error), places)
            if name := CHAT_NAMES.get(error.param):
                named.param = name
                message = name + message.removeprefix(error.param) if message.startswith(error.param) else message
            named.args = (message,)
            raise named from None


def _check_keys(field: str, value: object, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse keys of an object that would change the answer, and unknown ones."""
    known = {"text": ("format",), "reasoning": ("effort",)}.get(field, ())
    for key, one in value.items() if isinstance(value, dict) else ():
        if one is None or key in known or one in harmless.get(key, ()):
            continue
        why = "not supported by this server" if key in harmless else "unknown key"
        raise unsupported(field, f"{field}.{key:.40}: {why}; leave it out")


def _format_of(format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` as the `response_format` of a chat."""
    if format is None:
        return None
    kind = format.get("type")
    if kind not in _FORMATS:
        raise HttpError(f"text.format.type: expected {', '.join(_FORMATS)}", param="text.format")
    if kind != "json_schema":
        return {"type": kind}
    if not isinstance(format.get("name"), str):
        raise HttpError("text.format.name: expected a text", param="text.format")
    if not isinstance(format.get("schema"), dict):
        raise HttpError("text.format.schema: expected an object, a JSON schema", param="text.format")
    return {"type": kind, "json_schema": {key: one for key, one in format.items() if key != "type"}}


def _tools_of(tools: Any, allowed: frozenset[str] | None) -> list[dict[str, Any]] | None:
    """Return the functions as tools of a chat. allowed: names of those that may be called; None: all."""
    if tools is None:
        return None
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise HttpError(f"tools: expected a list of at most {TOOLS_MAX} objects", param="tools")
    functions = [_function_of(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    missing = sorted((allowed or frozenset()) - {one["name"] for one in functions})
    if missing:
        raise HttpError(f"tool_choice: found {missing[0]!r:.80}, expected names in tools", param="tool_choice")
    kept = [one for one in functions if allowed is None or one["name"] in allowed]
    return [{"type": "function", "function": one} for one in kept]


def _function_of(where: str, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise unsupported("tools", f"{where}.type: found {kind!r:.40}, only function is supported")
    check_function(where, tool)
    for key, harmless in _FUNCTION_NO_CHANGE.items():
        if tool.get(key) is not None and tool[key] not in harmless:
            raise unsupported("tools", f"{where}.{key}: not supported by this server; leave it out")
    return {
        key: one for key, one in tool.items() if key != "type" and key not in _FUNCTION_NO_CHANGE and one is not None
    }


def _read_choice(choice: Any) -> tuple[Any, frozenset[str] | None]:
    """Return the `tool_choice` of a chat, and the names of the functions that may be called; None: all."""
    if choice is None or choice in _CHOICES:
        return choice, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, None
    if kind == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        tools = choice.get("tools")
        names = [one.get("name") if isinstance(one, dict) else None for one in tools or [None]]
        kinds = {one.get("type") if isinstance(one, dict) else None for one in tools or [None]}
        if isinstance(tools, list) and kinds == {"function"} and all(isinstance(name, str) for name in names):
            return choice["mode"], frozenset(map(str, names))
    forms = '{"type": "function", "name": ...} or {"type": "allowed_tools", "mode": ..., "tools": [...]} of functions'
    raise HttpError(f"tool_choice: expected none, auto, required, {forms}", param="tool_choice")
