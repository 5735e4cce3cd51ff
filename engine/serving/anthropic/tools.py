"""Conversion of Anthropic's tools, and of their choice, to the fields of a chat request. Pure."""

from __future__ import annotations

from typing import Any

from weftline.engine.serving.anthropic.blocks import OPTIONS
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.openai.tools import NAME_CHARS_MAX, TOOLS_MAX

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def tool_fields(tools: object, choice: object) -> dict[str, Any]:
    """Return `tools`, `tool_choice` and `parallel_tool_calls`; HttpError names an invalid or unsupported value."""
    fields: dict[str, Any] = {} if tools is None else {"tools": _functions(tools)}
    return fields if choice is None else fields | _choice(choice)


def _functions(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise HttpError(f"tools: expected a list of at most {TOOLS_MAX} objects", param="tools")
    return [_function(f"tools[{place}]", tool) for place, tool in enumerate(tools)]


def _function(where: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise HttpError(f"{where}: expected an object with name and input_schema", param="tools")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        why = "expected custom: the tools of Anthropic's servers and models are not available here"
        raise HttpError(f"{where}.type: found {kind!r:.60}, {why}", param="tools")
    OPTIONS["tools"].check(where, tool)
    name, about, strict = tool.get("name"), tool.get("description"), tool.get("strict")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise HttpError(f"{where}.name: expected a text of 1 to {NAME_CHARS_MAX} characters", param="tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise HttpError(f"{where}.input_schema: expected an object, a JSON schema", param="tools")
    if about is not None and not isinstance(about, str):
        raise HttpError(f"{where}.description: expected a text", param="tools")
    optional = {key: one for key, one in (("description", about), ("strict", strict)) if one is not None}
    return {"type": "function", "function": {"name": name, **optional, "parameters": tool["input_schema"]}}


def _choice(choice: object) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in (*_CHOICES, "tool"):
        raise HttpError("tool_choice: expected an object with a type of auto, any, tool or none", param="tool_choice")
    OPTIONS["tool_choice"].check("tool_choice", choice)
    name, single = choice.get("name"), choice.get("disable_parallel_tool_use")
    if kind == "tool" and not isinstance(name, str):
        raise HttpError("tool_choice.name: expected a text, the name of a tool", param="tool_choice")
    if single is not None and not isinstance(single, bool):
        raise HttpError("tool_choice.disable_parallel_tool_use: expected true or false", param="tool_choice")
    chosen = {"type": "function", "function": {"name": name}} if kind == "tool" else _CHOICES[kind]
    return {"tool_choice": chosen} | ({"parallel_tool_calls": False} if single else {})
