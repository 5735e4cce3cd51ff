"""Conversion of the fields `tools`, `tool_choice` and `parallel_tool_calls` to model inputs."""

from __future__ import annotations

from typing import Any

from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.engine.serving.openai.bodies import ChatBody
from weftline.engine.serving.openai.ports import ChatPorts

TOOLS_MAX = 128
NAME_CHARS_MAX = 256


def tool_inputs(body: ChatBody, ports: ChatPorts) -> dict[str, Any]:
    """Return the model's inputs for the tools of a chat request; HttpError names an invalid or unsupported field."""
    forced = _read_choice(body.tool_choice, _read_names(body.tools))
    if not body.has_tools:
        return {}
    if ports.tools is None:
        raise unsupported("tools", "the model has no tools; add an input `tools: json`")
    inputs: dict[str, Any] = {ports.tools: body.tools}
    if forced:
        inputs[_port("tool_choice", ports.tool_choice)] = body.tool_choice
    if body.parallel_tool_calls is False:
        inputs[_port("parallel_tool_calls", ports.parallel_tool_calls)] = False
    return inputs


def _port(field: str, port: str | None) -> str:
    if port is None:
        raise unsupported(field, f"the model has no such option; leave it out, or add an input `{field}: json`")
    return port


def _read_names(tools: Any) -> list[str]:
    """Return the names of the functions; HttpError unless all tools are functions."""
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise HttpError(f"tools: expected a list of at most {TOOLS_MAX} objects", param="tools")
    return [_read_name(f"tools[{place}]", tool) for place, tool in enumerate(tools)]


def _read_name(where: str, tool: Any) -> str:
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported("tools", f"{where}.type: found {kind!r:.40}, only function is supported")
    return check_function(f"{where}.function", tool.get("function") if isinstance(tool, dict) else None)


def check_function(where: str, function: Any) -> str:
    """Return the name of a function that the model may call; HttpError if the function is invalid."""
    function = function if isinstance(function, dict) else {}
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise HttpError(f"{where}.name: expected a text of 1 to {NAME_CHARS_MAX} characters", param="tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise HttpError(f"{where}.parameters: expected an object, a JSON schema", param="tools")
    return name


def _read_choice(choice: Any, names: list[str]) -> bool:
    """Return True if the choice requires a call; HttpError if it is invalid, or names no function of `tools`."""
    if choice in (None, "none", "auto"):
        return False
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        form = '{"type": "function", "function": {"name": ...}}'
        raise HttpError(f"tool_choice: expected none, auto, required or {form}", param="tool_choice")
    if not names:
        raise HttpError("tool_choice: a call is required, but the request has no tools", param="tool_choice")
    if choice != "required" and name not in names:
        raise HttpError(f"tool_choice: found {name!r:.80}, expected a name in tools", param="tool_choice")
    return True
